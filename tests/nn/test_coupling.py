"""The reflection maximal coupling: its law, and that no coupling of the two steps meets more often."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from visgen.nn.coupling import Step, coupled
from visgen.vectors import ks, projections

N, C = 20_000, 5
SPREAD = torch.tensor(0.3)


def stepped(apart: float, seed: int = 0) -> tuple[Step, Tensor, Tensor]:
    """A step of N chains whose mean is `apart` units of noise off the other's, in a direction of their own each."""
    rng = torch.Generator().manual_seed(seed)
    mean, away, z = (torch.randn(N, C, generator=rng) for _ in range(3))
    other = mean + apart * SPREAD * away / away.norm(dim=-1, keepdim=True)
    followed = other + SPREAD * z
    step = coupled(mean, other, z, SPREAD, torch.rand(N, generator=rng).clamp(min=1e-30).log(), followed)
    return step, mean, followed


@pytest.mark.parametrize("apart", [0.01, 0.5, 2.0, 6.0])
def test_it_steps_by_its_own_law_and_meets_as_often_as_can_be(apart: float) -> None:
    step, mean, followed = stepped(apart)
    own = (step.state - mean) / SPREAD
    assert min(ks(x) for x in (own.double() @ projections(C, 4)).unbind(1)) > 1e-3
    assert min(ks(own.square().sum(-1)), 1.0) < 1e-3, "a test that can fail"
    rate = math.erfc(apart / 2 / math.sqrt(2))  # 2 Phi(-apart / 2) = 1 - TV
    assert abs(step.met.float().mean() - rate) < 5 * math.sqrt(rate * (1 - rate) / N) + 1e-3
    assert torch.equal(step.state[step.met], followed[step.met])
    assert not (step.state == followed).all(-1)[~step.met].any()
    assert torch.allclose(step.gap, torch.full((N,), apart), rtol=1e-3)


def test_equal_chains_stay_together() -> None:
    z, mean = torch.randn(N, C), torch.randn(N, C)
    log_uniform = torch.full((N,), -6e-8)  # the greatest that the noise gives
    step = coupled(mean, mean, z, SPREAD, log_uniform, mean + SPREAD * z)
    assert step.met.all() and torch.equal(step.state, mean + SPREAD * z) and not step.gap.any()


def test_a_tiny_gap_is_no_trouble() -> None:
    z, mean = torch.randn(N, C), torch.zeros(N, C)
    for gap in (1e-22, 1e-12, 1e-7):
        step = coupled(mean, mean + gap, z, SPREAD, torch.full((N,), -6e-8), mean + gap + SPREAD * z)
        assert step.state.isfinite().all() and (step.state.norm(dim=-1) < 4).all()
