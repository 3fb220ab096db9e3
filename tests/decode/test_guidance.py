"""Guidance weights: scale, interval, schedule."""

from __future__ import annotations

import math
import re

import pytest
import reference
import torch

from visgen.config import UserError
from visgen.decode.guidance import Guidance


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("interval", [(0.0, 1.0), (0.25, 0.75), (0.5, 0.5)])
@pytest.mark.parametrize("scale", [0.0, 0.5, 4.0])
@pytest.mark.parametrize("tokens", [1, 9])
def test_weights_equal_the_twin(schedule: str, interval: tuple[float, float], scale: float, tokens: int) -> None:
    guidance = Guidance(scale, interval, schedule)
    index = torch.arange(tokens).flip(0).expand(2, -1)
    weights = guidance.weights(index, tokens)
    assert weights.shape == (2, 2, tokens) and weights.dtype == torch.float32
    for w, k in enumerate(index[0].tolist()):
        s = reference.guidance_scale(k, tokens, scale, interval, schedule)
        for b in range(2):
            null, conditional = weights[:, b, w].tolist()
            assert math.isclose(null * 3 + conditional * 5, reference.guided(3, 5, s), abs_tol=1e-5)
    assert torch.allclose(weights.sum(0), torch.ones(2, tokens))


def test_a_scale_of_the_control_follows_schedule_and_interval() -> None:
    index = torch.tensor([[0, 2, 4]])
    null, plain, controlled = Guidance(2.0, schedule="linear", control=5.0).weights(index, 5)[:, 0].tolist()
    assert (null, plain, controlled) == ([0, -0.5, -1], [0, -1.5, -3], [1, 3, 5])
    weights = Guidance(2.0, (0.5, 1.0), control=5.0).weights(index, 5)
    assert weights[:, 0, 0].tolist() == [0, 0, 1] and weights[-1, 0].tolist() == [1, 5, 5]


def test_scale_one_needs_one_branch_and_zero_is_unconditional() -> None:
    index = torch.tensor([[0, 1]])
    assert Guidance(1.0).branches == 1 and Guidance(1.0).weights(index, 2).tolist() == [[[1, 1]]]
    assert Guidance(0.0).branches == 2 and Guidance(0.0).weights(index, 2).tolist() == [[[1, 1]], [[0, 0]]]
    assert Guidance(1.5).branches == 2


def test_every_row_has_its_own_place() -> None:
    weights = Guidance(3.0, schedule="linear").weights(torch.tensor([[0], [4], [8]]), 9)
    assert weights[1, :, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("scale", [-0.1, 1e39, math.inf, math.nan])
def test_impossible_scales_are_refused(scale: float) -> None:
    with pytest.raises(UserError, match=re.escape(f"guidance.scale {scale} must be a finite number >= 0")):
        Guidance(scale)


@pytest.mark.parametrize("interval", [(0.5, 0.4), (-0.1, 1.0), (0.0, 1.1), (math.nan, 1.0)])
def test_impossible_intervals_are_refused(interval: tuple[float, float]) -> None:
    with pytest.raises(UserError, match="must satisfy 0 <= first <= last <= 1"):
        Guidance(2.0, interval)
