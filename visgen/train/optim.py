"""Optimisers and learning-rate schedules.

The learning rate is a pure function of the step, so a schedule has no state to lose on resume. WSD (warm-up, stable,
decay): Hu et al. 2024, arXiv 2404.06395, here with a linear decay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from visgen.checks import Natural, Rate, Scale, Share, Weight
from visgen.config import UserError


@dataclass(frozen=True)
class OptimConfig:
    """One optimiser; every net gets one, an objective may replace fields per net (`optim_overrides`).

    Attributes:
        method: adamw (decoupled decay) or adam (weight_decay is an L2 term).
        lr: peak learning rate; lr_scale multiplies it (meant for the overrides).
        weight_decay: on tensors with two or more axes, unless a module says `no_decay = True`.
        warmup: steps of linear warm-up.
        schedule: what follows: constant, cosine, or wsd (constant, then linear over the last `decay` share of steps).
        final: last learning rate over the peak one, for cosine and wsd.
    """

    method: Literal["adamw", "adam"] = "adamw"
    lr: Scale = 1e-4
    lr_scale: Scale = 1.0
    betas: tuple[Rate, Rate] = (0.9, 0.95)
    eps: Scale = 1e-8
    weight_decay: Weight = 0.05
    warmup: Natural = 0
    schedule: Literal["constant", "cosine", "wsd"] = "constant"
    decay: Share = 0.2
    final: Share = 0.0

    def check(self, steps: int) -> None:
        """Raises `UserError` where the schedule does not fit into `steps`."""
        if not 0 <= self.warmup < steps:
            raise UserError(
                f"optim.warmup is {self.warmup}; it must be at least 0 and less than loop.steps ({steps}); for a short "
                f"trial pass --optim.warmup {steps // 10}"
            )
        if self.schedule == "wsd" and not 0 < self.decay <= 1 - self.warmup / steps:
            raise UserError(
                f"optim.decay is {self.decay}; it must lie above 0 and, with {self.warmup} of {steps} steps of "
                f"warm-up, be at most {1 - self.warmup / steps:g}"
            )


def learning_rate(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate of step `step` (counted from 0) of `steps`."""
    return config.lr * config.lr_scale * schedule(config, step, steps)


def schedule(config: OptimConfig, step: int, steps: int) -> float:
    """Learning rate over its peak: 1 at the end of the warm-up; it would reach `final` at step `steps`."""
    if step < config.warmup:
        return (step + 1) / config.warmup
    if config.schedule == "cosine":
        share = (step - config.warmup) / max(1, steps - config.warmup)
        return config.final + (1 - config.final) * (1 + math.cos(math.pi * share)) / 2
    if config.schedule == "wsd":
        length = config.decay * steps
        return 1 - (1 - config.final) * max(0.0, step - (steps - length)) / length
    return 1.0


def override(config: OptimConfig, values: dict[str, Any] | None) -> OptimConfig:
    """`config` with the fields that an objective's `optim_overrides[net]` replaces."""
    return dataclasses.replace(config, **(values or {}))


def build_optimizer(net: nn.Module, config: OptimConfig, no_decay: Collection[str] = ()) -> torch.optim.Optimizer:
    """The optimiser of `net`'s trainable parameters; fused where they lie on a CUDA device, or are sharded: it can then
    be told by a tensor that a step is not to be taken.

    Args:
        no_decay: names (as in `net.named_parameters()`) that are not decayed, besides vectors and the parameters of
            modules whose attribute `no_decay` is true (a quantiser's codebook).
    """
    decayed, free = split_decay(net, no_decay)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if not groups:
        raise ValueError(f"{type(net).__name__} has no trainable parameter")
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[config.method]
    fused = all(p.device.type == "cuda" or isinstance(p, DTensor) for p in (*decayed, *free))
    return kind(groups, lr=config.lr * config.lr_scale, betas=config.betas, eps=config.eps, fused=fused)


def split_decay(net: nn.Module, no_decay: Collection[str] = ()) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Trainable parameters of `net`: those that weight decay pulls on, and the rest."""
    marked = {id(p) for m in net.modules() if getattr(m, "no_decay", False) is True for p in m.parameters()}
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            spared = parameter.ndim < 2 or id(parameter) in marked or name in no_decay
            (free if spared else decayed).append(parameter)
    return decayed, free
