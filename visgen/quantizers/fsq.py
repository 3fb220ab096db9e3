"""Finite scalar quantisation: every channel is bounded and rounded to a few levels. No table, no losses, no collapse.

Source: Mentzer et al., arXiv:2309.15505, section 3 and appendix A. Levels that it recommends: (8,6,5) for 2^8 codes,
(8,5,5,5) for 2^10, (7,5,5,5,5) for 2^12, (8,8,8,6,5) for 2^14. An index is the mixed-radix number of the levels, least
significant channel first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from visgen.config import UserError
from visgen.quantizers import Quantized, Quantizer

EPS = 1e-3  # lets tanh reach the outer levels
MOST = 2**24  # codes: each is counted while training, and is a row of a model's head


@dataclass(frozen=True)
class Config:
    levels: tuple[int, ...] = (8, 5, 5, 5)  # per channel, each at least 2


class FSQ(Quantizer):
    """`channels` = number of levels, `vocab` = their product. Codes lie in [-1, 1]."""

    levels: Tensor
    basis: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        if not config.levels or min(config.levels) < 2:
            raise UserError(f"quantizer.levels is {config.levels}; every channel needs at least 2 levels")
        self.config = config
        self.channels, self.vocab = len(config.levels), math.prod(config.levels)
        if self.vocab > MOST:
            raise UserError(
                f"quantizer.levels {config.levels} make {self.vocab} codes, {MOST} are the most; take fewer"
            )
        basis = [math.prod(config.levels[:i]) for i in range(self.channels)]
        # saved with the weights: a module built on the meta device gets its buffers from the file
        self.register_buffer("levels", torch.tensor(config.levels, dtype=torch.int64))
        self.register_buffer("basis", torch.tensor(basis, dtype=torch.int64))

    def forward(self, vectors: Tensor) -> Quantized:
        """vectors [B, N, C] -> straight-through codes; metrics are those of the batch."""
        with torch.autocast(vectors.device.type, enabled=False):
            bounded = self._bound(vectors.float())
            digits = bounded.detach().round()
            codes = (bounded + (digits - bounded.detach())) / (self.levels // 2)
            ids = self._index(digits)
            return Quantized(codes, ids, {}, self._metrics(ids))

    def encode(self, vectors: Tensor) -> Tensor:
        """vectors [B, N, C] -> ids [B, N]."""
        with torch.autocast(vectors.device.type, enabled=False):
            return self._index(self._bound(vectors.float()).round())

    def embed(self, ids: Tensor) -> Tensor:
        """ids [B, N] -> codes [B, N, C] float32."""
        digits = (ids[..., None] // self.basis) % self.levels
        half = self.levels // 2
        return (digits - half).float() / half

    def _bound(self, z: Tensor) -> Tensor:
        """Squashes channel i into (-L/2, L/2); even L are shifted by half a step so that rounding gives L values."""
        half = (self.levels - 1) * (1 + EPS) / 2
        offset = (self.levels % 2 == 0) * 0.5
        return torch.tanh(z + torch.atanh(offset / half)) * half - offset

    def _index(self, digits: Tensor) -> Tensor:
        """Rounded channels [B, N, C], centred on 0 -> ids [B, N]."""
        return ((digits.long() + self.levels // 2) * self.basis).sum(-1)

    @torch.no_grad()
    def _metrics(self, ids: Tensor) -> dict[str, Tensor]:
        flat = ids.reshape(-1)
        counts = torch.zeros(self.vocab, device=ids.device).scatter_add_(0, flat, torch.ones_like(flat).float())
        p = counts / flat.shape[0]
        return {"usage": (counts > 0).float().mean(), "perplexity": (-(p * (p + 1e-12).log()).sum()).exp()}
