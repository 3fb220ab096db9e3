"""Heads: hidden states -> the law of a token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Dist(Protocol):
    """The law of the tokens of a window [B, W]."""

    def warped(self, warp: Callable[[Tensor], Tensor]) -> Dist:
        """The law after temperature and filters."""

    def sample(self, noise: Tensor) -> Tensor:
        """A draw per token from counter-based noise: ids [B, W] (or vectors [B, W, C])."""

    def pin(self, tokens: Tensor, mask: Tensor) -> Dist:
        """The law with all mass on `tokens` where `mask` [B, W] is true (known tokens)."""

    def draw(self, noise: Any, index: Tensor, stream: int, iteration: Any = 0, where: Tensor | None = None) -> Tensor:
        """`sample` by the noise of (seed, index [B, W], stream, iteration); only tokens in `where` are looked at."""


class Testable(Dist, Protocol):
    """A law that drafts can be tested against: `decode/verify.py`."""

    logits: Tensor
    fused: bool  # whether it has `test`

    def accept(
        self,
        draft: Tensor,
        drawn_from: Any,
        noise: Any,
        index: Tensor,
        stream: int,
        iteration: Any = 0,
        where: Tensor | None = None,
    ) -> Tensor:
        """Keeps a draft that was drawn from the law q = `drawn_from` with probability min(1, p / q): bool [B, W]."""

    def residual(
        self,
        drawn_from: Any,
        noise: Any,
        index: Tensor,
        stream: int,
        iteration: Any = 0,
        where: Tensor | None = None,
    ) -> Tensor:
        """Draws from norm(max(p - q, 0)), which replaces a refused draft: ids [B, W]."""

    def test(
        self,
        draft: Tensor,
        drawn_from: Any,
        noise: Any,
        index: Tensor,
        iteration: Tensor,
        waiting: Tensor,
        **rule: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Accepts, replaces and draws anew at once; see `nn/fused/verify.py`."""

    def like(self, logits: Tensor) -> Testable:
        """Another law of the same kind, by its logits."""


class Head(nn.Module, ABC):
    """Built as `Head(config, width, vocab)`; `vocab` is the number of codes (or channels of continuous tokens).

    Attributes:
        continuous: whether its tokens are vectors.
        denoises: whether its hidden states are those of noised tokens, of which it predicts the noise.
        regions: methods that are compiled beside a net's repeated blocks (`nn/blocks.py`).
    """

    regions: tuple[str, ...] = ()
    continuous: bool = False
    denoises: bool = False

    @abstractmethod
    def loss(self, h: Tensor, target: Tensor) -> Tensor:
        """h [B, W, D], target [B, W] (or [B, W, C]) -> loss per token [B, W], float32."""

    @abstractmethod
    def dist(self, h: Tensor, weights: Tensor) -> Any:
        """h [K, B, W, D] of K guidance branches, combined with weights [K, B, W] -> the law: of codes a `Dist`, of
        vectors one that is walked (`heads/diffusion.py`); of a denoiser the prediction [B, W, C] float32 itself."""

    def law(self, h: Tensor) -> Any:
        """`dist` of one branch, h [B, W, D]."""
        return self.dist(h.unsqueeze(0), h.new_ones(1, *h.shape[:2], dtype=torch.float32))

    def fused(self) -> Callable[[Tensor, Tensor], Any] | None:
        """A faster twin of `dist` on a GPU, or None. It shares the weights, which must not move."""
        return None
