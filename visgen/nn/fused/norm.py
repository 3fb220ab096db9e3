"""A layer norm of a sum with one vector, in one kernel, which reads and writes each value once.

The eager twins are `+` and `nn.LayerNorm`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from visgen.nn.fused.chain import chained, follow


def shifted_norm(x: Tensor, shift: Tensor, norm: nn.LayerNorm) -> Tensor:
    """norm(x + shift) of x [..., D], contiguous, and shift [D] float32, in the type of x."""
    out, width = torch.empty_like(x), x.shape[-1]
    block, options = triton.next_power_of_2(width), chained(x.device)
    _norm[(x.numel() // width,)](
        x, shift, norm.weight, norm.bias, out, width, norm.eps, BLOCK=block, **options, num_warps=4
    )
    return out


@triton.jit
def _norm(x, shift, gain, offset, out, width, eps, BLOCK: tl.constexpr, CHAIN: tl.constexpr):
    at = tl.arange(0, BLOCK)
    here = at < width
    g = tl.load(gain + at, mask=here, other=0.0).to(tl.float32)
    o = tl.load(offset + at, mask=here, other=0.0).to(tl.float32)
    follow(CHAIN)
    row = tl.program_id(0).to(tl.int64) * width + at
    value = tl.load(x + row, mask=here, other=0.0).to(tl.float32) + tl.load(shift + at, mask=here, other=0.0)
    normed = normalised(value, here, width, eps) * g + o
    tl.store(out + row, normed.to(out.dtype.element_ty), mask=here)


@triton.jit
def normalised(value, here, width, eps):
    """LN of one row without its weights, zero beyond it."""
    mean = tl.sum(value, axis=0) / width
    away = tl.where(here, value - mean, 0.0)
    return away / tl.sqrt(tl.sum(away * away, axis=0) / width + eps)
