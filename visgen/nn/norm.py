"""Normalisation layers of the transformers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension; the statistics are float32 whatever the input's type."""

    def forward(self, x: Tensor) -> Tensor:  # [..., D]
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)
