"""What a pass over all slots of many sequences does between its products: rotary positions, and SwiGLU's gate.

Each value is read and written once: 16,000 rows leave the caches between any two kernels, so bytes are what counts. The
eager twins are `nn.rope.rotate`, `nn.heads.joined` (in training, the gradient of rotary positions) and `nn.mlp.SwiGLU`;
the norm is `linear.rms_norm`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from visgen.nn.fused.attention import _rotate
from visgen.nn.fused.chain import chained, follow

GATED = 4096  # values of a program


def turn(packed: Tensor, rotation: Tensor, heads: int) -> None:
    """Turns the first `heads` heads (queries and keys) of every row by its slot's rotation, in place.

    Args:
        packed: [B, S, >= heads * d], rows contiguous.
        rotation: [S, d / 2, 2] float32 (cos, sin), contiguous, of `nn.rope.rope_2d`.
    """
    rows, slots, width = packed.shape
    head_dim = 2 * rotation.shape[1]
    if not packed.is_contiguous() or len(rotation) != slots or heads * head_dim > width:
        raise ValueError(
            f"{heads} heads of {list(rotation.shape)} do not fit rows {list(packed.shape)}, or these lie apart"
        )
    _turn[(rows * slots,)](
        packed,
        rotation,
        slots,
        width,
        HEADS=heads,
        HEAD_DIM=head_dim,
        BH=triton.next_power_of_2(heads),
        BD=triton.next_power_of_2(head_dim),
        **chained(packed.device),
        num_warps=4,
    )


def turn_back(dq: Tensor, dk: Tensor, dv: Tensor, rotation: Tensor) -> Tensor:
    """Gradients of turned queries, turned keys and values side by side in rows, turned back: [B, S, heads * d].

    Args:
        dq, dk, dv: [B, H, S, d] of one type, each with heads of its own, however they lie.
        rotation: [B or 1, S, d / 2, 2] float32 (cos, sin).
    """
    rows, _, slots, head_dim = dq.shape
    heads = [part.shape[1] for part in (dq, dk, dv)]
    if rotation.shape[1:] != (slots, head_dim // 2, 2) or len(rotation) not in (1, rows):
        raise ValueError(f"rotation {list(rotation.shape)} does not fit gradients {list(dq.shape)}")
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in (dq, dk, dv)]
    rotation = rotation.contiguous()
    packed = dq.new_empty(rows, slots, sum(heads) * head_dim)
    _turn_back[(rows * slots, 3)](
        *parts,
        rotation,
        packed,
        slots,
        rotation.stride(0) if len(rotation) > 1 else 0,
        *(stride for part in parts for stride in part.stride()[:3]),
        HQ=heads[0],
        HK=heads[1],
        HV=heads[2],
        HEAD_DIM=head_dim,
        BQ=triton.next_power_of_2(heads[0]),
        BK=triton.next_power_of_2(heads[1]),
        BV=triton.next_power_of_2(heads[2]),
        BD=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return packed


def gate(x: Tensor, up: Tensor) -> None:
    """x = silu(x) * up, in place, of one shape and type and contiguous both."""
    if x.shape != up.shape or x.dtype != up.dtype or not (x.is_contiguous() and up.is_contiguous()):
        raise ValueError(f"{x.dtype} {list(x.shape)} and {up.dtype} {list(up.shape)} must be alike and contiguous")
    _gate[(triton.cdiv(x.numel(), GATED),)](x, up, x.numel(), BLOCK=GATED, **chained(x.device), num_warps=8)


@triton.jit
def _turn(
    packed,
    rotation,
    slots,
    width,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    CHAIN: tl.constexpr,
):
    row = tl.program_id(0)
    dim = tl.arange(0, BD)
    head = tl.arange(0, BH)
    angle = tl.load(rotation + (row % slots) * HEAD_DIM + dim, mask=dim < HEAD_DIM, other=0.0)
    cos, sin = tl.split(tl.reshape(angle, [1, BD // 2, 2]))
    at = packed + row.to(tl.int64) * width + head[:, None] * HEAD_DIM + dim[None, :]
    here = (head[:, None] < HEADS) & (dim[None, :] < HEAD_DIM)
    follow(CHAIN)
    x = tl.load(at, mask=here, other=0.0)
    tl.store(at, _rotate(x, cos, sin, BH, BD).to(x.dtype), mask=here)


@triton.jit
def _turn_back(
    dq,
    dk,
    dv,
    rotation,
    packed,
    slots,
    rotation_row,
    q_row,
    q_head,
    q_slot,
    k_row,
    k_head,
    k_slot,
    v_row,
    v_head,
    v_slot,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HV: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BD: tl.constexpr,
):
    place = tl.program_id(0)
    row, slot = (place // slots).to(tl.int64), place % slots
    turns = rotation + row * rotation_row + slot * HEAD_DIM
    out = packed + place.to(tl.int64) * ((HQ + HK + HV) * HEAD_DIM)
    if tl.program_id(1) == 0:
        _put(dq + row * q_row + slot * q_slot, q_head, turns, out, HQ, HEAD_DIM, BQ, BD, TURN=True)
    elif tl.program_id(1) == 1:
        _put(dk + row * k_row + slot * k_slot, k_head, turns, out + HQ * HEAD_DIM, HK, HEAD_DIM, BK, BD, TURN=True)
    else:
        out += (HQ + HK) * HEAD_DIM
        _put(dv + row * v_row + slot * v_slot, v_head, turns, out, HV, HEAD_DIM, BV, BD, TURN=False)


@triton.jit
def _put(
    given,
    stride,
    turns,
    out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    TURN: tl.constexpr,
):
    """The heads of one slot, `stride` apart, to `out`, side by side; turned back where TURN."""
    dim, head = tl.arange(0, BD), tl.arange(0, BH)
    here = (head[:, None] < HEADS) & (dim[None, :] < HEAD_DIM)
    x = tl.load(given + head[:, None] * stride + dim[None, :], mask=here, other=0.0)
    if TURN:
        angle = tl.load(turns + dim, mask=dim < HEAD_DIM, other=0.0)
        cos, sin = tl.split(tl.reshape(angle, [1, BD // 2, 2]))
        x = _rotate(x, cos, -sin, BH, BD).to(x.dtype)
    tl.store(out + head[:, None] * HEAD_DIM + dim[None, :], x, mask=here)


@triton.jit
def _gate(x, up, count, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    follow(CHAIN)
    a = tl.load(x + at, mask=here, other=0.0)
    b = tl.load(up + at, mask=here, other=0.0).to(tl.float32)
    value = a.to(tl.float32)
    tl.store(x + at, (value / (1 + tl.exp(-value)) * b).to(a.dtype), mask=here)
