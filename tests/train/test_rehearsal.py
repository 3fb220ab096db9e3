"""Nets that this machine cannot train are refused in one line, before anything is written."""

import pytest
import torch
from test_tokenizer_of_a_run import MODEL, SHARED, TOKENIZER
from toy import train

from visgen import config as configs
from visgen.config import UserError
from visgen.launch import memory
from visgen.train import main as program
from visgen.train.rehearsal import allocating, parameters, rehearse, require_memory

HUGE = 10**12


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        (TOKENIZER, "tokenizer.quantizer.codes", HUGE),
        (TOKENIZER, "tokenizer.quantizer.codes", 2**62),  # its bytes overflow
        (TOKENIZER, "tokenizer.quantizer.codes", 10**19),  # itself overflows
        (TOKENIZER, "tokenizer.width", 400_000),
        (TOKENIZER, "tokenizer.z_channels", HUGE),
        (f"{TOKENIZER} --objective.losses.adversarial 1", "discriminator.width", 400_000),
        (MODEL, "model.vocab", HUGE),
        (MODEL, "model.backbone.width", 400_000),
        (MODEL, "model.backbone.mlp_multiple_of", HUGE),
        (MODEL, "model.condition.classes", HUGE),
        (f"{MODEL} --objective.model.condition.kind text".replace("--objective.model.condition.classes 4", ""),
         "model.condition.tokens", HUGE),
    ],
)  # fmt: skip
def test_what_is_too_large_is_named(tmp_path, flags, field, value):
    words = [*SHARED.split(), *flags.split(), f"--objective.{field}", str(value), "--loop.out", str(tmp_path / "run")]
    with pytest.raises(UserError) as found:
        program.train(words)
    said = str(found.value)
    assert said.endswith(f"lower objective.{field} ({value})") and "\n" not in said and "memory" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "field"),
    [(MODEL, "model.backbone.layers"), (TOKENIZER, "tokenizer.res_blocks"), (TOKENIZER, "discriminator.layers")],
)
def test_modules_made_one_by_one_are_few(flags, field):
    with pytest.raises(UserError, match=rf"objective.{field} is 1001; it must be within \[1, 1000\]"):
        program.train([*SHARED.split(), *flags.split(), f"--objective.{field}", "1001"])


def test_the_bytes_are_those_of_weights_gradients_moments_and_average():
    config = configs.plugin_config("visgen.objectives", "toy")
    objective, available = rehearse(config), 0
    counts = parameters(objective)
    need = 16 * sum(counts.values()) + 4 * counts["model"] + 2 * 8  # `calls`, and its copy in the average
    require_memory(objective, config, need)
    with pytest.raises(UserError, match=r"there are 0 GB of memory; the largest tensor is model.model.encode.weight"):
        require_memory(objective, config, need - 1)
    objective.nets["critic"].requires_grad_(False)
    require_memory(objective, config, need - 12 * counts["critic"])
    assert available < memory() < 2**50


def test_a_machine_with_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(program, "memory", lambda: 1000)
    with pytest.raises(UserError, match="training these nets takes 0 GB and more"):
        train(tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_memory_that_is_refused_after_all_is_one_line():
    config = configs.plugin_config("visgen.objectives", "vq")
    for error in (
        RuntimeError("can't allocate memory\nframes"),
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
    ):
        with (
            pytest.raises(UserError, match=r"no memory for the nets .*; lower objective\.\w+") as found,
            allocating(config),
        ):
            raise error
        assert "frames" not in str(found.value)
    for bug in (RuntimeError("shapes do not fit"), TypeError("of another kind"), KeyError("overflow")):
        with pytest.raises(type(bug)), allocating(config):
            raise bug
