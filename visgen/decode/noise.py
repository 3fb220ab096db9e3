"""Noise as an input: a counter-based generator keyed by (image seed, position, stream, iteration).

Image i depends on seed i alone, never on its batch, its place in the batch or the number of processes. Integers are
64-bit with wrap-around, so every device gives the same bits; the mixing function is the finaliser of SplitMix64
(Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from visgen.nn.keyed import GOLDEN, MIX_1, MIX_2, box_muller, fraction, mix, signed


class Stream(IntEnum):
    """Independent uses of noise at one position."""

    TOKEN = 0  # the draw of a token; a Gumbel stream: the same at every iteration
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    DENOISE = 4
    ORDER = 5  # in which the tokens of an image are drawn


class Noise:
    """Noise for a batch of images.

    Args:
        seeds: [B] int64, one per image, 0 or more; the negative ones belong to trials (`of_trial`).
    """

    def __init__(self, seeds: Tensor) -> None:
        self.seeds = seeds

    @classmethod
    def of_trial(cls, batch: int, device: torch.device) -> Noise:
        """Noise for a trial decode of `batch` images: its seeds are negative, and no image has such a seed.

        What a trial finds is therefore independent of everything that is drawn for an image.
        """
        return cls(-1 - torch.arange(batch, device=device))

    def bits(self, index: Tensor, lanes: int, stream: int, iteration: Tensor | int = 0) -> Tensor:
        """index [B, W] token positions (iteration: a number or [B, 1] or [B, W]) -> int64 [B, W, lanes]."""
        key = mix(self.seeds + GOLDEN).unsqueeze(1)
        key = mix(key + index * GOLDEN)
        key = mix(key ^ signed((int(stream) + 1) * MIX_1))
        key = mix(key + (signed(iteration * MIX_2) if isinstance(iteration, int) else iteration * MIX_2))
        lane = torch.arange(1, lanes + 1, device=index.device)
        return mix(key.unsqueeze(-1) + lane * GOLDEN)

    def order(self, tokens: int) -> Tensor:
        """A random order of the places of each image: [B, tokens], the place that is n-th."""
        index = torch.arange(tokens, device=self.seeds.device).unsqueeze(0)
        return self.bits(index, 1, Stream.ORDER).squeeze(-1).argsort(dim=1, stable=True)

    def uniform(self, index: Tensor, lanes: int, stream: int, iteration: Tensor | int = 0) -> Tensor:
        """float32 [B, W, lanes] in (0, 1): a multiple of 2^-40 plus a half, so small values keep their precision."""
        return fraction(self.bits(index, lanes, stream, iteration))

    def gumbel(self, index: Tensor, lanes: int, stream: int, iteration: Tensor | int = 0) -> Tensor:
        """Standard Gumbel, float32 [B, W, lanes]: -log E, where E = -log(1 - U) is exponential."""
        return self.uniform(index, lanes, stream, iteration).neg_().log1p_().neg_().log_().neg_()

    def normal(self, index: Tensor, lanes: int, stream: int, iteration: Tensor | int = 0) -> Tensor:
        """Standard normal, float32 [B, W, lanes], by the Box-Muller transform."""
        u = self.uniform(index, 2 * lanes, stream, iteration)
        return box_muller(u[..., :lanes], u[..., lanes:])
