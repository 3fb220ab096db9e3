"""The layers of `mar.py` on a GPU: of what is neither a product nor attention, as little as may be.

A batch of 64 under two branches has 40,000 slots, whose values leave the caches between any two kernels, so sums and
norms count. The residual sum is part of the product before it; biases, the same for all slots, are left out of the
sum and told to the norms that read it. In half precision GELU is part of the MLP's first product, in the form of the
library, with tanh in the place of erf: it differs by at most 5e-4, in the mean square by a ninth of what rounding to
bfloat16 does. Float32 has the exact one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visgen.nn.fused.norm import shifted_norm


def through(blocks: Any, norm: Any, x: Tensor, mask: Tensor | None = None, asked: Tensor | None = None) -> Tensor:
    """As `mar.through`; x is overwritten."""
    normed, lack = blocks[0].attention_norm(x), biases(blocks)
    for i, block in enumerate(blocks, 1):
        last = i == len(blocks)
        found = block.attention.attend(normed, mask, asked if last else None)
        if last and asked is not None:
            x = x.gather(1, asked.unsqueeze(-1).expand_as(found))
        up, _, _, down, _ = block.ffn
        add(x, found, block.attention.out)
        normed = shifted_norm(x, lack[2 * i - 2], block.ffn_norm)
        add(x, gelu(normed, up), down)
        normed = shifted_norm(x, lack[2 * i - 1], norm if last else blocks[i].attention_norm)
    return normed


def biases(blocks: Any) -> Tensor:
    """What the sum lacks behind each of its products: [2 layers, D] float32."""
    each = [linear.bias for block in blocks for linear in (block.attention.out, block.ffn[3])]
    return torch.stack(each).cumsum(0, dtype=torch.float32)


def add(x: Tensor, found: Tensor, linear: Any) -> None:
    """x += found Wᵀ, of [B, S, D] and [B, S, inputs], contiguous."""
    x.view(-1, x.shape[-1]).addmm_(found.flatten(0, 1), linear.weight.T)


def gelu(x: Tensor, linear: Any) -> Tensor:
    """GELU of a linear map, without gradients; in half precision one kernel on a GPU."""
    if x.dtype == torch.float32:
        return F.gelu(linear(x))
    found = torch._addmm_activation(linear.bias, x.flatten(0, 1), linear.weight.T, use_gelu=True)
    return found.view(*x.shape[:2], -1)
