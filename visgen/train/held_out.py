"""Held-out losses during training: what says that a small data set is being memorised."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from visgen.data import Data, to_batch
from visgen.objectives import Objective


@torch.no_grad()
def held_out_losses(
    objective: Objective, model: nn.Module, data: Data, samples: int, batch: int, device: torch.device
) -> dict[str, float]:
    """Means of `objective.held_out(model, batch)` over evenly spaced plain samples of `data`; draws no random number.

    Args:
        model: the average of the exported module, in eval mode.
        samples: how many, at most all.
        batch: samples at once.
    """
    count = min(samples, len(data))
    index = [i * len(data) // count for i in range(count)]
    sums: dict[str, Tensor] = {}
    for start in range(0, count, batch):
        part = index[start : start + batch]
        for name, value in objective.held_out(model, to_batch(data.get_many(part), device)).items():
            sums[name] = sums.get(name, torch.zeros((), device=device)) + value.detach().float() * len(part)
    return {f"held_out/{name}": float(total) / count for name, total in sums.items()}  # the one read of the device
