"""Exponential moving average of the exported module, on its device.

W_t = d_t W_{t-1} + (1 - d_t) w_t with d_t = min(decay, (1 + t) / (10 + t)), t the number of updates before this one;
the first update copies. Buffers (norm statistics, a quantiser's counts) are copied, not averaged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from visgen.checks import Rate


@dataclass(frozen=True)
class EmaConfig:
    """Average that is previewed and saved.

    Attributes:
        decay: its limit; 0 keeps a plain copy of the weights.
        save_dtype: of the floating-point parameters in `model.safetensors`; the resume state is always fp32.
    """

    decay: Rate = 0.9999
    save_dtype: Literal["fp32", "bf16"] = "fp32"


class Ema(AveragedModel):
    """`AveragedModel` with a warm-up whose update never waits for the device (torch's reads a device counter)."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        super().__init__(module)
        self.decay = decay
        self.module.requires_grad_(False).eval()

    def decay_at(self, updates: int) -> float:
        """Weight of the old average in the update that follows `updates` earlier ones."""
        return min(self.decay, (1 + updates) / (10 + updates)) if updates else 0.0

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        updates = int(self.n_averaged)  # lies on the CPU: no wait for the device
        mean: list[Tensor] = list(self.module.parameters())
        now: list[Tensor] = list(model.parameters())
        if updates:
            get_ema_multi_avg_fn(self.decay_at(updates))(mean, now, updates)
        else:
            torch._foreach_copy_(mean, now)
        for old, new in zip(self.module.buffers(), model.buffers(), strict=True):
            old.copy_(new)
        self.n_averaged += 1
