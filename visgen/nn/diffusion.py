"""Paths from data to noise, and the solvers that walk them back, as tables that stay on the device.

A path says how a clean value x0 and noise e make x = alpha x0 + sigma e at a time from 0 (clean) to 1000 (noise), and
what a network predicts of it: the noise of a variance-preserving path (Ho et al. 2020, arXiv 2006.11239, equation 14),
or the velocity e - x0 of the straight one (Liu et al. 2022, arXiv 2209.03003). Every solver here is linear in what it
remembers, so a step is one row of numbers (`Row`): no solver object, no read by the host, one graph for all steps.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from visgen.checks import UserError
from visgen.nn.keyed import Rng, normal, uniform

Predicts = Literal["epsilon", "velocity"]
Schedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"]
Solver = Literal["auto", "dpmpp_2m", "euler", "heun"]
TIMES = 1000  # of a whole path, whatever is predicted


class Path:
    """The path of a model.

    Args:
        predicts: epsilon walks the variance-preserving path of `schedule`, whose times are whole numbers 0 .. 999;
            velocity the straight one (alpha = 1 - t / 1000, sigma = t / 1000), whose times are real.
        schedule: betas of the variance-preserving path, by the names of `diffusers` (1e-4 to 0.02).
    """

    def __init__(self, predicts: Predicts, schedule: Schedule = "linear") -> None:
        self.predicts = predicts
        self.schedule = schedule
        self._tables: dict[torch.device, Tensor] = {}

    def prepare(self, device: torch.device) -> None:
        """Lays its table there, where it needs one. A training step does so before the compiled forward."""
        if self.predicts == "epsilon":
            self._cumulative(device)

    def settings(self) -> dict[str, Any]:
        """What a scheduler of `diffusers` is to be told."""
        if self.predicts == "velocity":
            return {"num_train_timesteps": TIMES}
        betas = {"beta_start": 1e-4, "beta_end": 0.02, "beta_schedule": self.schedule}
        return {"num_train_timesteps": TIMES, "prediction_type": "epsilon", **betas}

    def scales(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """(alpha, sigma) at `time`, of its shape, float32."""
        if self.predicts == "velocity":
            sigma = time.float() / TIMES
            return 1 - sigma, sigma
        kept = self._cumulative(time.device)[time.long()]
        return kept.sqrt(), (1 - kept).sqrt()

    def noised(self, clean: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """x at `time`, which broadcasts against the values."""
        alpha, sigma = self.scales(time)
        return alpha * clean + sigma * noise

    def target(self, clean: Tensor, noise: Tensor) -> Tensor:
        """What the network is to predict."""
        return noise if self.predicts == "epsilon" else noise - clean

    def draw(self, shape: tuple[int, ...], rng: Rng, law: str, device: torch.device, axis: int = 0) -> Tensor:
        """Independent times for training, float32; `law` is uniform or logit_normal (Esser et al. 2024, arXiv
        2403.03206, section 3.1: location 0, scale 1)."""
        if law == "logit_normal":
            share = normal(shape, rng, device, axis).sigmoid()
        else:
            share = uniform(shape, rng, device, axis)
        time = share * TIMES
        return time if self.predicts == "velocity" else time.floor().clamp(max=TIMES - 1)

    def cumulative(self) -> Tensor:
        """Products of 1 - beta [1000] float64, on the CPU."""
        return (1 - self._scheduler().betas.double()).cumprod(0)

    def _cumulative(self, device: torch.device) -> Tensor:
        """The same, float32."""
        if device not in self._tables:
            self._tables[device] = self._scheduler().alphas_cumprod.to(device)
        return self._tables[device]

    def _scheduler(self) -> Any:
        from diffusers import DDPMScheduler

        with torch.device("cpu"):
            made: Any = DDPMScheduler(**self.settings())
        return made


class Row(NamedTuple):
    """One evaluation of the network at x, given as `time`, with output o, the remembered d and the kept x_0:

    now = p x + q o;    x <- a x + b now + c d + k x_0;    d <- now;    x_0 <- x before it, where `keep` is 1.
    """

    time: float
    alpha: float  # x = alpha x0 + sigma e before the step
    sigma: float
    p: float
    q: float
    a: float
    b: float
    c: float = 0.0
    k: float = 0.0
    keep: float = 0.0


def rows(path: Path, solver: Solver, steps: int, shift: float = 1.0, last: int = TIMES - 1) -> list[Row]:
    """The evaluations of a walk of `steps` steps from noise to data.

    dpmpp_2m: DPM-Solver++ of order 2, multistep, midpoint (Lu et al. 2022, arXiv 2211.01095, algorithm 2); the first
    and the last step are of order 1. euler: the probability-flow equation, which is DDIM on the noise path. heun:
    Heun's second-order method on the straight path, its last step Euler's, so 2 steps - 1 evaluations. auto: dpmpp_2m
    for a model of noise (as ACDiT is published), euler for one of velocity.

    Args:
        shift: of the straight path, sigma -> shift sigma / (1 + (shift - 1) sigma): above 1, more steps in the noise.
        last: time of the first evaluation on the noise path, which takes its x for pure noise.

    Raises:
        UserError: more steps than there are times, or a method that the path does not have.
    """
    if solver == "auto":
        solver = "dpmpp_2m" if path.predicts == "epsilon" else "euler"
    if path.predicts == "epsilon" and (solver == "heun" or shift != 1):
        what = "sampler.solver heun" if solver == "heun" else f"sampler.shift {shift}"
        raise UserError(f"{what} is for a model of velocity, this one predicts epsilon; use dpmpp_2m or euler, shift 1")
    times = _times(path, steps, shift, last)
    scales = [*_scales(path, times), (1.0, 0.0)]
    if solver == "heun":
        return _heun(times, scales)
    if solver == "euler" and path.predicts == "velocity":
        return [
            Row(time, alpha, sigma, 0.0, 1.0, 1.0, after[1] - sigma)
            for time, (alpha, sigma), after in zip(times, scales, scales[1:], strict=False)
        ]
    return _dpm(path, times, scales, order=2 if solver == "dpmpp_2m" else 1)


def _times(path: Path, steps: int, shift: float, last: int) -> list[float]:
    """The times of the evaluations, falling."""
    if path.predicts == "velocity":
        return [TIMES * shift * s / (1 + (shift - 1) * s) for s in (1 - j / steps for j in range(steps))]
    if steps > last:
        raise UserError(f"sampler.steps {steps} are more than the {last} that a model of epsilon has; lower it")
    spaced = torch.linspace(0, last, steps + 1, dtype=torch.float64).round()
    return spaced.flip(0)[:-1].tolist()


def sinusoids(time: Tensor, count: int) -> Tensor:
    """time [...] of 0 to 1000 -> [..., count] float32, (cos | sin) of count / 2 frequencies from 1 to near 1e-4."""
    half = count // 2
    steps = torch.arange(half, device=time.device, dtype=torch.float32)
    angle = time.float().unsqueeze(-1) * torch.exp(-math.log(10000.0) * steps / half)
    return torch.cat([angle.cos(), angle.sin()], -1)


def _scales(path: Path, times: list[float]) -> list[tuple[float, float]]:
    """(alpha, sigma) at every time."""
    if path.predicts == "velocity":
        return [(1 - t / TIMES, t / TIMES) for t in times]
    kept = path._cumulative(torch.device("cpu")).double()[torch.tensor(times).long()]
    return list(zip(kept.sqrt().tolist(), (1 - kept).sqrt().tolist(), strict=True))


def _dpm(path: Path, times: list[float], scales: list[tuple[float, float]], order: int) -> list[Row]:
    """Rows whose `now` is the predicted x0. With lambda = log(alpha / sigma) and h its growth in a step,

    x' = sigma'/sigma x - alpha' (exp(-h) - 1) (x0 + (x0 - x0 before) h / (2 h before)).
    """
    alphas, sigmas = torch.tensor(scales, dtype=torch.float64).unbind(1)
    growth = (alphas.log() - sigmas.log()).diff()  # +inf in the last step, and from pure noise
    made = []
    for j, time in enumerate(times):
        alpha, sigma, weight = float(alphas[j]), float(sigmas[j]), float(alphas[j + 1] * -torch.expm1(-growth[j]))
        slope = 0.0
        if order == 2 and 0 < j < len(times) - 1:
            slope = weight * float(growth[j] / growth[j - 1]) / 2
        p, q = (1 / alpha, -sigma / alpha) if path.predicts == "epsilon" else (1.0, -sigma)
        made.append(Row(time, alpha, sigma, p, q, float(sigmas[j + 1]) / sigma, weight + slope, -slope))
    return made


def _heun(times: list[float], scales: list[tuple[float, float]]) -> list[Row]:
    """Rows whose `now` is the velocity: a trial step that keeps its start, then the step by the mean of both slopes."""
    made = []
    for j, time in enumerate(times):
        (alpha, sigma), (next_alpha, next_sigma) = scales[j : j + 2]
        step = next_sigma - sigma
        made.append(Row(time, alpha, sigma, 0.0, 1.0, 1.0, step, keep=1.0))
        if j + 1 < len(times):
            made.append(Row(times[j + 1], next_alpha, next_sigma, 0.0, 1.0, 0.0, step / 2, step / 2, 1.0))
    return made
