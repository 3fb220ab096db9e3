"""Tokens that were drawn as vectors: the code nearest to each is the token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visgen.quantizers.vq import nearest


@dataclass
class Points:
    """In place of a law, of whose draw all chance lies in the noise.

    Attributes:
        vectors: [B, W, C] float32.
        codes: [V, C].
    """

    vectors: Tensor
    codes: Tensor

    def likeliest(self) -> Tensor:
        """Ids [B, W]."""
        return nearest(self.vectors.flatten(0, -2), self.codes.float())[0].view(self.vectors.shape[:-1])

    def pin(self, tokens: Tensor, mask: Tensor) -> Points:
        """The same, with the codes of `tokens` [B, W] where `mask` is true."""
        return Points(torch.where(mask.unsqueeze(-1), self.codes[tokens].float(), self.vectors), self.codes)
