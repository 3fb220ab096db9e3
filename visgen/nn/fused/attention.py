"""Attention of a window's new tokens against the cache: rotation, cache write and flash decoding in one kernel.

A program serves one key/value head of one row: it rotates new queries and keys, writes keys and values to the row's
slots, and walks the live slots alone, keeping a running maximum and sum (Milakov & Gimelshein 2018, "Online normalizer
calculation for softmax"; Dao et al. 2023, "Flash-Decoding"). A single query is multiplied without matrix units and
attended from registers, so nothing waits for the write. Several of them (a wider window, or heads that share keys) are
the rows of matrix products over the cache; where they take several programs, each writes the whole window's keys and
values, the same values to the same slots, so that none waits for another. The eager twin is `nn/attention.py` with
`KVCache` and the layout's mask.
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
LOG2_E = 1.4426950408889634  # powers of two are what the device computes


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
    """softmax(q k / sqrt(d)) v over the slots that each new token's slot may see: out [R W, H d].

    Args:
        qkv: [R W, (H + 2 Hkv) d] packed queries, keys, values of the new tokens.
        rotation: [S, d/2, 2] float32 (cos, sin) of every slot.
        keys, values: [R, Hkv, S, d] one layer of the cache, in qkv's type; slots pos are written.
        pos: [B, W] int64 slots of image b, in any order; row r is image r mod B.
        group: [S] int32 visibility group of every slot; reach: [S] int32, one past the last slot that each may see.
        visible: [R, P] uint8, 0 for padding slots of the prefix, or None; a padding slot sees itself.
    """
    rows, kv_heads, slots, d = keys.shape
    check_head_dim(d)
    if pos.shape[1] > 1 or qkv.shape[1] > 3 * kv_heads * d:
        return _decode_window(qkv, rotation, keys, values, pos, group, reach, visible, out)
    turn, ahead = _turn(rows * kv_heads)
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
        0 if visible is None else visible.shape[1],
        d**-0.5 * LOG2_E,
        HEAD_DIM=d,
        BD=triton.next_power_of_2(d),
        BS=turn,
        BUFFERED=ahead,
        PADDED=visible is not None,
        AHEAD=_fetched(rows * kv_heads),
        **chained(out.device),
        num_warps=1,
    )
    return out


def _turn(programs: int) -> tuple[int, bool]:
    """Slots of a turn, and whether the next turn's are loaded meanwhile: the widest of which a multiprocessor (an H100
    has 132) still holds all its programs."""
    each = triton.cdiv(programs, 132)
    return (64, False) if each <= 15 else (16, True) if each == 16 else (32, False)


def _fetched(programs: int) -> int:
    """Slots that a program fetches before the wait: all, or few where many programs share the cache."""
    return 32 if programs >= 512 else 1 << 16


def _decode_window(
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
    rows, kv_heads, slots, d = keys.shape
    images, window = pos.shape
    queries = qkv.shape[1] // d // kv_heads - 2  # query heads of a key/value head
    exact, lanes = qkv.dtype == torch.float32, max(16, triton.next_power_of_2(d))
    block, turn, stages = _cut(rows * kv_heads, window * queries, d, exact)
    _attend_window[(rows, kv_heads, triton.cdiv(window * queries, block))](
        qkv,
        rotation,
        keys,
        values,
        pos,
        group,
        reach,
        group if visible is None else visible,
        out,
        images,
        slots,
        window,
        0 if visible is None else visible.shape[1],
        d**-0.5 * LOG2_E,
        HEAD_DIM=d,
        BD=lanes,
        QUERIES=queries,
        BM=block,
        BS=turn,
        BW=min(triton.next_power_of_2(window), 4096 // lanes),
        PADDED=visible is not None,
        EXACT=exact,
        AHEAD=_fetched(rows * kv_heads),
        **chained(out.device),
        num_warps=4,
        num_stages=stages,
    )
    return out


def _cut(pairs: int, asked: int, head_dim: int, exact: bool) -> tuple[int, int, int]:
    """Queries of a program, slots of a turn and stages for `asked` queries of each row and key/value head."""
    if exact:
        return 16, 16, 1  # float32 has no matrix units: its products lie in registers
    block = 64 if head_dim <= 128 else 32
    while block > 16 and (block >= 2 * asked or pairs * triton.cdiv(asked, block) < 132):  # multiprocessors of an H100
        block //= 2
    return block, 128 if block == 16 and head_dim <= 64 else 64, 3 if head_dim <= 128 else 2


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
    prefix,
    scale,
    HEAD_DIM: tl.constexpr,
    BD: tl.constexpr,
    BS: tl.constexpr,
    PADDED: tl.constexpr,
    BUFFERED: tl.constexpr,
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
    real = dim < HEAD_DIM
    cos = tl.load(rotation + slot * HEAD_DIM + 2 * pair, mask=2 * pair < HEAD_DIM, other=0.0)
    sin = tl.load(rotation + slot * HEAD_DIM + 2 * pair + 1, mask=2 * pair < HEAD_DIM, other=0.0)

    base = (row * kv_heads + head).to(tl.int64) * slots * HEAD_DIM
    end = tl.load(reach + slot)
    one = tl.arange(0, 1)
    fetch(keys + base, one, 1, 0, min(end, AHEAD) * HEAD_DIM, 0, CHAIN)
    fetch(values + base, one, 1, 0, min(end, AHEAD) * HEAD_DIM, 0, CHAIN)
    follow(CHAIN)
    new = qkv + row * 3 * kv_heads * HEAD_DIM
    q = tl.load(new + head * HEAD_DIM + dim[None, :], mask=real[None, :], other=0.0)
    q = _rotate(q, cos, sin, 1, BD).to(q.dtype).to(tl.float32) * scale
    k = tl.load(new + (kv_heads + head) * HEAD_DIM + dim, mask=real, other=0.0)
    k = _rotate(k[None, :], cos, sin, 1, BD).to(k.dtype)
    v = tl.load(new + (2 * kv_heads + head) * HEAD_DIM + dim, mask=real, other=0.0)
    flat = tl.reshape(k, [BD])
    tl.store(keys + base + slot * HEAD_DIM + dim, flat, mask=real)
    tl.store(values + base + slot * HEAD_DIM + dim, v, mask=real)

    best = tl.sum(q * k.to(tl.float32), axis=1)  # [1], of the new slot itself
    total = tl.full([1], 1.0, tl.float32)
    mixed = tl.zeros([1, BD], dtype=tl.float32) + v.to(tl.float32)[None, :]
    turn = tl.arange(0, BS)
    if BUFFERED:
        past = _cached(keys + base, turn, end, dim, HEAD_DIM)
        kept = _cached(values + base, turn, end, dim, HEAD_DIM)
    for start in range(0, end, BS):
        key = start + turn
        seen = (key < end) & (key != slot)
        seen = seen & (tl.load(group + key, mask=seen, other=2147483647) <= mine)
        if PADDED:
            seen = seen & (tl.load(visible + row * prefix + key, mask=seen & (key < prefix), other=1) != 0)
        if BUFFERED:
            k_now = past.to(tl.float32)  # [BS, BD]
            v_now = kept.to(tl.float32)
            past = _cached(keys + base, key + BS, end, dim, HEAD_DIM)  # on their way while these are used
            kept = _cached(values + base, key + BS, end, dim, HEAD_DIM)
        else:
            k_now = _cached(keys + base, key, end, dim, HEAD_DIM).to(tl.float32)
            v_now = _cached(values + base, key, end, dim, HEAD_DIM).to(tl.float32)
        score = tl.where(seen[None, :], tl.sum(k_now * q, axis=1)[None, :], float("-inf"))
        top = tl.maximum(best, tl.max(score, axis=1))
        share = tl.exp2(score - top[:, None])  # [1, BS]
        fade = tl.exp2(best - top)
        total = total * fade + tl.sum(share, axis=1)
        mixed = mixed * fade[:, None] + tl.sum(tl.reshape(share, [BS])[:, None] * v_now, axis=0)[None, :]
        best = top
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + (row * kv_heads + head) * HEAD_DIM + dim[None, :], result, mask=real[None, :])


@triton.jit
def _cached(cache, key, end, dim, HEAD_DIM: tl.constexpr):
    """cache[key, dim] of a row and head, zero beyond the live slots."""
    here = (key < end)[:, None] & (dim < HEAD_DIM)[None, :]
    there = cache + key[:, None] * HEAD_DIM + dim[None, :]
    return tl.load(there, mask=here, other=0.0, eviction_policy="evict_first")  # a step reads it once


@triton.jit
def _attend_window(
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
    window,
    prefix,
    scale,
    HEAD_DIM: tl.constexpr,
    BD: tl.constexpr,
    QUERIES: tl.constexpr,  # query heads of a key/value head
    BM: tl.constexpr,
    BS: tl.constexpr,
    BW: tl.constexpr,
    PADDED: tl.constexpr,
    EXACT: tl.constexpr,
    AHEAD: tl.constexpr,
    CHAIN: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    precision: tl.constexpr = "ieee" if EXACT else "tf32"
    width = (QUERIES + 2) * kv_heads * HEAD_DIM
    dim = tl.arange(0, BD)
    real = dim < HEAD_DIM
    at_slots = pos + (row % images) * window
    new = qkv + (row * window).to(tl.int64) * width
    base = (row * kv_heads + head).to(tl.int64) * slots * HEAD_DIM

    asked = tl.program_id(2) * BM + tl.arange(0, BM)
    place = asked // QUERIES
    live = place < window
    slot = tl.load(at_slots + place, mask=live, other=0).to(tl.int32)
    mine = tl.load(group + slot)
    end = tl.max(tl.load(reach + slot, mask=live, other=0), axis=0)
    one = tl.arange(0, 1)
    fetch(keys + base, one, 1, 0, min(end, AHEAD) * HEAD_DIM, 0, CHAIN)
    fetch(values + base, one, 1, 0, min(end, AHEAD) * HEAD_DIM, 0, CHAIN)
    follow(CHAIN)

    for start in range(0, window, BW):
        each = start + tl.arange(0, BW)
        within = each < window
        into = tl.load(at_slots + each, mask=within, other=0).to(tl.int32)
        here = within[:, None] & real[None, :]
        at = new + each[:, None] * width + (QUERIES * kv_heads + head) * HEAD_DIM + dim[None, :]
        k = tl.load(at, mask=here, other=0.0)
        v = tl.load(at + kv_heads * HEAD_DIM, mask=here, other=0.0)
        to = base + into[:, None] * HEAD_DIM + dim[None, :]
        tl.store(keys + to, _rotate_each(k, rotation, into, HEAD_DIM, BW, BD), mask=here)
        tl.store(values + to, v, mask=here)
    tl.debug_barrier()  # the window is written before any of it is read

    here = live[:, None] & real[None, :]
    lane = (head * QUERIES + asked % QUERIES)[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(new + place[:, None] * width + lane, mask=here, other=0.0)
    q = _rotate_each(q, rotation, slot, HEAD_DIM, BM, BD)

    best = tl.full([BM], -1e30, tl.float32)  # below any score, and finite where a turn has none
    total = tl.zeros([BM], dtype=tl.float32)
    mixed = tl.zeros([BM, BD], dtype=tl.float32)
    for start in range(0, end, BS):
        key = start + tl.arange(0, BS)
        inside = key < slots
        there = base + key[:, None] * HEAD_DIM + dim[None, :]
        cached = inside[:, None] & real[None, :]
        past = tl.load(keys + there, mask=cached, other=0.0)  # [BS, BD]
        kept = tl.load(values + there, mask=cached, other=0.0)
        seen = tl.load(group + key, mask=inside, other=2147483647)[None, :] <= mine[:, None]  # [BM, BS]
        if PADDED:
            present = tl.load(visible + row * prefix + key, mask=key < prefix, other=1) != 0
            seen = seen & (present[None, :] | (key[None, :] == slot[:, None]))
        score = tl.where(seen, tl.dot(q, tl.trans(past), input_precision=precision) * scale, float("-inf"))
        top = tl.maximum(best, tl.max(score, axis=1))
        share = tl.exp2(score - top[:, None])
        fade = tl.exp2(best - top)
        total = total * fade + tl.sum(share, axis=1)
        mixed = tl.dot(share.to(kept.dtype), kept, mixed * fade[:, None], input_precision=precision)
        best = top
    result = (mixed / total[:, None]).to(out.dtype.element_ty)
    own = (row * window).to(tl.int64) * QUERIES * kv_heads * HEAD_DIM
    tl.store(out + own + place[:, None] * QUERIES * kv_heads * HEAD_DIM + lane, result, mask=here)


@triton.jit
def _rotate_each(x, rotation, slot, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr):
    """Turns x [ROWS, BD], each row by its slot's rotation; in x's type."""
    dim = tl.arange(0, BD)[None, :]
    turn = tl.load(rotation + slot[:, None] * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
    cos, sin = tl.split(tl.reshape(turn, [ROWS, BD // 2, 2]))
    return _rotate(x, cos, sin, ROWS, BD).to(x.dtype)


@triton.jit
def _rotate(x, cos, sin, ROWS: tl.constexpr, BD: tl.constexpr):
    """Turns the interleaved pairs of x [ROWS, BD] by (cos, sin) [BD / 2] or [ROWS, BD / 2]; float32."""
    a, b = tl.split(tl.reshape(x.to(tl.float32), [ROWS, BD // 2, 2]))
    turned = tl.join(a * cos - b * sin, b * cos + a * sin)
    return tl.reshape(turned, [ROWS, BD])
