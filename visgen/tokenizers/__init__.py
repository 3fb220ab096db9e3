"""Tokenizers: pixels <-> tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor, nn

from visgen.config import UserError


@dataclass
class Reconstruction:
    """What a tokenizer's training forward returns."""

    pixels: Tensor  # [B, T, 3, H, W], not clamped
    ids: Tensor | None  # [B, N] int64, None for continuous tokenizers
    losses: dict[str, Tensor] = field(default_factory=dict)  # weighted scalars, to be summed
    metrics: dict[str, Tensor] = field(default_factory=dict)  # detached scalars, to be logged


class Tokenizer(nn.Module, ABC):
    """Built as `Tokenizer(config)`; every method is deterministic in eval mode.

    Attributes:
        image_size: (H, W) in pixels it was made for.
        grid: (T', H', W') of the tokens; N = T' H' W', raster order.
        vocab: number of codes, None for continuous tokens.
        channels: width C of a code vector.
        code_parts: sub-modules that `encode` and `embed` use, which give tokens their meaning; none means all.
        codes_frozen: whether only the other parts train.
    """

    image_size: tuple[int, int]
    grid: tuple[int, int, int]
    vocab: int | None
    channels: int
    code_parts: tuple[str, ...] = ()
    codes_frozen: bool = False

    @abstractmethod
    def forward(self, pixels: Tensor) -> Reconstruction:
        """Training pass: pixels [B, T, 3, H, W] in [-1, 1] -> reconstruction and the quantiser's losses."""

    @abstractmethod
    def encode(self, pixels: Tensor) -> Tensor:
        """[B, T, 3, H, W] in [-1, 1] -> ids [B, N] int64 (or vectors [B, N, C], already normalised)."""

    @abstractmethod
    def decode(self, tokens: Tensor) -> Tensor:
        """Inverse of `encode`: [B, N] (or [B, N, C]) -> pixels [B, T, 3, H, W], clamped to [-1, 1]."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """ids [B, N] -> code vectors [B, N, C]."""

    def freeze_codes(self) -> None:
        """From now on only the decoder trains: tokens keep their meaning, and models of them stay valid.

        Raises:
            UserError: the tokenizer has no part that is the decoder's alone.
        """
        if not self.code_parts:
            raise UserError(
                f"tokenizer {type(self).__name__} cannot train its decoder alone; set objective.train to all"
            )
        for name in self.code_parts:
            getattr(self, name).requires_grad_(False)
        self.codes_frozen = True
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """As of any module, but frozen codes stay as they are in eval mode: no dropout changes them."""
        super().train(mode)
        for name in self.code_parts if self.codes_frozen else ():
            getattr(self, name).eval()
        return self
