"""The categorical law of many tokens at once, by what their logits are a linear map of.

All logits of 64 images of 256 tokens over 16,384 codes are 0.5 GB in bfloat16, and twice that in float32. Whoever only
wants the likeliest tokens needs those of a few rows at a time, and in the type that they are computed in.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from visgen.nn.categorical import Categorical, note

ROWS = 1024  # whose logits lie at once: of 16,384 codes in bfloat16 they fit an H100's cache


class Projected(Categorical):
    """Logits h Wᵀ in float32, then known tokens.

    Args:
        h: [B, W, D]; weight: [V, D], in h's type.
        known: (tokens [B, W], mask [B, W]): all mass on the token where the mask is true.
        unsound: [1], a flag that `likeliest` raises where a greatest logit is not finite.
    """

    def __init__(
        self,
        h: Tensor,
        weight: Tensor,
        known: tuple[Tensor, Tensor] | None = None,
        unsound: Tensor | None = None,
    ) -> None:
        self.h, self.weight, self.known, self.unsound = h, weight, known, unsound

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        logits = F.linear(self.h, self.weight).float()
        return logits if self.known is None else Categorical(logits).pin(*self.known).logits

    @property
    def vocab(self) -> int:
        return len(self.weight)

    def likeliest(self) -> Tensor:
        rows = self.h.flatten(0, 1).split(ROWS)
        best, found = (torch.cat(x) for x in zip(*[F.linear(some, self.weight).max(-1) for some in rows], strict=True))
        if self.unsound is not None:
            note(self.unsound, best)
        found = found.view(self.h.shape[:2])
        return found if self.known is None else torch.where(self.known[1], self.known[0], found)

    def like(self, logits: Tensor) -> Categorical:
        return Categorical(logits)

    def pin(self, tokens: Tensor, mask: Tensor) -> Categorical:
        if self.known is not None:
            return super().pin(tokens, mask)
        return Projected(self.h, self.weight, (tokens, mask), self.unsound)
