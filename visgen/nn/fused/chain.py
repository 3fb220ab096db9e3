"""Programmatic dependent launch: a kernel starts while the one before it still runs, and waits only before it reads
what that one writes.

What a kernel may do before `follow` is to read what no kernel of the step writes: its weights. So the first of them are
on their way while the kernel before ends, which is most of the idle time of a step of short kernels. Every program of a
chained kernel calls `follow`, so a kernel that is past it knows that all kernels before the previous one are complete.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda


@functools.cache
def chained(device: torch.device) -> dict[str, bool]:
    """Options of a kernel's launch: chained where the device can (Hopper and later)."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"CHAIN": can, "launch_pdl": can}


@triton.jit
def follow(CHAIN: tl.constexpr):
    """Waits for the kernel before, and lets the one behind start."""
    if CHAIN:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()


@triton.jit
def fetch(matrix, row, rows, begin, end, width, CHAIN: tl.constexpr):
    """Brings matrix[row, begin:end] of a [rows, width] matrix nearer, to the cache that all programs share."""
    if CHAIN:
        LINE: tl.constexpr = 1024 // matrix.dtype.element_ty.primitive_bitwidth  # a cache line has 128 bytes
        for start in range(begin, end, 8 * LINE):
            at = start + LINE * tl.arange(0, 8)
            here = (row[:, None] < rows) & (at[None, :] < end)
            tl.inline_asm_elementwise(
                "{ .reg .pred here; setp.ne.s32 here, $2, 0; @here prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
                "=r,l,r",
                [(matrix + row[:, None] * width + at[None, :]).to(tl.int64), here.to(tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )
