"""Attention of one new token per row against its cache: rotation, cache write and flash decoding in one kernel.

A program serves one key/value head of one row: it rotates the new query and key, writes key and value to the row's
slot, and walks the live slots alone, keeping a running maximum and sum (Milakov & Gimelshein 2018, "Online normalizer
calculation for softmax"; Dao et al. 2023, "Flash-Decoding"). The new slot is attended from registers, so nothing waits
for the write. The eager twin is `nn/attention.py` with `KVCache` and the layout's mask.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visgen.checks import UserError
from visgen.nn.fused import EAGER
from visgen.nn.fused.chain import chained, fetch, follow

MAX_HEAD_DIM = 256


def decode_attention(
    qkv: Tensor,
    rotation: Tensor,
    keys: Tensor,
    values: Tensor,
    pos: Tensor,
    group: Tensor,
    reach: Tensor,
    visible: Tensor | None,
    out: Tensor,
) -> Tensor:
    """softmax(q k / sqrt(d)) v over the slots that each row's slot may see: out [R, H d].

    Args:
        qkv: [R, (H + 2 Hkv) d] packed queries, keys, values of the new tokens.
        rotation: [S, d/2, 2] float32 (cos, sin) of every slot.
        keys, values: [R, Hkv, S, d] one layer of the cache; slot pos is written.
        pos: [B] int64 slot of image b; row r is image r mod B.
        group: [S] int32 visibility group of every slot; reach: [S] int32, one past the last slot that each may see.
        visible: [R, P] uint8, 0 for padding slots of the prefix, or None.
    """
    rows, kv_heads, slots, d = keys.shape
    heads = qkv.shape[1] // d - 2 * kv_heads
    check_head_dim(d)
    many = rows * kv_heads >= 512  # programs enough to hide each other's waits
    _attend[(rows, kv_heads)](
        qkv,
        rotation,
        keys,
        values,
        pos,
        group,
        reach,
        group if visible is None else visible,
        out,
        pos.shape[0],
        slots,
        heads // kv_heads,
        0 if visible is None else visible.shape[1],
        d**-0.5 * 1.4426950408889634,  # log2(e): powers of two are what the device computes
        HEAD_DIM=d,
        BD=triton.next_power_of_2(d),
        QUERIES=triton.next_power_of_2(heads // kv_heads),
        BS=64 if many else 128,
        PADDED=visible is not None,
        AHEAD=64 if many else 1 << 16,
        CHAIN=(chain := chained(out.device)),
        num_warps=2 if many else 4,
        launch_pdl=chain,
    )
    return out


def check_head_dim(head_dim: int) -> None:
    """Raises `UserError` for a head that does not fit a program."""
    if head_dim > MAX_HEAD_DIM or head_dim % 2:
        raise UserError(f"head size {head_dim} is not among the even ones up to {MAX_HEAD_DIM} that are fused; {EAGER}")


def reach_of(group: Tensor) -> Tensor:
    """One past the last slot that each slot may see: group [S] -> [S] int32."""
    seen = group.unsqueeze(0) <= group.unsqueeze(1)  # [S, S]
    slots = torch.arange(1, len(group) + 1, device=group.device)
    return (seen * slots).amax(1).int()


@triton.jit
def _attend(
    qkv,
    rotation,
    keys,
    values,
    pos,
    group,
    reach,
    visible,
    out,
    images,
    slots,
    queries,  # query heads of a key/value head
    prefix,
    scale,
    HEAD_DIM: tl.constexpr,
    BD: tl.constexpr,
    QUERIES: tl.constexpr,
    BS: tl.constexpr,
    PADDED: tl.constexpr,
    AHEAD: tl.constexpr,  # slots that are fetched before the wait
    CHAIN: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    slot = tl.load(pos + row % images).to(tl.int32)  # nothing of this iteration writes it before its last kernels
    mine = tl.load(group + slot)
    pair = tl.arange(0, BD // 2)
    dim = tl.arange(0, BD)
    member = tl.arange(0, QUERIES)
    real = dim < HEAD_DIM
    cos = tl.load(rotation + slot * HEAD_DIM + 2 * pair, mask=2 * pair < HEAD_DIM, other=0.0)
    sin = tl.load(rotation + slot * HEAD_DIM + 2 * pair + 1, mask=2 * pair < HEAD_DIM, other=0.0)

    base = (row * kv_heads + head).to(tl.int64) * slots * HEAD_DIM
    end = tl.load(reach + slot)
    one = tl.arange(0, 1)
    fetch(keys + base, one, 1, 0, min(end, AHEAD) * HEAD_DIM, 0, CHAIN)
    fetch(values + base, one, 1, 0, min(end, AHEAD) * HEAD_DIM, 0, CHAIN)
    follow(CHAIN)
    heads = queries * kv_heads
    new = qkv + row * (heads + 2 * kv_heads) * HEAD_DIM
    asked = (member[:, None] < queries) & real[None, :]
    q = tl.load(new + (head * queries + member)[:, None] * HEAD_DIM + dim[None, :], mask=asked, other=0.0)
    q = _rotate(q, cos, sin, QUERIES, BD).to(q.dtype).to(tl.float32) * scale
    k = tl.load(new + (heads + head) * HEAD_DIM + dim, mask=real, other=0.0)
    k = _rotate(k[None, :], cos, sin, 1, BD).to(k.dtype)
    v = tl.load(new + (heads + kv_heads + head) * HEAD_DIM + dim, mask=real, other=0.0)
    flat = tl.reshape(k, [BD])
    tl.store(keys + base + slot * HEAD_DIM + dim, flat, mask=real)
    tl.store(values + base + slot * HEAD_DIM + dim, v, mask=real)

    best = tl.sum(q * k.to(tl.float32), axis=1)  # [QUERIES], of the new slot itself
    total = tl.full([QUERIES], 1.0, tl.float32)
    mixed = tl.zeros([QUERIES, BD], dtype=tl.float32) + v.to(tl.float32)[None, :]
    for start in range(0, end, BS):
        key = start + tl.arange(0, BS)
        seen = (key < slots) & (key != slot)
        seen = seen & (tl.load(group + key, mask=seen, other=2147483647) <= mine)
        if PADDED:
            seen = seen & (tl.load(visible + row * prefix + key, mask=seen & (key < prefix), other=1) != 0)
        at = base + key[:, None] * HEAD_DIM + dim[None, :]
        here = seen[:, None] & real[None, :]
        past = tl.load(keys + at, mask=here, other=0.0).to(tl.float32)  # [BS, BD]
        kept = tl.load(values + at, mask=here, other=0.0).to(tl.float32)
        score = tl.where(seen[None, :], _dots(q, past, QUERIES), float("-inf"))
        top = tl.maximum(best, tl.max(score, axis=1))
        share = tl.exp2(score - top[:, None])  # [QUERIES, BS]
        fade = tl.exp2(best - top)
        total = total * fade + tl.sum(share, axis=1)
        mixed = mixed * fade[:, None] + _weighted(share, kept, QUERIES, BS)
        best = top
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(
        out + row * heads * HEAD_DIM + (head * queries + member)[:, None] * HEAD_DIM + dim[None, :], result, mask=asked
    )


@triton.jit
def _dots(q, past, QUERIES: tl.constexpr):
    """q [QUERIES, BD], past [BS, BD] -> [QUERIES, BS]."""
    if QUERIES == 1:
        return tl.sum(past * q, axis=1)[None, :]
    else:
        return tl.sum(q[:, None, :] * past[None, :, :], axis=2)


@triton.jit
def _weighted(share, kept, QUERIES: tl.constexpr, BS: tl.constexpr):
    """share [QUERIES, BS], kept [BS, BD] -> [QUERIES, BD]."""
    if QUERIES == 1:
        return tl.sum(tl.reshape(share, [BS])[:, None] * kept, axis=0)[None, :]
    else:
        return tl.sum(share[:, :, None] * kept[None, :, :], axis=1)


@triton.jit
def _rotate(x, cos, sin, ROWS: tl.constexpr, BD: tl.constexpr):
    """Turns the interleaved pairs of x [ROWS, BD] by (cos, sin) [BD / 2]; float32."""
    a, b = tl.split(tl.reshape(x.to(tl.float32), [ROWS, BD // 2, 2]))
    turned = tl.join(a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :])
    return tl.reshape(turned, [ROWS, BD])
