"""What a control adds before a layer, looked up and added in one kernel; the eager twin is `nn.control.at_slots`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from visgen.nn.fused.chain import chained, follow


def add_control(x: Tensor, control: Tensor, index: Tensor) -> None:
    """x[r, w] += control[r, index[r mod B, w]], in place.

    Args:
        x: [R, W, D], contiguous.
        control: [R, N, D] in x's type, contiguous.
        index: [B, W] int64, the tokens that the slots predict.
    """
    rows, window, width = x.shape
    if control.dtype != x.dtype or not (control.is_contiguous() and x.is_contiguous()):
        raise ValueError(f"control {control.dtype} and x {x.dtype} must be contiguous, and of one type")
    _add[(rows, window)](
        x,
        control,
        index,
        len(index),
        control.shape[1],
        index.stride(0),
        index.stride(1),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        **chained(x.device),
    )


@triton.jit
def _add(
    x,
    control,
    index,
    images,
    count,
    image_stride,
    window_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    row = tl.program_id(0)
    place = tl.program_id(1)
    at = tl.load(index + (row % images) * image_stride + place * window_stride)
    lane = tl.arange(0, BLOCK)
    inside = lane < WIDTH
    target = x + (row * tl.num_programs(1) + place) * WIDTH + lane
    added = tl.load(control + (row.to(tl.int64) * count + at) * WIDTH + lane, mask=inside)
    total = tl.load(target, mask=inside).to(tl.float32) + added.to(tl.float32)
    tl.store(target, total.to(x.dtype.element_ty), mask=inside)
