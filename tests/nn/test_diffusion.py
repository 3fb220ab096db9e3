"""Paths and solvers against the schedulers of diffusers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from visgen.config import UserError
from visgen.nn.diffusion import Path, Row, rows

START = torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def network(x: Tensor, time: Any) -> Tensor:
    """Some smooth function of both."""
    return torch.tanh(0.7 * x + 0.3 * torch.sin(torch.as_tensor(float(time)) / 300)) + 0.2 * x


def walk(plan: list[Row]) -> Tensor:
    x, d, kept = START, torch.zeros_like(START), torch.zeros_like(START)
    for row in plan:
        now = row.p * x + row.q * network(x, row.time)
        x, d, kept = row.a * x + row.b * now + row.c * d + row.k * kept, now, x if row.keep else kept
    return x


def oracle(scheduler: Any, **timesteps: Any) -> Tensor:
    scheduler.set_timesteps(**timesteps)
    x = START
    for time in scheduler.timesteps:
        x = scheduler.step(network(x, time), time, x).prev_sample
    return x


def test_the_published_times() -> None:
    """25 steps of DPM-Solver++ as ACDiT is sampled."""
    times = [row.time for row in rows(Path("epsilon"), "auto", 25)]
    first = [999, 959, 919, 879, 839, 799, 759, 719, 679, 639, 599, 559, 519]
    assert times == [*first, 480, 440, 400, 360, 320, 280, 240, 200, 160, 120, 80, 40]


@pytest.mark.parametrize("steps", [1, 2, 5, 25])
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_dpm_solver_is_that_of_diffusers(steps: int, schedule: Any) -> None:
    from diffusers import DPMSolverMultistepScheduler

    path = Path("epsilon", schedule)
    for solver, order in (("dpmpp_2m", 2), ("euler", 1)):
        scheduler = DPMSolverMultistepScheduler(
            **path.settings(), solver_order=order, timestep_spacing="linspace", final_sigmas_type="zero"
        )
        wanted = oracle(scheduler, num_inference_steps=steps)
        assert torch.allclose(walk(rows(path, solver, steps)), wanted, rtol=1e-4, atol=1e-4)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_flow_solvers_are_those_of_diffusers(steps: int, shift: float) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler

    path = Path("velocity")
    sigmas = np.array([1 - j / steps for j in range(steps)])
    euler = FlowMatchEulerDiscreteScheduler(shift=shift)
    wanted = oracle(euler, sigmas=sigmas)
    assert torch.allclose(walk(rows(path, "auto", steps, shift)), wanted, atol=1e-5)
    heun = FlowMatchHeunDiscreteScheduler()
    heun.set_timesteps(steps)
    own = euler.sigmas.double()  # theirs end at 0.001; both shall walk the same way
    heun.sigmas = torch.cat([own[:1], own[1:-1].repeat_interleave(2), own[-1:]])
    heun.timesteps = heun.sigmas[:-1] * 1000
    x = START
    for time in heun.timesteps:
        x = heun.step(network(x, time), time, x).prev_sample
    plan = rows(path, "heun", steps, shift)
    assert len(plan) == 2 * steps - 1 and torch.allclose(walk(plan), x, atol=1e-5)


def test_dpm_solver_on_the_straight_path_lands_on_the_data() -> None:
    """A network that knows the answer: velocity e - x0 of one point."""
    point = torch.tensor([0.3, -1.2, 2.0, 0.0, 0.5], dtype=torch.float64)
    x, d = START, torch.zeros_like(START)
    for row in rows(Path("velocity"), "dpmpp_2m", 4):
        out = (x - row.alpha * point) / row.sigma - point
        now = row.p * x + row.q * out
        x, d = row.a * x + row.b * now + row.c * d, now
    assert torch.allclose(x, point.expand_as(x), atol=1e-9)


@pytest.mark.parametrize("predicts", ["epsilon", "velocity"])
def test_a_path_mixes_data_and_noise(predicts: Any) -> None:
    path = Path(predicts)
    clean, noise = torch.ones(3), torch.full((3,), 2.0)
    time = torch.tensor([0.0, 500.0, 999.0])
    alpha, sigma = path.scales(time)
    assert torch.allclose(path.noised(clean, noise, time), alpha + 2 * sigma)
    assert alpha[0] > 0.999 and sigma[2] > 0.99 and (alpha.diff() < 0).all()
    assert path.target(clean, noise)[0] == (2 if predicts == "epsilon" else 1)
    drawn = path.draw((4000,), torch.Generator().manual_seed(0), "uniform", torch.device("cpu"))
    assert drawn.min() >= 0 and drawn.max() <= 1000 and abs(float(drawn.mean()) - 500) < 20
    assert (drawn == drawn.round()).all() == (predicts == "epsilon")
    middle = path.draw((4000,), torch.Generator().manual_seed(0), "logit_normal", torch.device("cpu"))
    assert middle.std() < drawn.std()


def test_what_a_path_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match="solver heun is for a model of velocity"):
        rows(Path("epsilon"), "heun", 5)
    with pytest.raises(UserError, match=r"shift 2\.0 is for a model of velocity"):
        rows(Path("epsilon"), "auto", 5, 2.0)
    with pytest.raises(UserError, match="steps 1000 are more than the 999"):
        rows(Path("epsilon"), "auto", 1000)
