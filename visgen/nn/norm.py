"""Normalisation layers of the transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.RMSNorm):
    """x / rms(x) * weight over the last dimension, in x's type; the statistics are float32 whatever that is, and under
    autocast a float32 weight is not rounded either."""

    def forward(self, x: Tensor) -> Tensor:  # [..., D]
        kind = x.dtype
        if torch.is_autocast_enabled(x.device.type):
            kind = torch.promote_types(kind, self.weight.dtype)
        return F.rms_norm(x.to(kind), self.normalized_shape, self.weight.to(kind), self.eps).to(x.dtype)
