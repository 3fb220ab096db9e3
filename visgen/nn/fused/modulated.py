"""A layer of a diffusion head in three kernels: norm and modulation; first product and SiLU; second product, gate and
residual sum. For few rows it is two, for the norm is then taken along by the first product.

    h <- h + g * (W2 silu(W1 a + b1) + b2),    a = (LN(h) gain + offset) (1 + scale) + shift

The moments of a row that the norm needs are left by whoever wrote it, as sums of every tile of columns, and added in a
fixed order (Chan et al. 1979, "Updating formulae and a pairwise algorithm for computing sample variances"), so results
do not vary between runs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from visgen.nn.fused.chain import chained, fetch, follow
from visgen.nn.fused.described import describable
from visgen.nn.fused.norm import normalised
from visgen.nn.fused.tile import FEW, Tile, choose

EPS = 1e-6  # of the head's norms


class Moments:
    """Sums of the rows [R, w] of h by tiles of columns: sum, and squares about the tile's mean."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.sums = torch.empty(rows, triton.cdiv(width, 16), 2, device=device)
        self.span = width  # columns of a tile

    @property
    def most(self) -> int:
        return self.sums.shape[1]


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
    tile, span = tile or tile_of(m, n, k, exact, describable(x, linear.weight)), moments.span
    kept = gated and m <= FEW
    if tile.described:
        return _by_descriptors(x, linear, out, modulation, gated, tile)
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


def _by_descriptors(x: Tensor, linear: nn.Linear, out: Tensor, modulation: Tensor, gated: bool, tile: Tile) -> None:
    """As `product`, of many rows, whose norm and moments are kernels of their own."""
    (m, k), n = x.shape, out.shape[1]
    _described[(triton.cdiv(n, tile.n), triton.cdiv(m, tile.m))](
        TensorDescriptor.from_tensor(x, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(linear.weight, [tile.n, tile.k]),
        linear.weight,
        linear.bias,
        modulation,
        out,
        m,
        n,
        k,
        GATED=gated,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        **chained(out.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def tile_of(m: int, n: int, k: int, exact: bool, described: bool = False) -> Tile:
    """The tile of [M, K] x [N, K]: square ones for many rows, of which a width of 1024 has 128 at 512 rows.

    Each program of a product reads its rows and its outputs' weights from the cache that all share, which is what these
    products wait for: so the larger of the tiles that nearly fill the device (`described`: operands can be).
    """
    if exact:  # no matrix units
        return Tile(16 if m <= FEW else 64, 32, 32, 1, 4, 2)
    if m <= FEW:
        return Tile(16, 16, 256, 1, 4, 4)
    if described and m == 128:
        return Tile(64, 32, 128, 1, 4, 4, True)
    if described and m > 128:
        fits = triton.cdiv(m, 64) * triton.cdiv(n, 64) <= 132  # programs; an H100 has so many multiprocessors
        return Tile(64, 64, 128, 1, 4, 4, True) if fits else Tile(128, 64, 64, 1, 4, 4, True)
    return choose(m, n, k, norm=True, gate=False) if m <= 128 else Tile(64, 64, 64, 1, 4, 4)


# --------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def adapted(normed, modulation, at, here, width):
    """x (1 + scale) + shift by a row [shift | scale | ..] of modulations."""
    shift = tl.load(modulation + at, mask=here, other=0.0).to(tl.float32)
    scale = tl.load(modulation + width + at, mask=here, other=0.0).to(tl.float32)
    return normed * (1 + scale) + shift


@triton.jit
def _adapt(h, gain, offset, modulation, normed, width, eps, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    at = tl.arange(0, BLOCK)
    here = at < width
    g = tl.load(gain + at, mask=here, other=0.0).to(tl.float32)
    o = tl.load(offset + at, mask=here, other=0.0).to(tl.float32)
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64)
    value = tl.load(h + row * width + at, mask=here, other=0.0).to(tl.float32)
    out = adapted(normalised(value, here, width, eps) * g + o, modulation + row * 3 * width, at, here, width)
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
def _described(
    x,
    weight,
    weight_at,
    bias,
    modulation,
    out,
    m,
    n,
    k,
    GATED: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """As `_product`, of ready operands given by descriptors; zero beyond them."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    far = row.to(tl.int64)[:, None]
    b = tl.load(bias + col, mask=col < n, other=0.0).to(tl.float32)
    if tl.program_id(1) == 0:
        fetch(weight_at, col, n, 0, k, k, CHAIN)
    follow(CHAIN)
    live = (row[:, None] < m) & (col[None, :] < n)
    if GATED:  # on their way while the product is made
        gate = tl.load(modulation + far * 3 * n + 2 * n + col[None, :], mask=live, other=0.0)
        before = tl.load(out + far * n + col[None, :], mask=live, other=0.0)
    a = tl.zeros([BM, BN], dtype=tl.float32)
    for start in range(0, k, BK):
        rows = x.load([tl.program_id(1) * BM, start])
        a = tl.dot(rows, weight.load([tl.program_id(0) * BN, start]).T, a)
    a += b[None, :]
    if GATED:
        a = before.to(tl.float32) + gate.to(tl.float32) * a
    else:
        a = a / (1 + tl.exp(-a))
    tl.store(out + far * n + col[None, :], a.to(out.dtype.element_ty), mask=live)


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
