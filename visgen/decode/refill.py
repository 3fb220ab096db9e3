"""Continuous batching: a row that has completed its image goes on with the next one.

Where a sampler finishes its rows at different times, a batch is as slow as its slowest row. With more images than rows
a row's state, seed and condition are replaced as soon as the host has seen it complete, between two iterations, while
the device goes on. Cache slots need no emptying: a new image sees its own alone, as it writes them (a value that is
not finite would be seen, but it ends the call). Images are the same as in batches of their own, for each depends on its
seed and its label alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visgen.decode.engine import Engine, Generation, Looks, SamplerLike
from visgen.decode.noise import Noise


def refillable(model: Any, sampler: Any) -> bool:
    """Whether rows finish by themselves, and need no prefix slots computed when they begin."""
    return sampler.ragged and model.condition.prefix == 1 and not model.continuous and model.backbone.taught is None


@torch.inference_mode()
def refill(
    engine: Engine,
    sampler: SamplerLike,
    batch: dict[str, Tensor],
    noise: Noise,
    rows: int,
    on_step: Callable[[int, int], None] | None = None,
) -> Generation:
    """Decodes n images, `rows` of them at once; `nfe` counts all evaluations, `rounds` those of each image.

    Args:
        batch: what the model's condition reads, such as label [n].
        noise: of the n images.
        on_step: called as on_step(complete, n) when images have been completed.
    """
    n = len(noise.seeds)
    rows = min(rows, n)
    engine.begin({name: value[:rows] for name, value in batch.items()})
    state, step, held = engine.prepared(sampler, Noise(noise.seeds[:rows].clone()))
    slots = Slots(engine, state, held, engine.prefixes(batch).vectors, noise.seeds)
    engine.synchronize()
    start, looks, launched = time.perf_counter(), Looks(engine.device), 0
    while slots.left:
        step()
        launched += 1
        seen = looks.at(launched, lambda: sampler.done(state))
        if seen is not None and slots.turn(seen[1].tolist(), seen[0], launched) and on_step is not None:
            on_step(n - slots.left, n)
    engine.synchronize()
    seconds = time.perf_counter() - start
    engine.check_finite(slots.tokens)
    return Generation(slots.tokens, launched, seconds, slots.rounds, sampler.notes(state))


class Slots:
    """Which image each row is at, and what it takes to change that."""

    def __init__(self, engine: Engine, state: Any, noise: Noise, vectors: Tensor, seeds: Tensor) -> None:
        self.engine, self.state, self.noise = engine, state, noise
        self.vectors, self.seeds = vectors.to(engine.dtype), seeds  # [K n, 1, D], [n]
        self.left = self.images = len(seeds)
        self.rows = engine.batch
        self.image: list[int | None] = list(range(self.rows))
        self.since = [0] * self.rows
        self.next = self.rows
        fields = ((f.name, getattr(state, f.name)) for f in dataclasses.fields(state))
        self.first = {  # of a row at its start; all rows begin alike
            name: value[:1].clone()
            for name, value in fields
            if isinstance(value, Tensor) and value.ndim > 1 and len(value) == self.rows
        }
        self.tokens = torch.empty(self.images, engine.tokens, dtype=torch.int64, device=engine.device)
        self.rounds = torch.empty_like(self.tokens)

    def turn(self, done: list[bool], when: int, launched: int) -> bool:
        """Collects the images of rows that were complete after `when` iterations, and gives these rows the next ones;
        whether there were any."""
        ended = [r for r in range(self.rows) if done[r] and self.image[r] is not None and self.since[r] < when]
        if not ended:
            return False
        row, image = self._device(ended), self._device([self.image[r] for r in ended])
        self.tokens.index_copy_(0, image, self.state.tokens[row])
        self.rounds.index_copy_(0, image, self.state.rounds[row])
        self.left -= len(ended)
        for r in ended:
            self.image[r], self.since[r] = (self.next, launched) if self.next < self.images else (None, 0)
            self.next += 1
        begun = [r for r in ended if self.image[r] is not None]
        if begun:
            self.start(self._device(begun), self._device([self.image[r] for r in begun]))
        return True

    def start(self, row: Tensor, image: Tensor) -> None:
        """Begins images [n] in rows [n]: their state, seed and condition."""
        for name, value in self.first.items():
            getattr(self.state, name).index_copy_(0, row, value.expand(len(row), *value.shape[1:]))
        self.noise.seeds.index_copy_(0, row, self.seeds[image])
        branch = torch.arange(self.engine.guidance.branches, device=row.device).unsqueeze(1)
        target = self.engine.condition.vectors  # [K B, 1, D]
        target.index_copy_(
            0, (row + self.rows * branch).flatten(), self.vectors[(image + self.images * branch).flatten()]
        )

    def _device(self, numbers: list[Any]) -> Tensor:
        made = torch.tensor(numbers, pin_memory=self.engine.device.type == "cuda")
        return made.to(self.engine.device, non_blocking=True)
