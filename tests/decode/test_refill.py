"""Rows that go on with the next image: each image is what it would be in a batch of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen.config import UserError
from visgen.decode import engine as engines
from visgen.decode import refill as refills
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.refill import refill, refillable
from visgen.decode.warp import Warp
from visgen.model import Model
from visgen.samplers.ar import AR
from visgen.samplers.ar import Config as ARConfig
from visgen.samplers.sjd import SJD, Config
from visgen.samplers.speculative import Config as SpeculativeConfig
from visgen.samplers.speculative import Speculative

LABELS, SEEDS = torch.arange(11) % 3, torch.arange(11) * 7 + 1


@pytest.mark.parametrize("rows", [1, 3, 4, 11, 20])
@pytest.mark.parametrize("drafting", ["coupled", "fresh", "pure_gumbel"])
def test_images_and_rounds_equal_those_of_plain_batches(
    make_model: Callable[..., Model], rows: int, drafting: Any
) -> None:
    engine = Engine(make_model(grid=(1, 5, 3)), Guidance(2.0), Warp(0.9, 12))
    sampler = SJD(Config(drafting, 4, "up"))  # `up` keeps laws of its own; 4 rows: as many as slots of the window
    seen: list[tuple[int, int]] = []
    found = refill(
        engine, sampler, {"label": LABELS}, Noise(SEEDS), rows, lambda done, total: seen.append((done, total))
    )
    engine.begin({"label": LABELS})
    wanted = engine.run(sampler, Noise(SEEDS))
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.rounds, wanted.rounds)
    assert seen[-1] == (11, 11) and len(set(seen)) == len(seen)
    assert wanted.nfe <= found.nfe <= int(wanted.nfe_per_image.sum())
    if rows == 1:
        assert found.nfe == int(wanted.nfe_per_image.sum()), "no evaluation is lost between two images"


def test_rows_that_go_on_see_values_that_are_not_finite_and_later_calls_do_not(
    make_model: Callable[..., Model],
) -> None:
    model, sampler = make_model(grid=(1, 5, 3)), SJD(Config("coupled", 4))
    expected = refill(Engine(model), sampler, {"label": LABELS}, Noise(SEEDS), 3).tokens
    engine, weight = Engine(model), model.condition.embedding_table.weight
    kept = weight.clone()
    weight[2].fill_(torch.nan)  # of one class
    try:
        with pytest.raises(UserError, match="not finite"):
            refill(engine, sampler, {"label": LABELS}, Noise(SEEDS), 3)
    finally:
        weight.copy_(kept)
    assert torch.equal(refill(engine, sampler, {"label": LABELS}, Noise(SEEDS), 3).tokens, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_captured_engine_refills_its_buffers(make_model: Callable[..., Model]) -> None:
    from visgen.decode.captured import CapturedEngine

    model, device = make_model(grid=(1, 5, 3)).to("cuda"), torch.device("cuda")
    labels, noise, sampler = LABELS.to(device), Noise(SEEDS.to(device)), SJD(Config("coupled", 4))
    captured, eager = CapturedEngine(model, Guidance(2.0)), Engine(model, Guidance(2.0))
    eager.begin({"label": labels})
    wanted = eager.run(sampler, noise)
    for _ in range(2):  # a graph is recorded, then replayed over the buffers of the decode before
        found = refill(captured, sampler, {"label": labels}, noise, 3)
        assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.rounds, wanted.rounds)


def test_looks_of_before_a_row_began_say_nothing_of_it(make_model: Callable[..., Model], monkeypatch: Any) -> None:
    """As on a GPU, where the host knows late."""

    class Late(engines.Looks):
        def __init__(self, device: torch.device) -> None:
            super().__init__(torch.device("cuda"))

        def _copied(self, flags: Tensor) -> tuple[Tensor, Any]:
            return flags.clone(), self

        def synchronize(self) -> None: ...

    engine, sampler = Engine(make_model(grid=(1, 5, 3))), SJD(Config("coupled", 5))
    wanted = refill(engine, sampler, {"label": LABELS}, Noise(SEEDS), 3)
    monkeypatch.setattr(refills, "Looks", Late)
    found = refill(engine, sampler, {"label": LABELS}, Noise(SEEDS), 3)
    assert torch.equal(found.tokens, wanted.tokens) and torch.equal(found.rounds, wanted.rounds)
    assert found.nfe > wanted.nfe


def test_what_cannot_be_refilled(make_model: Callable[..., Model]) -> None:
    engine = Engine(make_model())
    assert refillable(engine.model, SJD(Config()))
    assert not refillable(engine.model, AR(ARConfig()))
    assert not refillable(engine.model, Speculative(SpeculativeConfig()))
