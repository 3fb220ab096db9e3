"""Ranges in the types of configs: what is refused, under which name, and that programs ask before they work."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from visgen.checks import (
    Natural,
    Positive,
    Range,
    Rate,
    Scale,
    Seed,
    Share,
    UserError,
    Weight,
    check,
    cut,
    printable,
    shown,
)
from visgen.config import build, load, plugin_config
from visgen.train import main as program
from visgen.train.main import TrainConfig


@dataclass(frozen=True)
class Inner:
    rate: Rate = 0.5


@dataclass(frozen=True)
class Values:
    positive: Positive = 1
    natural: Natural = 0
    seed: Seed = 0
    share: Share = 1.0
    rate: Rate = 0.0
    weight: Weight = 0.0
    scale: Scale = 1e-9
    optional: Positive | None = None
    pair: tuple[Rate, Rate] = (0.0, 0.9)
    many: Annotated[tuple[Positive, ...], Range(1)] = (1, 2)
    perhaps: tuple[Share, Share] | None = None
    inner: Inner = field(default_factory=Inner)
    free: tuple[float, ...] = ()
    text: str = ""
    mode: Literal["auto", "fast"] = "auto"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"seed": 2**63 - 1, "share": 0.0, "optional": 3, "many": (5,), "perhaps": (0.0, 1.0), "rate": 1 - 1e-9},
        {"free": (math.nan, -1.0), "text": "-1"},
        {"positive": 10**400},
        {"positive": np.int64(3), "share": np.float32(0.5)},
    ],
)
def test_what_lies_within(values: dict[str, Any]) -> None:
    check(Values(**values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"positive": 0}, "x.positive is 0; it must be at least 1"),
        ({"natural": -1}, "x.natural is -1; it must be at least 0"),
        ({"seed": 2**63}, f"x.seed is {2**63}; it must be within [0, {2**63 - 1}]"),
        ({"share": 1.5}, "x.share is 1.5; it must be within [0, 1]"),
        ({"share": math.nan}, "x.share is nan; it must be finite and within [0, 1]"),
        ({"rate": 1.0}, "x.rate is 1.0; it must be within [0, 1)"),
        ({"weight": -0.1}, "x.weight is -0.1; it must be at least 0"),
        ({"scale": 0.0}, "x.scale is 0.0; it must be above 0"),
        ({"scale": math.inf}, "x.scale is inf; it must be finite and above 0"),
        ({"optional": 0}, "x.optional is 0; it must be at least 1"),
        ({"pair": (0.0, 1.0)}, "x.pair[1] is 1.0; it must be within [0, 1)"),
        ({"many": ()}, "x.many is (); the number of its values must be at least 1"),
        ({"many": (1, 2, 0)}, "x.many[2] is 0; it must be at least 1"),
        ({"perhaps": (0.0, 2.0)}, "x.perhaps[1] is 2.0; it must be within [0, 1]"),
        ({"inner": Inner(-1.0)}, "x.inner.rate is -1.0; it must be within [0, 1)"),
        ({"positive": np.int64(0)}, "x.positive is 0; it must be at least 1"),
        ({"positive": 1.5}, "x.positive is 1.5; it must be a whole number"),
        ({"share": "0.5"}, "x.share is '0.5'; it must be a number"),
        ({"optional": "none"}, "x.optional is 'none'; it must be a whole number or None"),
        ({"mode": "fats"}, "x.mode is 'fats'; it must be auto or fast"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_what_lies_outside(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as found:
        check(Values(**values), "x")
    assert str(found.value) == message


def test_load_and_build_check() -> None:
    with pytest.raises(UserError, match=r"^inner.rate is 2.0; "):
        load(Values, ["--inner.rate", "2"])
    config = plugin_config("visgen.tokenizers", "conv_vq", quantizer=plugin_config("visgen.quantizers", "vq", codes=0))
    with pytest.raises(UserError, match=r"^tokenizer.quantizer.codes is 0; it must be at least 1$"):
        build(config)


BACKBONE, TOKENIZER = "--objective.model.backbone", "--objective.kind vq --objective.tokenizer"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--optim.lr 0", "optim.lr is 0.0"),
        ("--optim.lr nan", "optim.lr is nan"),
        ("--optim.betas 0.9 1", "optim.betas[1] is 1.0"),
        ("--optim.eps 0", "optim.eps is 0.0"),
        ("--optim.weight-decay -0.1", "optim.weight_decay is -0.1"),
        ("--optim.final 1.1", "optim.final is 1.1"),
        ("--ema.decay 1", "ema.decay is 1.0"),
        ("--loop.seed -1", "loop.seed is -1"),
        ("--loop.clip -1", "loop.clip is -1.0"),
        (f"{BACKBONE}.layers 0", "objective.model.backbone.layers is 0"),
        (f"{BACKBONE}.heads 0", "objective.model.backbone.heads is 0"),
        (f"{BACKBONE}.width -8", "objective.model.backbone.width is -8"),
        (f"{BACKBONE}.kv-heads 0", "objective.model.backbone.kv_heads is 0"),
        (f"{BACKBONE}.token-dropout 1", "objective.model.backbone.token_dropout is 1.0"),
        (f"{BACKBONE}.heads 7", "width 768 must be a multiple of heads 7; change"),
        (f"{BACKBONE}.kv-heads 5", "width 768 must be a multiple of heads 12, and heads of kv_heads 5; change"),
        (f"{BACKBONE}.heads 128", "head dimension 6 (width / heads) must be a multiple of 4"),
        ("--objective.model.condition.dropout 1.5", "objective.model.condition.dropout is 1.5"),
        ("--objective.model.vocab 0", "objective.model.vocab is 0"),
        (f"{TOKENIZER}.width 0", "objective.tokenizer.width is 0"),
        (f"{TOKENIZER}.decoder-width 0", "objective.tokenizer.decoder_width is 0"),
        (f"{TOKENIZER}.multipliers", "objective.tokenizer.multipliers is ()"),
        (f"{TOKENIZER}.norm-groups 0", "objective.tokenizer.norm_groups is 0"),
        (f"{TOKENIZER}.quantizer.codes 0", "objective.tokenizer.quantizer.codes is 0"),
        (f"{TOKENIZER}.quantizer.channels -1", "objective.tokenizer.quantizer.channels is -1"),
        ("--objective.kind vq --objective.discriminator.width 0", "objective.discriminator.width is 0"),
    ],
    ids=lambda x: x.rpartition(".")[2] if x.startswith("--") else "",
)
def test_training_refuses_before_it_makes_a_directory(tmp_path: Path, flags: str, message: str) -> None:
    with pytest.raises(UserError) as found:
        program.train([*flags.split(), "--loop.out", str(tmp_path / "run")])
    assert message in str(found.value) and "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


def test_every_default_lies_within() -> None:
    check(TrainConfig())


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("blockwise", {"steps": 10**8}, r"steps is 100000000; it must be within \[1, 10000\]"),
        ("blockwise", {"frames": 10**6}, "frames is 1000000"),
        ("blockwise", {"shift": 1e-30}, "shift is 1e-30"),
        ("masked", {"temperature": 1e30}, r"temperature is 1e\+30"),
        ("causal", {"shift": 1e300}, "shift is"),
        ("cspec", {"length": 10**21}, "length is 1000000000000000000000"),
    ],
)
def test_samplers_bound_what_would_hang_or_overflow(kind: str, values: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        build(plugin_config("visgen.samplers", kind, **values))


# ---------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain caf\u00e9 \u732b \U0001f468\u200d\U0001f469", "plain caf\u00e9 \u732b \U0001f468\u200d\U0001f469"),
        ("\x1b[31m\x9b2J\x7f\t\n\r\x00", r"\x1b[31m\x9b2J\x7f\t\n\r\x00"),
        ("\u202eabc\u2066\u2028\ufeff\U000e0041\udcff", r"\u202eabc\u2066\u2028\ufeff\U000e0041\udcff"),
        (Path("/a\x07b"), r"/a\x07b"),
    ],
)
def test_control_characters_are_escaped_and_nothing_else(text: Any, expected: str) -> None:
    assert printable(text) == expected == printable(printable(text))
    assert "\x1b" not in str(UserError(text)) and "\u202e" not in str(UserError(text))


def test_a_message_has_a_bounded_length_and_keeps_its_end() -> None:
    assert cut("abc", 3) == "abc" and cut("a" * 50 + "z" * 50, 30) == "a" * 18 + " ... " + "z" * 7
    said = str(UserError(f"value {'x' * 10_000_000}; make it shorter"))
    assert len(said) == 2000 and said.startswith("value x") and said.endswith("x; make it shorter")


def test_a_value_of_any_size_is_shown_shortly() -> None:
    value: Any = "x"
    for _ in range(12):
        value = [value] * 9
    assert len(shown(value)) <= 200 and len(shown({"a" * 1000: {"b": list(range(1000))}})) <= 200
    assert shown([1, "b"]) == "[1, 'b']" and shown("\x1b") == r"'\x1b'"


def test_an_error_of_a_worker_is_its_last_line() -> None:
    raised = (
        "Caught UserError in DataLoader worker process 0.\nOriginal Traceback ...\nvisgen.checks.UserError: it is so\n"
    )
    assert str(UserError(raised)) == "it is so"
