"""Temperature, top-k and top-p, in the field's order (LlamaGen section 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from visgen.config import UserError


@dataclass(frozen=True)
class Warp:
    """Filters of a categorical law, applied to its guided logits.

    Attributes:
        temperature: logits are divided by it (by 1e-5 at least); 0 keeps the most likely token alone.
        top_k: keep the k most likely tokens (ties with the k-th are kept too); 0 keeps all.
        top_p: of what top-k left, keep the smallest set of most likely tokens whose mass reaches p; 1 keeps all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature {self.temperature} must be finite and >= 0; 0 keeps the most likely token alone"
            )
        if self.top_k < 0:
            raise UserError(f"top_k {self.top_k} must be >= 0; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} must be in (0, 1]; 1 keeps all tokens")

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [..., V] float32 -> filtered logits, -inf where a token is excluded."""
        if self.temperature == 0:
            best = logits.argmax(-1, keepdim=True)
            return torch.full_like(logits, -torch.inf).scatter_(-1, best, 0.0)
        logits = logits / max(self.temperature, 1e-5)
        if 0 < self.top_k < logits.shape[-1]:
            kth = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < kth, -torch.inf)
        if self.top_p < 1:
            ordered, order = logits.sort(descending=True, stable=True)
            probs = ordered.softmax(-1)
            drop = probs.cumsum(-1) - probs >= self.top_p  # mass before the token already reaches p
            logits = logits.masked_fill(torch.empty_like(drop).scatter_(-1, order, drop), -torch.inf)
        return logits
