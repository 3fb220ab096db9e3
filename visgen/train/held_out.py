"""Held-out samples during training: pictures to look at, and losses that say when a small set is being memorised."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from visgen.data import Data, Samples, to_batch
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
    index = spaced(data, samples)
    count = len(index)
    sums: dict[str, Tensor] = {}
    for start in range(0, count, batch):
        part = index[start : start + batch]
        for name, value in objective.held_out(model, to_batch(data.get_many(part), device)).items():
            sums[name] = sums.get(name, torch.zeros((), device=device)) + value.detach().float() * len(part)
    return {f"held_out/{name}": float(total) / count for name, total in sums.items()}  # waits here only


def preview_batch(data: Data, count: int, seed: int) -> dict[str, Tensor]:
    """Evenly spaced samples of epoch 0, stacked, on the CPU."""
    samples = Samples(data, seed)
    return default_collate([samples[(i, 0)] for i in spaced(data, count)])


def spaced(data: Data, count: int) -> list[int]:
    """At most `count` evenly spaced indices of `data`."""
    count = min(count, len(data))
    return [i * len(data) // count for i in range(count)]
