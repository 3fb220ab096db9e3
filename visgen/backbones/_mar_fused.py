"""The layers of `mar.py` on a GPU: of what is neither a product nor attention, as little as may be.

A batch of 64 under two branches has 40,000 slots, whose values leave the caches between any two kernels, so sums and
norms count: each residual sum takes the norm behind it along. In half precision GELU is part of the MLP's first
product, in the form that the library has, with tanh in the place of erf: it differs by at most 5e-4, in the mean square
by a ninth of what rounding to bfloat16 does. Float32 has the exact one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visgen.nn.fused.norm import add_norm


def through(blocks: Any, norm: Any, x: Tensor, mask: Tensor | None = None, asked: Tensor | None = None) -> Tensor:
    """As `mar.through`; x is overwritten."""
    normed = blocks[0].attention_norm(x)
    for i, block in enumerate(blocks, 1):
        last = i == len(blocks)
        found = block.attention(normed, mask, asked if last else None)
        if last and asked is not None:
            x = x.gather(1, asked.unsqueeze(-1).expand_as(found))
        up, _, _, down, _ = block.ffn
        normed = add_norm(x, found, block.ffn_norm)
        normed = add_norm(x, down(gelu(normed, up)), norm if last else blocks[i].attention_norm)
    return normed


def gelu(x: Tensor, linear: Any) -> Tensor:
    """GELU of a linear map, without gradients; in half precision one kernel on a GPU."""
    if x.dtype == torch.float32:
        return F.gelu(linear(x))
    found = torch._addmm_activation(linear.bias, x.flatten(0, 1), linear.weight.T, use_gelu=True)
    return found.view(*x.shape[:2], -1)
