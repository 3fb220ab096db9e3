"""The products of `linear.py` for a batch of many images, whose operands are loaded by tensor descriptors.

From Hopper on a multiprocessor moves whole tiles by itself: no program computes addresses, and what is under way takes
no registers. Descriptors are made on the host for every launch and are arguments of the kernel, so a graph holds them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from visgen.nn.fused.chain import chained, fetch, follow
from visgen.nn.fused.tile import Tile


def describable(x: Tensor, weight: Tensor) -> bool:
    """Whether operands can be loaded by tensor descriptors."""
    aligned = x.shape[1] % 8 == 0 and x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    return aligned and x.element_size() == 2 and chained(x.device)["CHAIN"]


def product(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    residual: Tensor | None,
    out: Tensor,
    tile: Tile,
) -> Tensor:
    """As `linear.linear`, without a norm."""
    (m, k), n = x.shape, weight.shape[0]
    second = weight if up is None else up
    _product[(triton.cdiv(n, tile.n), triton.cdiv(m, tile.m))](
        TensorDescriptor.from_tensor(x, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(weight, [tile.n, tile.k]),
        TensorDescriptor.from_tensor(second, [tile.n, tile.k]),
        weight,
        second,
        out if residual is None else residual,
        out,
        m,
        n,
        k,
        UP=up is not None,
        RESIDUAL=residual is not None,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        **chained(out.device),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


@triton.jit
def _product(
    x,
    weight,
    up,
    weight_at,
    up_at,
    residual,
    out,
    m,
    n,
    k,
    UP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """A tile [BM, BN] on the matrix units, of operands given by descriptors; zero beyond them."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    if tl.program_id(1) == 0:
        fetch(weight_at, col, n, 0, k, k, CHAIN)
        if UP:
            fetch(up_at, col, n, 0, k, k, CHAIN)
    follow(CHAIN)
    a = tl.zeros([BM, BN], dtype=tl.float32)
    u = tl.zeros([BM, BN], dtype=tl.float32)
    for start in range(0, k, BK):
        rows = x.load([tl.program_id(1) * BM, start])
        a = tl.dot(rows, weight.load([tl.program_id(0) * BN, start]).T, a)
        if UP:
            u = tl.dot(rows, up.load([tl.program_id(0) * BN, start]).T, u)
    if UP:
        a = a / (1 + tl.exp(-a)) * u
    to = row[:, None] * n + col[None, :]
    here = (row[:, None] < m) & (col[None, :] < n)
    if RESIDUAL:
        a += tl.load(residual + to, mask=here, other=0.0).to(tl.float32)
    tl.store(out + to, a.to(out.dtype.element_ty), mask=here)
