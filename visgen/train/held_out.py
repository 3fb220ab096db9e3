"""Held-out samples during training: pictures to look at, and losses that say when a small set is being memorised."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast
from torch import Tensor, nn
from torch.utils.data import default_collate

from visgen import run_files
from visgen.data import Data, Samples, to_batch
from visgen.objectives import Objective

GOLDEN = (math.sqrt(5) - 1) / 2


@torch.no_grad()
def held_out_losses(
    objective: Objective, model: nn.Module, data: Data, samples: int, batch: int, device: torch.device
) -> dict[str, float]:
    """Means of `objective.held_out(model, batch)` over plain samples of `data`, `spaced`; draws no random number.

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


@dataclass
class Best:
    """The best value of a held-out metric so far. Each process keeps its own, fed with the main process's values.

    Attributes:
        metric: name of the value, as the objective gives it; empty: nothing is kept.
        step: when it was the best, counted in steps done; 0 before the first evaluation.
        value: its value then.
        since: evaluations since then.
    """

    metric: str = ""
    step: int = 0
    value: float = math.nan
    since: int = 0

    def update(self, found: dict[str, float], step: int, objective: Objective, accelerator: Accelerator) -> bool:
        """Takes the values of `held_out_losses` after `step` steps (empty but on the main process); is it the best?"""
        mine = found.get(f"held_out/{self.metric}", math.nan)
        value = float(broadcast(torch.tensor(mine, dtype=torch.float64, device=accelerator.device)))
        sign = -1 if self.metric in objective.larger_is_better else 1
        better = math.isfinite(value) and (self.step == 0 or sign * value < sign * self.value)
        if better:
            self.value, self.step, self.since = value, step, 0
        else:
            self.since += 1
        return better

    def restore(self, step: Path, run: Path) -> None:
        """Takes over what `step` knows, if that is of this metric and its best step lies in this run."""
        known = run_files.read_best(step)
        if known and known["metric"] == self.metric and (run / run_files.step_name(known["step"])).is_dir():
            self.step, self.value, self.since = known["step"], known["value"], known["since"]

    def to_dict(self) -> dict[str, Any]:
        """For the metadata of a step: nothing before the first evaluation."""
        return {"best": dataclasses.asdict(self)} if self.step else {}


def preview_batch(data: Data, count: int, seed: int) -> dict[str, Tensor]:
    """Evenly spaced samples of epoch 0, stacked, on the CPU."""
    samples = Samples(data, seed)
    return default_collate([samples[(i, 0)] for i in spaced(data, count)])


def spaced(data: Data, count: int) -> list[int]:
    """At most `count` indices of `data`, one of each of as many parts, at no regular step: classes may alternate."""
    count = min(count, len(data))
    edges = [i * len(data) // count for i in range(count + 1)]
    return [a + int((b - a) * (i * GOLDEN % 1)) for i, (a, b) in enumerate(pairwise(edges))]
