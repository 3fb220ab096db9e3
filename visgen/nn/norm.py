"""Normalisation layers of the transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension; the statistics are float32 whatever the input's type."""

    def forward(self, x: Tensor) -> Tensor:  # [..., D]
        weight = self.weight if torch.is_autocast_enabled(x.device.type) else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)
