"""What enters the first layer: the condition's vector in a prefix slot, the code's embedding elsewhere."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visgen.nn.fused.chain import chained, follow


def embed(tokens: Tensor, index: Tensor, table: Tensor, prefix: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs of the slots that predict the tokens at index: x [R, W, D], and those slots [B, W] int64.

    Slot P - 1 + k predicts token k and holds token k - 1, or the condition's last vector where k = 0.

    Args:
        tokens: [B, N] int64; index: [B, W] int64.
        table: [V, D] embeddings; prefix: [R, P, D] in table's type, contiguous; row r is image r mod B.
    """
    rows, slots, width = prefix.shape
    images, window = index.shape
    x = torch.empty(rows, window, width, dtype=table.dtype, device=table.device)
    pos = torch.empty_like(index, memory_format=torch.contiguous_format)
    _embed[(rows, window)](
        tokens,
        index,
        table,
        prefix,
        x,
        pos,
        images,
        tokens.stride(0),
        index.stride(0),
        index.stride(1),
        slots,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        **chained(x.device),
    )
    return x, pos


@triton.jit
def _embed(
    tokens,
    index,
    table,
    prefix,
    x,
    pos,
    images,
    stride,
    image_stride,
    window_stride,
    slots,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    row = tl.program_id(0)
    place = tl.program_id(1)
    window = tl.num_programs(1)
    image = row % images
    at = tl.load(index + image * image_stride + place * window_stride)
    lane = tl.arange(0, BLOCK)
    source = prefix + (row * slots + slots - 1) * WIDTH
    if at > 0:
        source = table + tl.load(tokens + image * stride + at - 1) * WIDTH
    tl.store(x + (row * window + place) * WIDTH + lane, tl.load(source + lane, mask=lane < WIDTH), mask=lane < WIDTH)
    if row < images:
        tl.store(pos + image * window + place, at + slots - 1)
