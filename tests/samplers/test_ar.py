"""The `ar` sampler against a twin without cache, and its law against enumeration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import pytest
import reference
import torch

from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise, Stream
from visgen.decode.warp import Warp
from visgen.model import Model
from visgen.samplers.ar import AR, Config

MakeModel = Callable[..., Model]


@pytest.mark.parametrize(
    ("warp", "guidance"),
    [
        (Warp(), Guidance()),
        (Warp(0.7, 9, 0.9), Guidance(1.0)),
        (Warp(0.0), Guidance(3.0)),
        (Warp(1.2, top_p=0.8), Guidance(2.0, (0.2, 0.8), "cosine")),
    ],
    ids=["plain", "filters", "greedy", "guided"],
)
@pytest.mark.parametrize("known", [{}, {0: 3, 1: 15, 6: 0, 15: 7}], ids=["free", "known"])
def test_tokens_equal_sampling_without_a_cache(
    make_model: MakeModel, warp: Warp, guidance: Guidance, known: Mapping[int, int]
) -> None:
    model, labels, seeds = make_model(kv_heads=2), [0, 2], [41, -7]
    engine = Engine(model, guidance, warp)
    tokens, mask = torch.zeros(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.bool)
    for k, token in known.items():
        tokens[:, k], mask[:, k] = token, True
    engine.begin({"label": torch.tensor(labels)}, (tokens, mask) if known else None)
    found = engine.run(AR(Config()), Noise(torch.tensor(seeds))).tokens
    for row, (label, seed) in enumerate(zip(labels, seeds, strict=True)):
        expected = reference.ar_sample(
            reference.model_law(model, label, warp, guidance),
            16,
            lambda k, i, seed=seed: reference.gumbel(seed, k, i, Stream.TOKEN),
            known,
        )
        assert found[row].tolist() == expected


def test_later_tokens_react_to_known_ones_and_earlier_ones_do_not(make_model: MakeModel) -> None:
    engine, seeds = Engine(make_model()), torch.arange(40)
    batch = {"label": seeds % 3}
    mask = torch.zeros(40, 16, dtype=torch.bool)
    mask[:, 4:8] = True

    def decoded(token: int | None) -> torch.Tensor:
        engine.begin(batch, None if token is None else (torch.full((40, 16), token), mask))
        return engine.run(AR(Config()), Noise(seeds)).tokens

    free, low, high = decoded(None), decoded(2), decoded(11)
    assert (low[:, 4:8] == 2).all() and (high[:, 4:8] == 11).all()
    assert torch.equal(low[:, :4], free[:, :4]) and torch.equal(high[:, :4], free[:, :4])
    assert (low[:, 8:] != high[:, 8:]).float().mean() > 0.3


# --------------------------------------------------------------------------------------------- the law, exactly

DRAWS, V, N = 100_000, 4, 3


@pytest.fixture(scope="module")
def small(make_model: MakeModel) -> Model:
    return make_model(grid=(1, 1, N), vocab=V, classes=1, layers=1, heads=2, width=8, head_std=0.35)


def _z(model: Model, sampled: tuple[Warp, Guidance], claimed: tuple[Warp, Guidance], seed: int) -> float:
    """Chi-square of `DRAWS` sequences against the enumerated law, as a standard score."""
    law = reference.model_law(model, 0, *claimed)
    probability = [
        math.prod(law(list(sequence[:k]))[sequence[k]] for k in range(N))
        for sequence in itertools.product(range(V), repeat=N)
    ]
    engine = Engine(model, sampled[1], sampled[0])
    engine.begin({"label": torch.zeros(DRAWS, dtype=torch.int64)})
    tokens = engine.run(AR(Config()), Noise(torch.arange(DRAWS) + seed)).tokens
    counts = torch.bincount((tokens * torch.tensor([V * V, V, 1])).sum(1), minlength=V**N).double()
    expected = torch.tensor(probability, dtype=torch.float64) * DRAWS
    assert counts[expected == 0].sum() == 0, "a sequence that the law excludes"
    possible = expected > 0
    chi = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    assert expected[possible].min() > 5 and freedom > 5
    return (chi - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize(
    "settings",
    [(Warp(), Guidance()), (Warp(0.8, top_k=3), Guidance(1.0)), (Warp(), Guidance(2.0, schedule="linear"))],
    ids=["plain", "filtered", "guided"],
)
def test_the_law_of_sequences_is_the_models(small: Model, settings: tuple[Warp, Guidance]) -> None:
    assert abs(_z(small, settings, settings, seed=10**9)) < 4


def test_the_chi_square_sees_a_wrong_law(small: Model) -> None:
    assert _z(small, (Warp(1.1), Guidance()), (Warp(), Guidance()), seed=0) > 6
    assert _z(small, (Warp(), Guidance(1.1)), (Warp(), Guidance()), seed=0) > 6
