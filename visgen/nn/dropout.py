"""Dropout whose mask is cheap where it is compiled."""

from __future__ import annotations

import torch
from torch import Tensor, nn

LANES = 0x9E3779B1 - (1 << 32)  # odd; 2^32 over the golden ratio: lanes are far apart
MIX = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)  # MurmurHash3's finaliser, as int32


class Dropout(nn.Dropout):
    """Zeroes each value with probability p and scales the others by 1 / (1 - p).

    torch.compile computes a Philox block, of some hundred integer operations, for every value, and keeps the mask for
    the backward pass. There each row [..., D] draws one number instead, and a value's is a hash of that and of its
    lane, of a dozen operations, which the backward pass computes again. Eagerly it is PyTorch's.
    """

    def forward(self, x: Tensor) -> Tensor:  # [..., D]
        if not self.training or self.p == 0.0 or not torch.compiler.is_compiling():
            return super().forward(x)
        limit = -(1 << 31), (1 << 31) - 1
        rows = torch.randint(*limit, (*x.shape[:-1], 1), dtype=torch.int32, device=x.device)
        lanes = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device) ^ MIX[1]  # no index any more: it wraps
        lanes = lanes * LANES
        keep = hashed(rows ^ lanes) >= limit[0] + round(self.p * (1 << 32))
        return torch.where(keep, x * (1 / (1 - self.p)), 0)


def hashed(x: Tensor) -> Tensor:
    """int32 -> int32, of which every bit depends on every bit (Appleby's fmix32, MurmurHash3)."""
    x = x ^ _shifted(x, 16)
    x = x * MIX[0]
    x = x ^ _shifted(x, 13)
    x = x * MIX[1]
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, by: int) -> Tensor:
    """x as an unsigned number, shifted to the right."""
    return (x >> by) & ((1 << (32 - by)) - 1)
