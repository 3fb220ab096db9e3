"""Quantizers: continuous vectors -> codes. They know neither images nor grids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass
class Quantized:
    """Result of a quantizer's training forward."""

    vectors: Tensor  # [B, N, C], straight-through
    ids: Tensor  # [B, N] int64
    losses: dict[str, Tensor] = field(default_factory=dict)  # weighted scalars, to be summed
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached scalars, to be logged


class Quantizer(nn.Module, ABC):
    """Built as `Quantizer(config)`. Computes in float32 outside autocast.

    Attributes:
        vocab: number of codes.
        channels: width C of its vectors.
    """

    vocab: int
    channels: int

    @abstractmethod
    def forward(self, vectors: Tensor) -> Quantized:
        """vectors [B, N, C] float; in training mode it may update its statistics (alike on every rank)."""

    @abstractmethod
    def encode(self, vectors: Tensor) -> Tensor:
        """vectors [B, N, C] -> ids [B, N] int64."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """ids [B, N] -> vectors [B, N, C] as the decoder receives them."""
