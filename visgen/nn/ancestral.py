"""Ancestral sampling of a model of noise: the reverse chain of DDPM over some of its times, tables on the device.

Over kept times t_1 < .. < t_S the betas are 1 - abar(t_i) / abar(t_(i-1)), and a step draws x' from
N(c1 x0 + c2 x, s^2) with x0 predicted from x and the noise (Ho et al. 2020, arXiv 2006.11239, equation 7; Nichol &
Dhariwal 2021, arXiv 2102.09672, sections 3.1 and 3.2). log s^2 lies between that of the posterior's variance, the least
it can be, and that of beta, the most; a network may say where. All numbers are made in float64 and kept in float32.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from visgen.checks import UserError
from visgen.nn.diffusion import TIMES, Path, Row, Solver, rows

Variance = Literal["learned_range", "fixed_large", "fixed_small"]
Walker = Literal["auto", "ancestral", "dpmpp_2m", "euler", "heun"]
LAST = 989  # at 999 of the cosine schedule an error of the noise counts 20,000 times in x0


class Walk(NamedTuple):
    """Evaluations of a network from noise to data, one after another.

    Attributes:
        rows: [S, 10] float32, the fields of `Row`.
        low, high: [S] float32, bounds of the log variance of what a step adds.
        noisy: of every step, whether it draws at all; read by the host, as it is known beforehand.
    """

    rows: Tensor
    low: Tensor
    high: Tensor
    noisy: tuple[bool, ...]

    @property
    def steps(self) -> int:
        return len(self.noisy)

    def to(self, device: torch.device) -> Walk:
        return Walk(self.rows.to(device), self.low.to(device), self.high.to(device), self.noisy)


def kept_times(steps: int, last: int = TIMES - 1) -> list[int]:
    """`steps` times from 0 to `last`, both among them, evenly spaced but for rounding; rising.

    Raises:
        UserError: more steps than there are times.
    """
    if steps > last + 1:
        raise UserError(f"sampler.steps {steps} are more than the {last + 1} times there are; lower it")
    return [last] if steps == 1 else [round(last * i / (steps - 1)) for i in range(steps)]


def walk(path: Path, solver: Walker, steps: int, shift: float = 1.0, last: int | None = None) -> Walk:
    """The evaluations of a walk of `steps` steps.

    Args:
        solver: ancestral, for a model of noise, or one of `diffusion.rows`; auto: ancestral for a model of noise, euler
            for one of velocity.
        last: of a model of noise, the time at which the walk begins; None: 989. MAR as published begins at 999, where a
            step multiplies the error of the noise by 316: a deterministic walk keeps that, and an ancestral one of a
            head that is not trained to the end explodes.

    Raises:
        UserError: more steps than times, or a method that the path does not have.
    """
    if solver == "auto":
        solver = "ancestral" if path.predicts == "epsilon" else "euler"
    if path.predicts == "velocity":
        if solver == "ancestral" or last is not None:
            what = "sampler.solver ancestral" if solver == "ancestral" else f"sampler.last {last}"
            use = "use euler, heun or dpmpp_2m" if solver == "ancestral" else "leave it out"
            raise UserError(f"{what} is for a model of epsilon, this one predicts velocity; {use}")
        return _quiet(rows(path, solver, steps, shift))
    last = LAST if last is None else last
    if solver != "ancestral":
        chosen: Solver = solver
        return _quiet(rows(path, chosen, steps, shift, last))
    if shift != 1:
        raise UserError(f"sampler.shift {shift} is for a model of velocity, this one predicts epsilon; use 1")
    times = kept_times(steps, last)
    table, low, high = chain(path, times)
    return Walk(table.flip(0), low.flip(0), high.flip(0), (*[True] * (steps - 1), False))


def chain(path: Path, times: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Of the reverse chain over rising `times`: the fields of `Row` [S, 10], whose `now` is the predicted x0, and the
    least and the greatest log variance [S]; float32. At the lowest time the least is that of the second."""
    kept = path.cumulative()[torch.tensor(times)]
    before = torch.cat([kept.new_ones(1), kept[:-1]])
    beta = 1 - kept / before
    posterior = beta * (1 - before) / (1 - kept)
    if len(times) > 1:
        posterior[0] = posterior[1]
    else:
        posterior = beta
    q, b = -(1 / kept - 1).sqrt(), beta * before.sqrt() / (1 - kept)
    a, none = (1 - before) * (1 - beta).sqrt() / (1 - kept), torch.zeros_like(kept)
    at = torch.tensor(times, dtype=torch.float64)
    columns = (at, kept.sqrt(), (1 - kept).sqrt(), kept.rsqrt(), q, a, b, none, none, none)  # in the order of `Row`
    return torch.stack(columns, 1).float(), posterior.log().float(), beta.log().float()


def log_variance(share: Tensor | None, low: Tensor, high: Tensor, variance: Variance) -> Tensor:
    """log s^2 where a network says `share` (-1: the least, 1: the greatest; not bounded), or the fixed one."""
    if variance == "learned_range":
        assert share is not None
        part = (share + 1) / 2
        return part * high + (1 - part) * low
    return high if variance == "fixed_large" else low


def divergence(error: Tensor, share: Tensor, mean_scale: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """KL divergence, in bits a value, of the step that a network takes from the posterior given x0: the loss of its
    variance (Nichol & Dhariwal, equation 15, L_vlb).

    Args:
        error: its error of the noise, which must not get a gradient by this.
        mean_scale: by what an error of the noise moves the mean.
    """
    found = log_variance(share, low, high, "learned_range")
    gap = (mean_scale * error).square()
    return (found - low - 1 + (low - found).exp() + gap * (-found).exp()) / (2 * math.log(2))


def _quiet(made: list[Row]) -> Walk:
    zero = torch.zeros(len(made))
    return Walk(torch.tensor(made, dtype=torch.float32), zero, zero, (False,) * len(made))
