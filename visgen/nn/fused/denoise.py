"""What stands around the layers (`modulated.py`) of a diffusion head (`heads/diffusion.py`) at a step of its walk.

A kernel before them brings the noised token in; one behind them ends the step: final norm, output, guidance, and the
solver's row with its noise, all in float32. What modulates is made beforehand for many steps at once
(`modulations`): it is known before the walk, and most of the arithmetic, which few large products do best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from visgen.nn.fused.chain import chained, follow
from visgen.nn.fused.modulated import EPS, Moments, adapted
from visgen.nn.fused.norm import normalised

ROOM = 1 << 29  # bytes of the modulations that are made at once
LANES = 16  # channels of a token that a program holds at once


def modulations(given: Tensor, about: Tensor, maps: Sequence[nn.Module]) -> list[Tensor]:
    """Of every map its product with silu(about + given): [S, R, outputs], in their type.

    Args:
        given: [R, w], what the rows are told; about: [S, w], the embeddings of the steps' times.
    """
    told = F.silu(about.unsqueeze(1) + given, inplace=True)
    return [each(told) for each in maps]


def steps_at_once(rows: int, outputs: int, size: int) -> int:
    """Steps whose modulations, `outputs` of `size` bytes for each row, fit the room."""
    return max(1, ROOM // (rows * outputs * size))


def enter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gain: Tensor,
    offset: Tensor,
    modulation: Tensor,
    h: Tensor,
    normed: Tensor | None,
    moments: Moments,
) -> None:
    """h = x Wᵀ + b for every branch, and what the first layer multiplies, or the moments that it needs.

    Args:
        x: [T, C] float32; h: [K T, w], written; normed: as h, written, or None: then moments are.
        weight, bias: [w, C], [w] of the input; gain, offset: [w] of the first layer's norm.
        modulation: [K T, 3 w], shift, scale and gate of the first layer.
    """
    (tokens, channels), (rows, width) = x.shape, h.shape
    moments.span = width
    _enter[(tokens,)](
        x,
        weight,
        bias,
        gain,
        offset,
        modulation,
        h,
        h if normed is None else normed,
        moments.sums,
        moments.most,
        tokens,
        channels,
        width,
        EPS,
        BRANCHES=rows // tokens,
        BLOCK=triton.next_power_of_2(width),
        LANES=LANES,
        ADAPT=normed is not None,
        **chained(h.device),
        num_warps=16,
    )


class Step(NamedTuple):
    """A row of a solver, which `leave` takes at once.

    Attributes:
        before, kept: [T, C] float32, what the solver remembers; written.
        row: [10], the fields of `Row`; bounds: [2], of the log variance.
        draw: [T, C], the step's noise, or None; temperature: its factor.
        place: of the log variance between its bounds; None: the network says it.
    """

    before: Tensor
    kept: Tensor
    row: Tensor
    bounds: Tensor
    draw: Tensor | None
    place: float | None
    temperature: float


def leave(
    h: Tensor,
    modulation: Tensor,
    output: nn.Linear,
    weights: Tensor,
    x: Tensor,
    share: Tensor | None = None,
    step: Step | None = None,
) -> None:
    """The guided prediction of tokens and the place of their log variance, float32; or what a step makes of them.

    Args:
        h: [K T, w]; modulation: [K T, 2 w], shift and scale of the final norm, which has no weights.
        weights: [K, T] float32 of the branches.
        x: [T, C], written: the prediction, or where there is a step, the tokens before and behind it.
        share: [T, C], written; None: the variance is not learned, or asked for by the step alone.
    """
    (tokens, channels), (rows, width) = x.shape, h.shape
    learned = share is not None if step is None else step.place is None and step.draw is not None
    _leave[(tokens, triton.cdiv(channels, LANES))](
        h,
        modulation,
        output.weight,
        output.bias,
        weights,
        x,
        x if share is None else share,
        *((x, x, x, x) if step is None else step[:4]),
        x if step is None or step.draw is None else step.draw,
        0.0 if step is None or step.place is None else step.place,
        0.0 if step is None else step.temperature,
        tokens,
        channels,
        width,
        EPS,
        BRANCHES=rows // tokens,
        BLOCK=triton.next_power_of_2(width),
        LANES=LANES,
        LEARNED=learned,
        WALK=step is not None,
        DRAW=step is not None and step.draw is not None,
        **chained(h.device),
        num_warps=16,
    )


# --------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _enter(
    x,
    weight,
    bias,
    gain,
    offset,
    modulation,
    h,
    normed,
    sums,
    most,
    tokens,
    channels,
    width,
    eps,
    BRANCHES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    ADAPT: tl.constexpr,
    CHAIN: tl.constexpr,
):
    token = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    here = at < width
    lane = tl.arange(0, LANES)
    value = tl.load(bias + at, mask=here, other=0.0).to(tl.float32)
    g = tl.load(gain + at, mask=here, other=0.0).to(tl.float32)
    o = tl.load(offset + at, mask=here, other=0.0).to(tl.float32)
    w = tl.load(weight + at[:, None] * channels + lane, mask=here[:, None] & (lane < channels), other=0.0)
    follow(CHAIN)
    for start in range(0, channels, LANES):
        c = start + lane
        part = tl.load(x + token * channels + c, mask=c < channels, other=0.0)
        value += tl.sum(w.to(tl.float32) * part[None, :], axis=1)
        c += LANES
        w = tl.load(weight + at[:, None] * channels + c, mask=here[:, None] & (c < channels), other=0.0)
    stored = value.to(h.dtype.element_ty)
    value = stored.to(tl.float32)
    if ADAPT:
        out = normalised(value, here, width, eps) * g + o
    else:
        total = tl.sum(value, axis=0)
        away = tl.where(here, value - total / width, 0.0)
        square = tl.sum(away * away, axis=0)
    for branch in tl.static_range(BRANCHES):
        row = (branch * tokens + token).to(tl.int64)
        tl.store(h + row * width + at, stored, mask=here)
        if ADAPT:
            told = adapted(out, modulation + row * 3 * width, at, here, width)
            tl.store(normed + row * width + at, told.to(normed.dtype.element_ty), mask=here)
        else:
            tl.store(sums + row * most * 2, total)
            tl.store(sums + row * most * 2 + 1, square)


@triton.jit
def _leave(
    h,
    modulation,
    weight,
    bias,
    weights,
    x,
    share,
    before,
    kept,
    solver,
    bounds,
    draw,
    place,
    temperature,
    tokens,
    channels,
    width,
    eps,
    BRANCHES: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    LEARNED: tl.constexpr,
    WALK: tl.constexpr,
    DRAW: tl.constexpr,
    CHAIN: tl.constexpr,
):
    token = tl.program_id(0)
    c = tl.program_id(1) * LANES + tl.arange(0, LANES)
    real = c < channels
    at = tl.arange(0, BLOCK)
    here = at < width
    both = real[:, None] & here[None, :]
    w = tl.load(weight + c[:, None] * width + at[None, :], mask=both, other=0.0)  # [LANES, BLOCK]
    b = tl.load(bias + c, mask=real, other=0.0).to(tl.float32)
    if LEARNED:
        v = tl.load(weight + (channels + c)[:, None] * width + at[None, :], mask=both, other=0.0)
        d = tl.load(bias + channels + c, mask=real, other=0.0).to(tl.float32)
    follow(CHAIN)
    guided = tl.zeros([BLOCK], dtype=tl.float32)
    total = 0.0
    for branch in tl.static_range(BRANCHES):  # guidance weighs what the output, a linear map, is applied to
        row = (branch * tokens + token).to(tl.int64)
        value = tl.load(h + row * width + at, mask=here, other=0.0).to(tl.float32)
        out = adapted(normalised(value, here, width, eps), modulation + row * 2 * width, at, here, width)
        scale = tl.load(weights + branch * tokens + token)
        guided += scale * out
        total += scale
    found = tl.sum(w.to(tl.float32) * guided[None, :], axis=1) + b * total
    to = token * channels + c
    part = place
    if LEARNED:
        said = tl.sum(v.to(tl.float32) * out[None, :], axis=1) + d  # of the last branch, the conditional one
        part = (said + 1) / 2
    if WALK:
        old = tl.load(x + to, mask=real, other=0.0)
        last = tl.load(before + to, mask=real, other=0.0)
        held = tl.load(kept + to, mask=real, other=0.0)
        now = tl.load(solver + 3) * old + tl.load(solver + 4) * found
        new = tl.load(solver + 5) * old + tl.load(solver + 6) * now
        new += tl.load(solver + 7) * last + tl.load(solver + 8) * held
        if DRAW:
            log = part * tl.load(bounds + 1) + (1 - part) * tl.load(bounds)
            new += temperature * tl.exp(log / 2) * tl.load(draw + to, mask=real, other=0.0)
        tl.store(before + to, now, mask=real)
        tl.store(kept + to, tl.where(tl.load(solver + 9) > 0, old, held), mask=real)
        tl.store(x + to, new, mask=real)
    else:
        tl.store(x + to, found, mask=real)
        if LEARNED:
            tl.store(share + to, said, mask=real)
