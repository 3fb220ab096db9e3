"""Dropout whose mask is cheap where it is compiled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

FACTORS = 0x9E3779B1 - (1 << 32), 0x85EBCA6B - (1 << 32)  # odd, as int32: 2^32 over the golden ratio; MurmurHash3's


class Dropout(nn.Dropout):
    """Zeroes each value with probability p and scales the others by 1 / (1 - p).

    torch.compile computes a Philox block, of some hundred integer operations, for every value. Compiled, each row
    [..., D] draws one number here, and a value's is a hash of that and of its lane, of five operations: few enough that
    the compiler takes them along wherever the mask is read. Eagerly it is PyTorch's.
    """

    def forward(self, x: Tensor) -> Tensor:  # [..., D]
        if not self.training or self.p == 0.0 or not torch.compiler.is_compiling():
            return super().forward(x)
        drawn = torch.rand(2, *x.shape[:-1], 1, device=x.device)  # floats, for the compiler draws integers anew at use
        upper, lower = (drawn * (1 << 16)).int().unbind()
        lanes = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
        keep = hashed((upper << 16) ^ lower ^ lanes) >= round(self.p * (1 << 32)) - (1 << 31)
        return torch.where(keep, x * (1 / (1 - self.p)), 0)


def hashed(x: Tensor) -> Tensor:
    """int32 -> int32, whose upper bits depend on all bits (two rounds of a multiplicative hash, Knuth 6.4)."""
    x = x * FACTORS[0]
    x = x ^ ((x >> 15) & 0x1FFFF)  # as an unsigned number
    return x * FACTORS[1]
