"""The products of `linear.py` for a batch of many images, whose operands are loaded by tensor descriptors.

From Hopper on a multiprocessor moves whole tiles by itself: no program computes addresses, and what is under way takes
no registers. Descriptors are made on the host for every launch and are arguments of the kernel, so a graph holds them.

Such products wait for the cache that all programs share, for each reads all rows, and not for the memory behind it,
which is free to fill that cache meanwhile with what an attention some kernels later reads (`Later`).
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from visgen.nn.fused.chain import chained, fetch, follow
from visgen.nn.fused.tile import Tile


class Later(NamedTuple):
    """What a product fetches for an attention some kernels later: the first slots of its cache that are live.

    Attributes:
        keys, values: [R, Hkv, S, d], one layer of the cache.
        pos, reach: as of `decode_attention`; the first image's last one says for all how many are live.
        first, end: which slots of each row and head.
    """

    keys: Tensor
    values: Tensor
    pos: Tensor
    reach: Tensor
    first: int
    end: int


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
    later: Later | None,
) -> Tensor:
    """As `linear.linear`, without a norm."""
    (m, k), n = x.shape, weight.shape[0]
    second = weight if up is None else up
    rows, heads, slots, head_dim = (1, 1, 1, 1) if later is None else later.keys.shape
    _product[(triton.cdiv(n, tile.n), triton.cdiv(m, tile.m))](
        TensorDescriptor.from_tensor(x, [tile.m, tile.k]),
        TensorDescriptor.from_tensor(weight, [tile.n, tile.k]),
        TensorDescriptor.from_tensor(second, [tile.n, tile.k]),
        weight,
        second,
        out if residual is None else residual,
        out,
        *((weight, weight, weight, weight, 0, 0) if later is None else later),
        1 if later is None else later.pos.shape[1],
        rows * heads,
        slots * head_dim,
        m,
        n,
        k,
        UP=up is not None,
        RESIDUAL=residual is not None,
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        LATER=later is not None,
        HEAD_DIM=head_dim,
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
    keys,
    values,
    pos,
    reach,
    first,
    end,
    window,
    pairs,
    pitch,
    m,
    n,
    k,
    UP: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    LATER: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """A tile [BM, BN] on the matrix units, of operands given by descriptors; zero beyond them."""
    col = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BM + tl.arange(0, BM)
    if tl.program_id(1) == 0:
        fetch(weight_at, col, n, 0, k, k, CHAIN)
        if UP:
            fetch(up_at, col, n, 0, k, k, CHAIN)
    if LATER:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        step = 16 * tl.num_programs(0) * tl.num_programs(1)
        live = min(tl.load(reach + tl.load(pos + window - 1)), end)
        for start in range(16 * program, pairs, step):
            pair = (start + tl.arange(0, 16)).to(tl.int64)
            fetch(keys, pair, pairs, first * HEAD_DIM, live * HEAD_DIM, pitch, CHAIN)
            fetch(values, pair, pairs, first * HEAD_DIM, live * HEAD_DIM, pitch, CHAIN)
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
