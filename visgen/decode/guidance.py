"""Classifier-free guidance: how much each branch weighs at each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from visgen.config import UserError

MOST = 1e6  # of a scale; far larger ones overflow float32, and then every law is not-a-number


@dataclass(frozen=True)
class Guidance:
    """u + s (c - u) with u the null branch and c the conditional one; s is 1 outside the interval.

    With a scale r of the control alone: u + s (l - u) + r (c - l), l being the condition without the control.

    Attributes:
        scale: s; 1 is plain conditional sampling (one branch is computed), 0 is unconditional.
        interval: (first, last) fraction of the tokens that are guided, both within [0, 1].
        schedule: how s grows from 1 to `scale` over the tokens: at once, linearly or as a half cosine.
        control: r, with the same interval and schedule; none: one scale for condition and control together, as
            published.
    """

    scale: float = 1.0
    interval: tuple[float, float] = (0.0, 1.0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    control: float | None = None

    def __post_init__(self) -> None:
        low, high = self.interval
        if not 0 <= low <= high <= 1:
            raise UserError(f"guidance.interval {self.interval} must satisfy 0 <= first <= last <= 1")
        for name, scale in (("scale", self.scale), ("control", self.control)):
            if scale is not None and not 0 <= scale <= MOST:
                raise UserError(f"guidance.{name} {scale} must be a finite number >= 0, at most {MOST:g}")

    @property
    def kinds(self) -> tuple[tuple[bool, bool], ...]:
        """Of each branch: has it the condition, has it the control? The last one has both."""
        null = ((False, False),) if self.scale != 1 else ()
        uncontrolled = ((True, False),) if self.control not in (None, self.scale) else ()
        return (*null, *uncontrolled, (True, True))

    @property
    def branches(self) -> int:
        """Number K: the conditional branch alone, or the null one before it, and the one without control between."""
        return len(self.kinds)

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
        scale, control = (
            torch.where(guided, 1 + (s - 1) * grown, 1.0)
            for s in (self.scale, self.scale if self.control is None else self.control)
        )
        each = {(False, False): 1 - scale, (True, False): scale - control, (True, True): control}
        return torch.stack([each[kind] for kind in self.kinds])
