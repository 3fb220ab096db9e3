"""The categorical law over a vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class NoiseLike(Protocol):
    """What a law asks of `decode.noise.Noise`."""

    seeds: Tensor  # [B]

    def gumbel(self, index: Tensor, lanes: int, stream: int, iteration: Tensor | int = 0) -> Tensor: ...


@dataclass
class Categorical:
    """Law of tokens by float32 logits [B, W, V], not necessarily normalised; -inf excludes a token."""

    logits: Tensor

    @property
    def vocab(self) -> int:
        return self.logits.shape[-1]

    def probs(self) -> Tensor:
        """[B, W, V], rows sum to 1."""
        return self.logits.softmax(dim=-1)

    def log_prob(self, tokens: Tensor) -> Tensor:
        """Log-likelihood of tokens [B, W] in nats."""
        return self.logits.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def sample(self, noise: Tensor) -> Tensor:
        """Gumbel-max: argmax of logits + noise [B, W, V] (standard Gumbel) -> ids [B, W]."""
        return (self.logits + noise).argmax(dim=-1)

    def draw(self, noise: NoiseLike, index: Tensor, stream: int, iteration: Tensor | int = 0) -> Tensor:
        """Draws the tokens at positions index [B, W] by the Gumbels of (seed, index, stream, iteration): ids [B, W]."""
        return self.sample(noise.gumbel(index, self.vocab, stream, iteration))

    def warped(self, warp: Callable[[Tensor], Tensor]) -> Categorical:
        """The law after a filter on its logits (temperature, top-k, top-p)."""
        return Categorical(warp(self.logits))

    def pin(self, tokens: Tensor, mask: Tensor) -> Categorical:
        """All mass on tokens [B, W] where mask [B, W] is true."""
        certain = torch.full_like(self.logits, -torch.inf).scatter_(-1, tokens.unsqueeze(-1), 0.0)
        return Categorical(torch.where(mask.unsqueeze(-1), certain, self.logits))
