"""A linear layer with what stands before and after it: RMS norm, SwiGLU's gate, the residual sum.

    out = residual + act(x̂ Wᵀ),   x̂ = x or rms_norm(x),   act(a) = a or silu(a) * (x̂ Uᵀ)

For two rows, or few of a narrow model, the norm costs nothing: 1 / rms is a factor of a whole row, so it is applied to
the product, and squares are summed while x passes by. Two rows (a batch of one with its null branch) are multiplied
without matrix units, for then each program only has to stream its share of the weights. Where the output has too few
tiles to fill the device, the inner dimension is split; the program that comes last adds the parts in a fixed order, so
results do not vary between runs. From Hopper on, a batch of many images loads its operands by tensor descriptors: no
address is computed, and what is under way takes no registers.
The eager twins are `nn.Linear`, `RMSNorm` and `SwiGLU`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visgen.nn.fused.chain import chained, fetch, follow
from visgen.nn.fused.described import describable, product
from visgen.nn.fused.tile import Tile, choose, with_norm


class Workspace:
    """Room for the parts of split products on one device; kernels of one stream share it in turn."""

    def __init__(self, device: torch.device, size: int = 1 << 21, tiles: int = 4096) -> None:
        self.parts = torch.empty(size, device=device, dtype=torch.float32)
        self.arrived = torch.zeros(tiles, device=device, dtype=torch.int32)


def linear(
    x: Tensor,
    weight: Tensor,
    workspace: Workspace,
    *,
    gain: Tensor | None = None,
    eps: float = 1e-5,
    up: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """out [M, N] in x's type; accumulated in float32.

    Args:
        x: [M, K], rows contiguous.
        weight: [N, K], the layer's; up: [N, K], SwiGLU's second matrix.
        gain: [K], of the RMS norm before it; eps its epsilon.
        residual: [M, N], added last; may be `out` itself.
    """
    m, k = x.shape
    n = weight.shape[0]
    out = torch.empty(m, n, dtype=x.dtype, device=x.device) if out is None else out
    exact = x.dtype == torch.float32
    if gain is not None and not with_norm(m, k):
        x, gain = rms_norm(x, gain, eps), None
    tile = tile or choose(m, n, k, gain is not None, up is not None, exact, describable(x, weight))
    if tile.described:
        return product(x, weight, up, residual, out, tile)
    grid = (triton.cdiv(n, tile.n), triton.cdiv(m, tile.m), tile.split)
    if tile.split > 1 and (grid[0] * grid[1] * tile.split * tile.m * tile.n > workspace.parts.numel()):
        raise ValueError(f"tile {tile} of [{m}, {k}] x [{n}, {k}] does not fit the workspace")
    kernel = _few_rows if tile.m <= 2 else _rows
    kernel[grid](
        x,
        weight,
        weight if up is None else up,
        x if gain is None else gain,
        out if residual is None else residual,
        out,
        workspace.parts,
        workspace.arrived,
        m,
        n,
        k,
        eps,
        NORM=gain is not None,
        UP=up is not None,
        RESIDUAL=residual is not None,
        SPLIT=tile.split,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        EXACT=exact,
        **chained(x.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """x / rms(x) * gain of rows [M, K], in x's type; the eager twin is `RMSNorm`."""
    out = torch.empty_like(x)
    _norm[(x.shape[0],)](
        x,
        gain,
        out,
        x.shape[1],
        eps,
        BLOCK=triton.next_power_of_2(x.shape[1]),
        **chained(x.device),
        num_warps=4,
    )
    return out


@triton.jit
def _norm(x, gain, out, k, eps, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    at = tl.arange(0, BLOCK)
    here = at < k
    g = tl.load(gain + at, mask=here, other=0.0).to(tl.float32)
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64) * k
    value = tl.load(x + row + at, mask=here, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(value * value, axis=0) / k + eps)
    tl.store(out + row + at, (value * scale * g).to(out.dtype.element_ty), mask=here)


@triton.jit
def _few_rows(
    x,
    weight,
    up,
    gain,
    residual,
    out,
    parts,
    arrived,
    m,
    n,
    k,
    eps,
    NORM: tl.constexpr,
    UP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EXACT: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Two rows, multiplied element by element."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * 2
    inner = tl.arange(0, BK)
    a0 = tl.zeros([BN, BK], dtype=tl.float32)
    a1 = tl.zeros([BN, BK], dtype=tl.float32)
    u0 = tl.zeros([BN, BK], dtype=tl.float32)
    u1 = tl.zeros([BN, BK], dtype=tl.float32)
    s0 = tl.zeros([BK], dtype=tl.float32)
    s1 = tl.zeros([BK], dtype=tl.float32)
    w = _piece(weight, col, inner, n, k)
    if UP:
        v = _piece(up, col, inner, n, k)
        fetch(up, col, n, BK, k, k, CHAIN)
    fetch(weight, col, n, BK, k, k, CHAIN)
    follow(CHAIN)
    for start in range(0, k, BK):
        at = start + inner
        live = at < k
        w_now = w.to(tl.float32)
        w = _piece(weight, col, at + BK, n, k)  # on its way while this one is used
        if UP:
            v_now = v.to(tl.float32)
            v = _piece(up, col, at + BK, n, k)
        x0 = tl.load(x + row * k + at, mask=live & (row < m), other=0.0).to(tl.float32)
        x1 = tl.load(x + (row + 1) * k + at, mask=live & (row + 1 < m), other=0.0).to(tl.float32)
        if NORM:
            s0 += x0 * x0
            s1 += x1 * x1
            g = tl.load(gain + at, mask=live, other=0.0).to(tl.float32)
            x0 *= g
            x1 *= g
        a0 += w_now * x0[None, :]
        a1 += w_now * x1[None, :]
        if UP:
            u0 += v_now * x0[None, :]
            u1 += v_now * x1[None, :]
    one = tl.arange(0, 1)
    q0 = tl.sum(s0, axis=0) + tl.zeros([1], dtype=tl.float32)
    q1 = tl.sum(s1, axis=0) + tl.zeros([1], dtype=tl.float32)
    y0 = tl.sum(a0, axis=1)[None, :]
    y1 = tl.sum(a1, axis=1)[None, :]
    z0 = tl.sum(u0, axis=1)[None, :]
    z1 = tl.sum(u1, axis=1)[None, :]
    _finish(y0, z0, q0, row + one, col, residual, out, m, n, k, eps, NORM, UP, RESIDUAL)
    _finish(y1, z1, q1, row + 1 + one, col, residual, out, m, n, k, eps, NORM, UP, RESIDUAL)


@triton.jit
def _piece(weight, col, at, n, k):
    """weight[col, at], zero outside [N, K]."""
    return tl.load(weight + col[:, None] * k + at[None, :], mask=(col[:, None] < n) & (at[None, :] < k), other=0.0)


@triton.jit
def _rows(
    x,
    weight,
    up,
    gain,
    residual,
    out,
    parts,
    arrived,
    m,
    n,
    k,
    eps,
    NORM: tl.constexpr,
    UP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SPLIT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    EXACT: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """A tile [BM, BN] on the matrix units."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    share = tl.cdiv(tl.cdiv(k, BK), SPLIT) * BK
    begin = tl.program_id(2) * share
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    a = tl.zeros([BM, BN], dtype=tl.float32)
    u = tl.zeros([BM, BN], dtype=tl.float32)
    squares = tl.zeros([BM], dtype=tl.float32)
    if tl.program_id(1) == 0:
        fetch(weight, col, n, begin, min(begin + share, k), k, CHAIN)
        if UP:
            fetch(up, col, n, begin, min(begin + share, k), k, CHAIN)
    follow(CHAIN)
    for start in range(begin, min(begin + share, k), BK):
        at = start + tl.arange(0, BK)
        live = at < k
        here = (row[:, None] < m) & live[None, :]
        rows = tl.load(x + row[:, None] * k + at[None, :], mask=here, other=0.0)
        if NORM:
            wide = rows.to(tl.float32)
            squares += tl.sum(wide * wide, axis=1)
            g = tl.load(gain + at, mask=live, other=0.0).to(tl.float32)
            rows = (wide * g[None, :]).to(rows.dtype)
        there = live[:, None] & (col[None, :] < n)
        w = tl.load(weight + col[None, :] * k + at[:, None], mask=there, other=0.0)  # [BK, BN]
        a = tl.dot(rows, w, a, input_precision=precision)
        if UP:
            v = tl.load(up + col[None, :] * k + at[:, None], mask=there, other=0.0)
            u = tl.dot(rows, v, u, input_precision=precision)
    if SPLIT > 1:
        tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        inside = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(parts + (tile * SPLIT + tl.program_id(2)) * BM * BN + inside, a)
        tl.debug_barrier()  # all of this program's part is written before it says so
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLIT - 1:
            total = tl.zeros([BM, BN], dtype=tl.float32)
            for part in range(SPLIT):
                total += tl.load(parts + (tile * SPLIT + part) * BM * BN + inside, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
            _finish(total, u, squares, row, col, residual, out, m, n, k, eps, NORM, UP, RESIDUAL)
    else:
        _finish(a, u, squares, row, col, residual, out, m, n, k, eps, NORM, UP, RESIDUAL)


@triton.jit
def _finish(
    a,
    u,
    squares,
    row,
    col,
    residual,
    out,
    m,
    n,
    k,
    eps,
    NORM: tl.constexpr,
    UP: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    if NORM:
        scale = 1 / tl.sqrt(squares / k + eps)
        a *= scale[:, None]
        if UP:
            u *= scale[:, None]
    if UP:
        a = a / (1 + tl.exp(-a)) * u
    at = row[:, None] * n + col[None, :]
    here = (row[:, None] < m) & (col[None, :] < n)
    if RESIDUAL:
        a += tl.load(residual + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + at, a.to(out.dtype.element_ty), mask=here)
