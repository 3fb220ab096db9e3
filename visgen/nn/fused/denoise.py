"""The network of a diffusion head (`heads/diffusion.py`) at one step of its walk, in three kernels a layer: norm and
modulation; first product and SiLU; second product, gate and residual sum. For few rows it is two, for the norm is then
taken along by the first product.

    h <- h + g * (W2 silu(W1 a + b1) + b2),    a = (LN(h) gain + offset) (1 + scale) + shift

A kernel before them brings the noised token in, one behind them ends the step: final norm, output, guidance, and the
solver's row with its noise, all in float32. What modulates is made beforehand for many steps at once
(`modulations`): it is known before the walk, and is two thirds of the arithmetic, which one large product does at the
rate of the matrix units.

The moments of a row that the norm needs are left by whoever wrote it, as sums of every tile of columns, and added in a
fixed order (Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances"), so results
do not vary between runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn import functional as F

from visgen.nn.fused.chain import chained, fetch, follow
from visgen.nn.fused.linear import FEW, Tile, choose
from visgen.nn.fused.norm import normalised

ROOM = 1 << 29  # bytes of the modulations that are made at once
EPS = 1e-6  # of the head's norms
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


class Moments:
    """Sums of the rows [R, w] of h by tiles of columns: sum, and squares about the tile's mean."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.sums = torch.empty(rows, triton.cdiv(width, 16), 2, device=device)
        self.span = width  # columns of a tile

    @property
    def most(self) -> int:
        return self.sums.shape[1]


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


def adapt(h: Tensor, gain: Tensor, offset: Tensor, modulation: Tensor, normed: Tensor) -> None:
    """normed = (LN(h) gain + offset) (1 + scale) + shift, of rows [R, w]."""
    rows, width = h.shape
    block = triton.next_power_of_2(width)
    grid, options = (rows,), chained(h.device)
    _adapt[grid](h, gain, offset, modulation, normed, width, EPS, BLOCK=block, **options, num_warps=4)


def product(
    x: Tensor,
    linear: nn.Linear,
    out: Tensor,
    moments: Moments,
    *,
    norm: nn.LayerNorm | None = None,
    modulation: Tensor,
    gated: bool = False,
    tile: Tile | None = None,
) -> None:
    """out = silu(x Wᵀ + b), or where it is gated, out + gate * (x Wᵀ + b); rows [R, w].

    Args:
        norm: first adapt x by it and the modulation, by the moments of x.
        modulation: [R, 3 w] of the layer.
        gated: the second product of a layer, which leaves moments of `out`, for few rows.
    """
    (m, k), n = x.shape, out.shape[1]
    exact = x.dtype == torch.float32
    tile, span = tile or tile_of(m, n, k, exact), moments.span
    kept = gated and m <= FEW
    _product[(triton.cdiv(n, tile.n), triton.cdiv(m, tile.m))](
        x,
        linear.weight,
        linear.bias,
        x if norm is None else norm.weight,
        x if norm is None else norm.bias,
        modulation,
        out,
        moments.sums,
        moments.most,
        triton.cdiv(k, span),
        span,
        m,
        n,
        k,
        EPS,
        NORM=norm is not None,
        GATED=gated,
        KEPT=kept,
        PARTS=triton.next_power_of_2(triton.cdiv(k, span)),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        EXACT=exact,
        **chained(out.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if kept:
        moments.span = tile.n


def tile_of(m: int, n: int, k: int, exact: bool) -> Tile:
    """The tile of [M, K] x [N, K]: square ones for many rows, of which a width of 1024 has 128 at 512 rows."""
    if exact:  # no matrix units
        return Tile(16 if m <= FEW else 64, 32, 32, 1, 4, 2)
    if m <= FEW:
        return Tile(16, 16, 256, 1, 4, 4)
    return choose(m, n, k, norm=True, gate=False) if m <= 128 else Tile(64, 64, 64, 1, 4, 4)


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
def _adapted(normed, modulation, at, here, width):
    """x (1 + scale) + shift by a row [shift | scale | ..] of modulations."""
    shift = tl.load(modulation + at, mask=here, other=0.0).to(tl.float32)
    scale = tl.load(modulation + width + at, mask=here, other=0.0).to(tl.float32)
    return normed * (1 + scale) + shift


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
            told = _adapted(out, modulation + row * 3 * width, at, here, width)
            tl.store(normed + row * width + at, told.to(normed.dtype.element_ty), mask=here)
        else:
            tl.store(sums + row * most * 2, total)
            tl.store(sums + row * most * 2 + 1, square)


@triton.jit
def _adapt(h, gain, offset, modulation, normed, width, eps, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    at = tl.arange(0, BLOCK)
    here = at < width
    g = tl.load(gain + at, mask=here, other=0.0).to(tl.float32)
    o = tl.load(offset + at, mask=here, other=0.0).to(tl.float32)
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(h + row * width + at, mask=here, other=0.0).to(tl.float32)
    out = _adapted(normalised(value, here, width, eps) * g + o, modulation + row * 3 * width, at, here, width)
    tl.store(normed + row * width + at, out.to(normed.dtype.element_ty), mask=here)


@triton.jit
def _product(
    x,
    weight,
    bias,
    gain,
    offset,
    modulation,
    out,
    sums,
    most,
    parts,
    span,
    m,
    n,
    k,
    eps,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    KEPT: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EXACT: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """A tile [BM, BN] on the matrix units."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    far = row.to(tl.int64)[:, None]
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    b = tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        fetch(weight, col, n, 0, k, k, CHAIN)
    follow(CHAIN)
    live = (row[:, None] < m) & (col[None, :] < n)
    if GATED:  # on their way while the product is made
        gate = tl.load(modulation + far * 3 * n + 2 * n + col[None, :], mask=live, other=0.0)
        before = tl.load(out + far * n + col[None, :], mask=live, other=0.0)
    if NORM:
        mean, scale = _moments(sums, row, m, most, parts, span, k, eps, PARTS)
    a = tl.zeros([BM, BN], dtype=tl.float32)
    for start in range(0, k, BK):
        at = start + tl.arange(0, BK)
        inner = at < k
        here = (row[:, None] < m) & inner[None, :]
        rows = tl.load(x + far * k + at[None, :], mask=here, other=0.0)
        if NORM:
            g = tl.load(gain + at, mask=inner, other=0.0).to(tl.float32)[None, :]
            o = tl.load(offset + at, mask=inner, other=0.0).to(tl.float32)[None, :]
            told = modulation + far * 3 * k + at[None, :]
            wide = (rows.to(tl.float32) - mean[:, None]) * scale[:, None] * g + o
            wide = wide * (1 + tl.load(told + k, mask=here, other=0.0).to(tl.float32))
            wide += tl.load(told, mask=here, other=0.0).to(tl.float32)
            rows = tl.where(here, wide, 0.0).to(rows.dtype)
        w = tl.load(weight + col[None, :] * k + at[:, None], mask=inner[:, None] & (col[None, :] < n), other=0.0)
        a = tl.dot(rows, w, a, input_precision=precision)
    a += b[None, :]
    if GATED:
        a = before.to(tl.float32) + gate.to(tl.float32) * a
    else:
        a = a / (1 + tl.exp(-a))
    stored = a.to(out.dtype.element_ty)
    tl.store(out + far * n + col[None, :], stored, mask=live)
    if KEPT:
        wide = tl.where(live, stored.to(tl.float32), 0.0)
        total = tl.sum(wide, axis=1)
        away = tl.where(live, wide - (total / tl.minimum(BN, n - tl.program_id(0) * BN))[:, None], 0.0)
        to = sums + (row.to(tl.int64) * most + tl.program_id(0)) * 2
        tl.store(to, total, mask=row < m)
        tl.store(to + 1, tl.sum(away * away, axis=1), mask=row < m)


@triton.jit
def _moments(sums, row, m, most, parts, span, width, eps, PARTS: tl.constexpr):
    """Mean and 1 / deviation of rows, from the sums of their tiles of `span` columns."""
    part = tl.arange(0, PARTS)[None, :]
    here = (row[:, None] < m) & (part < parts)
    at = sums + (row.to(tl.int64)[:, None] * most + part) * 2
    total = tl.load(at, mask=here, other=0.0)
    square = tl.load(at + 1, mask=here, other=0.0)
    mean = tl.sum(total, axis=1) / width
    count = tl.minimum(span, width - part * span).to(tl.float32)
    away = tl.where(here, total / count - mean[:, None], 0.0)
    spread = tl.sum(square + count * away * away, axis=1) / width
    return mean, 1 / tl.sqrt(spread + eps)


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
        out = _adapted(normalised(value, here, width, eps), modulation + row * 2 * width, at, here, width)
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
