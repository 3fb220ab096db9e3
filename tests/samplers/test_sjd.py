"""The `sjd` sampler against a twin that decodes one image at a time, and against plain autoregression."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from visgen.decode.engine import Engine, Generation
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.model import Model
from visgen.samplers.ar import AR
from visgen.samplers.ar import Config as ARConfig
from visgen.samplers.sjd import SJD, Config

MakeModel = Callable[..., Model]
DRAFTINGS, INITS = ("fresh", "coupled", "gumbel", "pure_gumbel"), ("uniform", "left", "up", "repeat")
GUIDED = (Guidance(2.0, (0.1, 0.9), "linear"), Warp(0.9, 12, 0.95))


def decoded(
    engine: Engine, sampler: Any, labels: Sequence[int], seeds: Sequence[int], known: Any = None, on_step: Any = None
) -> Generation:
    engine.begin({"label": torch.tensor(labels)}, known)
    return engine.run(sampler, Noise(torch.tensor(seeds)), on_step)


def pinned(known: Mapping[int, int], rows: int, count: int) -> tuple[Tensor, Tensor] | None:
    tokens, mask = torch.zeros(rows, count, dtype=torch.int64), torch.zeros(rows, count, dtype=torch.bool)
    for k, token in known.items():
        tokens[:, k], mask[:, k] = token, True
    return (tokens, mask) if known else None


@pytest.mark.parametrize(
    ("settings", "known"),
    [((Guidance(), Warp()), {}), (GUIDED, {0: 3, 5: 7, 6: 0, 10: 2, 14: 1})],
    ids=["plain", "guided with known tokens"],
)
@pytest.mark.parametrize("init", INITS)
@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_tokens_and_rounds_equal_the_twins(
    make_model: MakeModel, drafting: Any, init: Any, settings: Any, known: Mapping[int, int]
) -> None:
    model, labels, seeds = make_model(grid=(1, 5, 3), kv_heads=2), [0, 2], [41, 7]
    engine = Engine(model, *settings)
    for window in (2, 6):  # narrower and wider than a row of the grid
        found = decoded(engine, SJD(Config(drafting, window, init)), labels, seeds, pinned(known, 2, 15))
        for row, (label, seed) in enumerate(zip(labels, seeds, strict=True)):
            law = reference.model_law(model, label, settings[1], settings[0])
            columns = 1 if init == "left" else 3
            twin = reference.jacobi_sample(law, 15, window, drafting, init, columns, seed, known)
            assert (found.tokens[row].tolist(), found.rounds[row].tolist()) == twin


@pytest.mark.parametrize("window", [1, 2, 7, 64])
@pytest.mark.parametrize("settings", [(Guidance(), Warp()), GUIDED], ids=["plain", "guided"])
def test_pure_gumbel_draws_the_tokens_of_ar(make_model: MakeModel, settings: Any, window: int) -> None:
    engine = Engine(make_model(grid=(1, 7, 5)), *settings)
    labels, seeds = [i % 3 for i in range(8)], list(range(8))
    expected = decoded(engine, AR(ARConfig()), labels, seeds)
    for init in INITS:
        found = decoded(engine, SJD(Config("pure_gumbel", window, init)), labels, seeds)
        assert torch.equal(found.tokens, expected.tokens)
        assert (found.nfe < expected.nfe) == (window > 1)


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_a_window_of_one_token_is_ar(make_model: MakeModel, drafting: Any) -> None:
    engine = Engine(make_model())
    expected = decoded(engine, AR(ARConfig()), [0, 1], [5, 6])
    found = decoded(engine, SJD(Config(drafting, 1)), [0, 1], [5, 6])
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.rounds, expected.rounds)


@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("warp", [Warp(0.0), Warp(top_k=1)], ids=["cold", "top-1"])
def test_greedy_is_greedy_ar(make_model: MakeModel, drafting: Any, warp: Warp) -> None:
    engine = Engine(make_model(grid=(1, 5, 5)), Guidance(2.0), warp)
    expected = decoded(engine, AR(ARConfig()), [0, 1, 2], [0, 0, 0]).tokens
    for init in INITS:
        assert torch.equal(decoded(engine, SJD(Config(drafting, 6, init)), [0, 1, 2], [1, 2, 3]).tokens, expected)


@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("grid", [(1, 5, 7), (1, 1, 3), (1, 1, 1), (2, 3, 3)])
def test_rows_finish_apart_and_do_not_depend_on_each_other(make_model: MakeModel, drafting: Any, grid: Any) -> None:
    engine, sampler = Engine(make_model(grid=grid), *GUIDED), SJD(Config(drafting, 5, "up"))
    labels, seeds = [i % 3 for i in range(8)], list(range(100, 108))
    together = decoded(engine, sampler, labels, seeds)
    if engine.tokens > 9:
        assert len(together.nfe_per_image.unique()) > 2, "ragged"
    assert together.nfe == together.nfe_per_image.max()
    for rows in (slice(0, 1), slice(1, 2), slice(2, 4), slice(5, 8)):
        alone = decoded(engine, sampler, labels[rows], seeds[rows])
        assert torch.equal(alone.tokens, together.tokens[rows]) and torch.equal(alone.rounds, together.rounds[rows])


def test_the_run_ends_with_its_last_row(make_model: MakeModel) -> None:
    seen: list[tuple[int, int]] = []
    found = decoded(
        Engine(make_model(grid=(1, 6, 6))),
        SJD(Config("coupled", 8)),
        [0, 1],
        [0, 1],
        on_step=lambda *step: seen.append(step),
    )
    assert seen == [(k, 36) for k in range(1, found.nfe)] + [(36, 36)] and found.nfe < 36


def test_known_tokens_cost_no_evaluation_of_their_own(make_model: MakeModel) -> None:
    engine = Engine(make_model())
    all_known = pinned({k: k for k in range(16)}, 1, 16)
    found = decoded(engine, SJD(Config("coupled", 4)), [0], [0], all_known)
    assert found.nfe == 4 and found.tokens.tolist() == [list(range(16))]
    assert found.accepted.tolist() == [12]


# ------------------------------------------------------------------------------------------------- window: auto


class Clock(Engine):
    """An engine on which an iteration at width W takes 1 + `slope` (W - 1) seconds."""

    slope = 0.0
    trials = 0

    def laps(self, sampler: Any, state: Any, noise: Noise, length: int, warmup: int = 3) -> Iterator[float]:
        self.trials += 1
        for _ in super().laps(sampler, state, noise, length, warmup):
            self.positions = state.position.flatten().tolist()
            yield 1 + self.slope * (len(state.slots) - 1)


def test_auto_takes_the_widest_window_where_it_is_free_and_none_where_it_cannot_pay(make_model: MakeModel) -> None:
    engine, sampler = Clock(make_model(grid=(1, 8, 8))), SJD(Config("pure_gumbel", "auto"))
    expected = decoded(engine, AR(ARConfig()), [0, 1], [5, 6]).tokens
    free = decoded(engine, sampler, [0, 1], [5, 6])
    assert free.notes["window"] > 1 and free.nfe < 64 and torch.equal(free.tokens, expected)
    assert engine.trials == 5 and free.notes["trial"].keys() == {1, 8, 16, 32, 64}
    decoded(engine, sampler, [0], [5])
    assert engine.trials == 5, "chosen once"
    decoded(engine, sampler, [0, 1, 2], [5, 6, 7])
    assert engine.trials == 10, "a larger batch is another question"
    dear = Clock(make_model(grid=(1, 8, 8)))
    dear.slope = 1.0
    found = decoded(dear, sampler, [0, 1], [5, 6])
    assert found.notes["window"] == 1 and found.nfe == 64 and torch.equal(found.tokens, expected)
    assert found.notes["trial"].keys() == {1, 8}, "wider ones are not tried"


def test_a_trial_leaves_no_trace(make_model: MakeModel) -> None:
    engine = Clock(make_model(grid=(1, 8, 8)))
    found = decoded(engine, SJD(Config("coupled", "auto")), [0, 1], [5, 6])
    assert found.notes["window"] > 1 and engine.trials > 1
    expected = decoded(Engine(engine.model), SJD(Config("coupled", found.notes["window"])), [0, 1], [5, 6])
    assert torch.equal(found.tokens, expected.tokens) and torch.equal(found.rounds, expected.rounds)


class Biased(Engine):
    """An engine on which the widest window takes long unless the trial drew an even first token."""

    def laps(self, sampler: Any, state: Any, noise: Noise, length: int, warmup: int = 3) -> Iterator[float]:
        for _ in super().laps(sampler, state, noise, length, warmup):
            wide = len(state.slots) == self.tokens
            yield 1.0 if wide and bool((state.tokens[:, 0] % 2 == 0).all()) else 1e3 if wide else 100.0


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_a_window_that_was_chosen_draws_what_it_draws_when_it_is_given(make_model: MakeModel, drafting: Any) -> None:
    """Whatever the clock favours, no image has a say: one window for all seeds, and the tokens of that window."""
    model, windows = make_model(), set()
    for seeds in ([5, 6], [7, 8], [9, 10], [11, 12], [13, 14], [15, 16]):
        found = decoded(Biased(model), SJD(Config(drafting, "auto")), [0, 1], seeds)
        windows.add(found.notes["window"])
        given = decoded(Engine(model), SJD(Config(drafting, found.notes["window"])), [0, 1], seeds)
        assert torch.equal(found.tokens, given.tokens) and torch.equal(found.rounds, given.rounds)
    assert len(windows) == 1


def test_a_trial_has_seeds_that_no_image_has(make_model: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    real = Noise.bits

    def bits(self: Noise, *given: Any) -> Tensor:
        seen.append(self.seeds)
        return real(self, *given)

    engine = Clock(make_model())
    with monkeypatch.context() as patch:
        patch.setattr(Noise, "bits", bits)
        engine.begin({"label": torch.tensor([0, 1])})
        SJD(Config("coupled", "auto")).init(engine, Noise(torch.tensor([0, 1])))
    assert seen and all((seeds < 0).all() for seeds in seen)


def test_a_trial_goes_on_to_half_of_the_tokens(make_model: MakeModel) -> None:
    engine = Clock(make_model(grid=(1, 8, 8)))
    free = decoded(engine, SJD(Config("fresh", "auto")), [0, 1], [5, 6])
    assert sum(engine.positions) / 2 >= 32, "of the last width tried"
    tokens = free.notes["trial"][free.notes["window"]]["tokens"]
    assert tokens == pytest.approx(64 / free.nfe_per_image.float().mean().item(), rel=0.4), (
        "and so it knows what it gains"
    )
