"""Random numbers of training that belong to samples: row b's are a function of its key and of the draw alone.

A step then has the same noise however its samples are dealt out over processes and micro-batches. Integers are 64-bit
with wrap-around, so every device gives the same bits; the mixing function is the finaliser of SplitMix64 (Steele, Lea,
Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def signed(constant: int) -> int:
    """A constant modulo 2^64 as the int64 with the same bits."""
    constant %= 1 << 64
    return constant - (1 << 64) if constant >= 1 << 63 else constant


GOLDEN = signed(0x9E3779B97F4A7C15)
MIX_1 = signed(0xBF58476D1CE4E5B9)
MIX_2 = signed(0x94D049BB133111EB)


def mix(x: Tensor) -> Tensor:
    """A bijection of int64 whose output bits look independent of its input."""
    x = shift(x, 30).bitwise_xor_(x).mul_(MIX_1)  # in place on what is nobody else's: noise is as fast as memory
    x = shift(x, 27).bitwise_xor_(x).mul_(MIX_2)
    return shift(x, 31).bitwise_xor_(x)


def shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def fraction(bits: Tensor) -> Tensor:
    """int64 -> float32 in (0, 1): a multiple of 2^-40 plus a half, so small values keep their precision."""
    return shift(bits, 24).float().add_(0.5).mul_(2.0**-40).clamp_(max=1 - 2.0**-24)


class Rows:
    """The random numbers of the rows of a micro-batch.

    Args:
        keys: [B] int64, one per row.
    """

    def __init__(self, keys: Tensor) -> None:
        self.keys = mix(keys + GOLDEN)
        self.drawn = 0  # draws so far: each has numbers of its own

    def bits(self, shape: Sequence[int], axis: int) -> Tensor:
        """int64 of `shape`, whose `axis` is that of the rows."""
        if shape[axis] != len(self.keys):
            raise ValueError(f"axis {axis} of {tuple(shape)} must have the {len(self.keys)} rows of the batch")
        rest = [n for i, n in enumerate(shape) if i != axis]
        key = mix(self.keys ^ signed((self.drawn + 1) * MIX_2))
        self.drawn += 1
        lane = torch.arange(1, math.prod(rest) + 1, device=key.device)
        return mix(key.unsqueeze(1) + lane * GOLDEN).view(len(key), *rest).movedim(0, axis)


Rng = torch.Generator | Rows  # a generator draws for all rows at once, as tests and evaluation want it


def uniform(shape: Sequence[int], rng: Rng, device: torch.device, axis: int = 0) -> Tensor:
    """float32 of `shape` in (0, 1) (of a generator [0, 1)); `axis` is that of the rows of the batch."""
    if isinstance(rng, torch.Generator):
        return torch.rand(*shape, generator=rng, device=device)
    return fraction(rng.bits(shape, axis))


def normal(shape: Sequence[int], rng: Rng, device: torch.device, axis: int = 0) -> Tensor:
    """Standard normal float32 of `shape`; of rows by the Box-Muller transform."""
    if isinstance(rng, torch.Generator):
        return torch.randn(*shape, generator=rng, device=device)
    return box_muller(fraction(rng.bits(shape, axis)), fraction(rng.bits(shape, axis)))


def box_muller(u: Tensor, v: Tensor) -> Tensor:
    """Standard normal float32 of two uniform draws, which it may overwrite."""
    return u.log_().mul_(-2).sqrt_().mul_(v.mul_(2 * math.pi).cos_())


def whole(high: int, count: int, rng: Rng, device: torch.device) -> Tensor:
    """int64 [count] from 0 to high - 1, one for each row."""
    if isinstance(rng, torch.Generator):
        return torch.randint(high, (count,), generator=rng, device=device)
    return shift(rng.bits((count,), 0), 1) % high
