"""The `speculative` sampler against a twin that decodes one image at a time, and what it refuses."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import reference
import torch

from visgen import checkpoint, run_files
from visgen.config import UserError
from visgen.decode.engine import Engine, Generation
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.model import Model
from visgen.samplers.ar import AR
from visgen.samplers.ar import Config as ARConfig
from visgen.samplers.speculative import PRIOR, Config, Speculative

MakeModel = Callable[..., Model]
GUIDED = (Guidance(2.0, (0.1, 0.9), "linear"), Warp(0.9, 12, 0.95))
LABELS, SEEDS = [0, 2, 1, 1], [41, 7, 3, 5]


@pytest.fixture(scope="module")
def model(make_model: MakeModel) -> Model:
    return make_model(grid=(1, 5, 3))


@pytest.fixture(scope="module")
def near(make_model: MakeModel) -> Model:
    """A draft model that is often right: the model with a little noise on its head."""
    made = make_model(grid=(1, 5, 3))
    made.head.output.weight.add_(0.1 * torch.randn(16, 32, generator=torch.Generator().manual_seed(1)))
    return made


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a model as a run directory."""

    def written(model: Model, **facts: str) -> Path:
        step = tmp_path / run_files.step_name(3)
        step.mkdir()
        checkpoint.save_module(step / run_files.WEIGHTS, model, model.config, extra_metadata=facts)
        (step / run_files.META).write_text("{}")
        return tmp_path

    return written


def decoded(engine: Engine, sampler: Any, labels: list[int], seeds: list[int]) -> Generation:
    engine.begin({"label": torch.tensor(labels)})
    return engine.run(sampler, Noise(torch.tensor(seeds)))


@pytest.mark.parametrize("settings", [(Guidance(), Warp()), GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize(("length", "threshold"), [(1, 0.5), (4, 1.0), (4, 0.6), (40, 0.9)])
def test_tokens_and_rounds_equal_the_twins(
    model: Model, near: Model, write: Callable[..., Path], length: int, threshold: float, settings: Any
) -> None:
    sampler = Speculative(Config(write(near), length, threshold))
    found = decoded(Engine(model, *settings), sampler, LABELS, SEEDS)
    for row, (label, seed) in enumerate(zip(LABELS, SEEDS, strict=True)):
        law, draft = (reference.model_law(m, label, settings[1], settings[0]) for m in (model, near))
        twin = reference.speculative_sample(law, draft, 15, length, threshold, seed, PRIOR)
        assert (found.tokens[row].tolist(), found.rounds[row].tolist()) == twin


def test_a_perfect_draft_model_is_never_refused(model: Model, write: Callable[..., Path]) -> None:
    found = decoded(Engine(model), Speculative(Config(write(model), 4, 1.0)), LABELS, SEEDS)
    assert found.nfe == 3 and found.nfe_per_image.tolist() == [3] * 4
    assert found.notes["drafts_per_evaluation"] == 4.0


def test_a_row_drafts_more_where_its_drafts_stay(model: Model, near: Model, make_model: MakeModel) -> None:
    far = make_model(grid=(1, 5, 3), seed=9, head_std=3.0)
    engines = [Engine(model), Engine(model)]
    for engine, draft in zip(engines, (near, far), strict=True):
        engine.once(("draft", None), lambda draft=draft: Engine(draft))
    drafts = [
        decoded(e, Speculative(Config(None, 8, 0.6)), LABELS, SEEDS).notes["drafts_per_evaluation"] for e in engines
    ]
    assert drafts[0] > 2 > drafts[1] >= 1


def test_greedy_is_greedy_ar(model: Model, near: Model, write: Callable[..., Path]) -> None:
    engine = Engine(model, Guidance(2.0), Warp(0.0))
    found = decoded(engine, Speculative(Config(write(near))), LABELS, SEEDS)
    assert torch.equal(found.tokens, decoded(engine, AR(ARConfig()), LABELS, SEEDS).tokens) and found.nfe < 15


def refusal(engine: Engine, config: Config) -> str:
    with pytest.raises(UserError) as refused:
        decoded(engine, Speculative(config), [0], [0])
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_no_draft_model_is_refused(model: Model) -> None:
    assert "sampler.draft is needed" in refusal(Engine(model), Config())
    assert "nowhere" in refusal(Engine(model), Config(Path("nowhere")))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ({"grid": (1, 4, 4)}, r"its grid is \(1, 4, 4\), the model's is \(1, 5, 3\); pass a draft model"),
        ({"vocab": 8}, "its vocab is 8, the model's is 16; pass a draft model"),
        ({"classes": 5}, "its condition is label \\(classes 5\\), the model's is label \\(classes 3\\)"),
        ({"condition": {"dropout": 0.0}}, "was trained without a null class; set guidance.scale to 1"),
    ],
    ids=["grid", "vocab", "classes", "null"],
)
def test_another_draft_model_is_refused(
    model: Model, make_model: MakeModel, write: Callable[..., Path], made: dict[str, Any], said: str
) -> None:
    draft = write(make_model(**{"grid": (1, 5, 3), **made}))
    message = refusal(Engine(model, Guidance(2.0)), Config(draft))
    assert message.startswith(f"sampler.draft {draft}") and re.search(said, message)


def test_a_draft_model_of_another_tokenizer_is_refused(model: Model, write: Callable[..., Path]) -> None:
    draft = Config(write(model, tokenizer="b" * 64))
    message = refusal(Engine(model, tokenizer="a" * 12), draft)
    assert "its tokenizer is bbbbbbbbbbbb, the model's is aaaaaaaaaaaa; pass a draft model" in message
    assert decoded(Engine(model, tokenizer="b" * 12), Speculative(draft), [0], [0]).nfe < 15
    assert decoded(Engine(model), Speculative(draft), [0], [0]).nfe < 15, "an older file names none"


def test_a_draft_model_drafts_at_other_sizes_too(model: Model, write: Callable[..., Path]) -> None:
    draft, larger = Config(write(model, tokenizer="b" * 64), 4, 1.0), model.at((1, 6, 4))
    found = decoded(Engine(larger, tokenizer="b" * 12), Speculative(draft), [0], [0])
    assert found.tokens.shape[1] == 24 and found.notes["drafts_per_evaluation"] == 4.0, "it is the model itself"
    assert "its grid is (1, 5, 3), the model's is (1, 6, 4)" in refusal(Engine(larger), draft)


def test_a_student_is_no_draft_model(model: Model, make_student: MakeModel, write: Callable[..., Path]) -> None:
    draft = write(make_student(grid=(1, 5, 3)))
    assert "is a student, which draws all tokens at once" in refusal(Engine(model), Config(draft))


def test_a_damaged_draft_model_is_refused_and_forgotten(make_model: MakeModel, model: Model) -> None:
    draft, sampler = make_model(grid=(1, 5, 3), seed=1), Speculative(Config(None, 2))
    engine = Engine(model)
    engine.once(("draft", None), lambda: Engine(draft))
    expected = decoded(engine, sampler, LABELS, SEEDS).tokens
    for weight in (draft.head.output.weight, next(draft.backbone.parameters())):
        kept = weight.clone()
        weight.fill_(torch.nan)
        with pytest.raises(UserError, match="not finite"):
            decoded(engine, sampler, LABELS, SEEDS)
        weight.copy_(kept)
        assert torch.equal(decoded(engine, sampler, LABELS, SEEDS).tokens, expected)
