"""The law of a token as a mixture of codes under noise: posterior statistics, and the map from noise to a token.

A token with law p over codes c_k, on the straight path x = (1 - t) c + t e with e ~ N(0, I): t = 1 is noise, t = 0 the
code. Everything that a diffusion model would have to learn is a sum over the vocabulary:

    w_k = p_k exp(-|x - (1 - t) c_k|^2 / 2 t^2) / sum           posterior over codes
    mean = sum_k w_k c_k        velocity = (x - mean) / t        score = ((1 - t) mean - x) / t^2
    d mean / dx = (1 - t) / t^2 Cov_w[c]                         all that a gradient needs

Sources: Distilled Decoding 1 (Liu et al. 2024, arXiv 2412.17153, figure 5: a flow from noise to codes with the
teacher's p frozen) and 2 (arXiv 2510.21003, section 3.2: the teacher as a conditional score, equation 1). Which solver
and grid the authors use is not published. Here: second-order multistep of the mean (DPM-Solver++ 2M, Lu et al. 2022,
arXiv 2211.01095, algorithm 2) on codes of unit variance, at evenly spaced t, `STEPS` of them for every use; the last
evaluation, at t = 1 / STEPS, takes the most likely code, so nothing is integrated where 1 / t^2 is stiff.

Sums run in float32 (float64 for float64 inputs): on a GPU in one kernel (`nn/fused/mixture.py`), else, and as its twin,
over chunks of the vocabulary. No [T, V] tensor besides log p is made. Codes that p excludes have log p = -inf.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

STEPS = 30
CHUNK = 2048


class Posterior(NamedTuple):
    """Moments of the codes under w, for T noised tokens."""

    mean: Tensor  # [T, C]
    covariance: Tensor | None  # [T, C, C]
    log_mass: Tensor  # [T] log sum_k p_k exp(-|x - (1 - t) c_k|^2 / 2 t^2)


def scale_of(codes: Tensor) -> Tensor:
    """The number by which codes [V, C] get a mean square of 1 in each channel; sqrt(C) for codes of unit length.

    The map is the same for every scale, but at this one the information is spread over t.
    """
    return codes.double().square().mean().rsqrt().to(codes.dtype)


def posterior(
    x: Tensor,
    t: Tensor | float,
    logp: Tensor,
    codes: Tensor,
    covariance: bool = True,
    chunk: int = CHUNK,
    fused: bool | None = None,
) -> Posterior:
    """Moments of the posterior over codes by an online softmax.

    Args:
        x: [T, C] noised tokens.
        t: [T, 1] or a number, times in (0, 1].
        logp: [T, V] log p, or that plus a constant of its row; each row has a finite one.
        codes: [V, C].
        fused: by the kernel, which needs float32; None: where the device and the codes' width allow it.
    """
    with torch.autocast(x.device.type, enabled=False):
        x, codes = _wide(x), _wide(codes)
        t = t.to(x.dtype).expand(len(x), 1) if isinstance(t, Tensor) else x.new_full((len(x), 1), t)
        if fused is None:
            fused = x.device.type == "cuda" and x.dtype == torch.float32 and _fits(x.shape[1], covariance)
        if fused:
            from visgen.nn.fused.mixture import moments  # needs Triton

            mean, spread, mass = moments(x, t, logp, codes, covariance)
        else:
            mean, spread, mass = _moments(x, t, logp, codes, covariance, chunk)
        far = x.square().sum(1) / (2 * t.squeeze(1).square())  # what `_logits` leaves out
        return Posterior(mean, spread, mass - far)


def _fits(channels: int, covariance: bool) -> bool:
    from visgen.nn.fused.mixture import fits

    return fits(channels, covariance)


def _moments(
    x: Tensor, t: Tensor, logp: Tensor, codes: Tensor, covariance: bool, chunk: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Mean [T, C], covariance [T, C, C], and log of the sum over codes [T]: the kernel's twin."""
    top = x.new_full((len(x), 1), -torch.inf)
    total, first = x.new_zeros(len(x), 1), torch.zeros_like(x)
    second = x.new_zeros(len(x), x.shape[1] ** 2) if covariance else None
    for start in range(0, len(codes), chunk):
        part = codes[start : start + chunk]  # [J, C]
        z = _logits(x, t, logp[:, start : start + chunk], part)  # [T, J]
        higher = torch.maximum(top, z.amax(1, keepdim=True))
        safe = torch.where(higher == -torch.inf, 0, higher)  # no code of the chunks so far is possible
        kept, weight = (top - safe).exp(), (z - safe).exp()
        total = total * kept + weight.sum(1, keepdim=True)
        first = first * kept + _product(weight, part)
        if second is not None:
            pairs = (part.unsqueeze(2) * part.unsqueeze(1)).flatten(1)  # [J, C C]
            second = second * kept + _product(weight, pairs)
        top = higher
    mean = first / total
    spread = None
    if second is not None:
        spread = (second / total).unflatten(1, (x.shape[1], -1)) - mean.unsqueeze(2) * mean.unsqueeze(1)
    return mean, spread, (top + total.log()).squeeze(1)


def velocity(x: Tensor, t: Tensor, mean: Tensor) -> Tensor:
    """E[e - c | x]: [T, C], t [T, 1]."""
    return (x - mean) / t


def score(x: Tensor, t: Tensor, mean: Tensor) -> Tensor:
    """Gradient of the log density of x (DD2, equation 1): [T, C], t [T, 1]."""
    return ((1 - t) * mean - x) / t.square()


def log_density(found: Posterior, t: Tensor, channels: int) -> Tensor:
    """log q_t(x) [T] in nats; t [T, 1]."""
    return found.log_mass - channels * (t.squeeze(1).log() + 0.5 * math.log(2 * math.pi))


class _Denoise(torch.autograd.Function):
    """The posterior mean, whose gradient is one C x C product a token: no sum over the vocabulary is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor, logp: Tensor, codes: Tensor, chunk: int, fused: bool | None) -> Tensor:
        found = posterior(x, t, logp, codes, True, chunk, fused)
        ctx.save_for_backward(found.covariance, t)
        ctx.kind = x.dtype
        return found.mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        covariance, t = ctx.saved_tensors
        slope = (covariance * grads[0].unsqueeze(1)).sum(2)  # [T, C]
        return ((1 - t) / t.square() * slope).to(ctx.kind), None, None, None, None, None


def denoise(x: Tensor, t: Tensor, logp: Tensor, codes: Tensor, chunk: int = CHUNK, fused: bool | None = None) -> Tensor:
    """The posterior mean [T, C] of x [T, C] at t [T, 1], differentiable in x alone."""
    return _Denoise.apply(x, t, logp, codes, chunk, fused)


def fm_map(noise: Tensor, logp: Tensor, codes: Tensor, steps: int = STEPS, chunk: int = CHUNK) -> Tensor:
    """The token [T] to which the flow of the law logp [T, V] carries noise [T, C]; over all noise its law is p.

    Args:
        codes: [V, C], of about unit variance (`scale_of`). Of codes that are equal, the first takes the mass of all.
        steps: evaluations; another number is another map.
    """
    x = before = _wide(noise)
    for i in range(steps):
        t, s = 1 - i / steps, 1 - (i + 1) / steps
        if i == steps - 1:
            return most_likely(x, t, logp, codes, chunk)
        mean = towards = posterior(x, t, logp, codes, False, chunk).mean
        if i >= 2:  # log-SNR is infinite at t = 1: no slope to go on from before the third step
            at, last, after = (math.log((1 - u) / u) for u in (t, 1 - (i - 1) / steps, s))
            towards = mean + (mean - before) * (after - at) / (2 * (at - last))
        x, before = s / t * x + (1 - s / t) * towards, mean
    raise ValueError(f"steps {steps} must be at least 1")


def most_likely(x: Tensor, t: float, logp: Tensor, codes: Tensor, chunk: int = CHUNK) -> Tensor:
    """argmax_k w_k(x, t): ids [T]."""
    with torch.autocast(x.device.type, enabled=False):
        x, codes = _wide(x), _wide(codes)
        time = x.new_full((len(x), 1), t)
        best, found = x.new_full((len(x),), -torch.inf), torch.zeros(len(x), dtype=torch.int64, device=x.device)
        for start in range(0, len(codes), chunk):
            z = _logits(x, time, logp[:, start : start + chunk], codes[start : start + chunk])
            value, index = z.max(1)
            found = torch.where(value > best, index + start, found)
            best = torch.maximum(best, value)
        return found


def _logits(x: Tensor, t: Tensor, logp: Tensor, part: Tensor) -> Tensor:
    """log p_k - |x - (1 - t) c_k|^2 / 2 t^2 + |x|^2 / 2 t^2 of the codes `part`: [T, J]."""
    near = (1 - t) * _product(x, part.T) - 0.5 * (1 - t).square() * part.square().sum(1)
    return logp.to(x.dtype) + near / t.square()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in full precision, whatever the process allows elsewhere: posterior logits carry a factor (1 - t) / t^2."""
    if a.device.type != "cuda":
        return a @ b
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        return a @ b
    finally:
        torch.set_float32_matmul_precision(allowed)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
