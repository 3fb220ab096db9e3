"""What a pass over all slots of many sequences does between its products: rotary positions, and SwiGLU's gate.

Both work in place, and read and write each value once: 16,000 rows leave the caches between any two kernels, so bytes
are what counts. The eager twins are `nn.rope.rotate` and `nn.mlp.SwiGLU`; the norm is `linear.rms_norm`.
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
def _gate(x, up, count, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = at < count
    follow(CHAIN)
    a = tl.load(x + at, mask=here, other=0.0)
    b = tl.load(up + at, mask=here, other=0.0).to(tl.float32)
    value = a.to(tl.float32)
    tl.store(x + at, (value / (1 + tl.exp(-value)) * b).to(a.dtype), mask=here)
