"""Classifier-free guidance: how much each branch weighs at each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visgen.config import UserError


@dataclass(frozen=True)
class Guidance:
    """u + s (c - u) with u the null branch and c the conditional one; s is 1 outside the interval.

    Attributes:
        scale: s; 1 is plain conditional sampling (one branch is computed), 0 is unconditional.
        interval: (first, last) fraction of the tokens that are guided, both within [0, 1].
        schedule: how s grows from 1 to `scale` over the tokens: at once, linearly or as a half cosine.
    """

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise UserError(f"guidance.interval {self.interval} must satisfy 0 <= first <= last <= 1")
        if not math.isfinite(self.scale) or self.scale < 0:
            raise UserError(f"guidance.scale {self.scale} must be a finite number >= 0")

    @property
    def branches(self) -> int:
        """1 (conditional alone) or 2 (null, conditional)."""
        return 1 if self.scale == 1 else 2

    def weights(self, index: Tensor, tokens: int) -> Tensor:
        """Weights of the branches for token indices [B, W] of `tokens`: [K, B, W] float32, summing to 1 over K."""
        if self.branches == 1:
            return torch.ones(1, *index.shape, device=index.device)
        at = index.float() / max(tokens - 1, 1)
        grown = {
            "constant": torch.ones_like(at),
            "linear": at,
            "cosine": (1 - torch.cos(math.pi * at)) / 2,
        }[self.schedule]
        guided = (at >= self.interval[0]) & (at <= self.interval[1])
        scale = torch.where(guided, 1 + (self.scale - 1) * grown, 1.0)
        return torch.stack([1 - scale, scale])
