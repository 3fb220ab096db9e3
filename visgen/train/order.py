"""Data order: which samples make up which step, as a pure function of (seed, step).

An epoch is a permutation keyed by (seed, epoch); the epochs are laid end to end and step s takes the s-th run of
`batch` samples, also across the end of an epoch, so every sample is seen once per epoch. Rank r of W takes every W-th
sample of the step from the r-th on. Nothing here has state: resuming means starting at another step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from visgen.config import UserError
from visgen.data import Data, Samples
from visgen.launch import cpus, reader

SMALL = 1 << 20  # bytes of a tensor that is sent rather than shared
Key = tuple[int, int]  # (index, epoch): the address of a sample in `Samples`


class Order:
    """The global order of `size` samples in steps of `batch`."""

    def __init__(self, size: int, batch: int, seed: int) -> None:
        self.size, self.batch, self.seed = size, batch, seed
        self._permutations: dict[int, np.ndarray] = {}

    def step(self, step: int) -> list[Key]:
        """The `batch` keys of step `step`, counted from 0."""
        keys = []
        for place in range(step * self.batch, (step + 1) * self.batch):
            epoch, offset = divmod(place, self.size)
            keys.append((int(self._permutation(epoch)[offset]), epoch))
        return keys

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            self._permutations = {e: p for e, p in self._permutations.items() if e == epoch - 1}
            self._permutations[epoch] = np.random.default_rng((self.seed, epoch)).permutation(self.size)
        return self._permutations[epoch]


class MicroBatches:
    """Batch sampler of one rank: the keys of its micro-batches from step `start` to `stop`, `parts` to a step."""

    def __init__(self, order: Order, start: int, stop: int, rank: int, world: int, parts: int) -> None:
        self.order, self.start, self.stop = order, start, stop
        self.rank, self.world, self.parts = rank, world, parts
        self.length = order.batch // (world * parts)

    def __len__(self) -> int:
        return (self.stop - self.start) * self.parts

    def __iter__(self) -> Iterator[list[Key]]:
        for step in range(self.start, self.stop):
            mine = self.order.step(step)[self.rank :: self.world]
            for part in range(self.parts):
                yield mine[part * self.length : (part + 1) * self.length]


def micro_batches(
    data: Data, keys: MicroBatches, seed: int, workers: int, pin: bool
) -> Iterator[dict[str, torch.Tensor]]:
    """Collated samples for every list of `keys`, read by `workers` processes (0: in this one), at most one a CPU.

    Raises:
        UserError: what the data says about a sample that cannot be read, in its own words.
    """
    loader = DataLoader(
        Samples(data, seed),
        batch_sampler=keys,
        num_workers=min(workers, cpus()),
        pin_memory=pin,
        collate_fn=_collate,
        generator=torch.Generator(),  # or the loader draws from the global one
        worker_init_fn=reader,
    )
    try:
        yield from loader
    except UserError as error:  # a worker's comes with its whole traceback
        last = str(error).strip().splitlines()[-1]
        raise UserError(last.partition("UserError: ")[2] or last) from None


def say_killed(error: RuntimeError) -> None:
    """Raises what PyTorch says of a reader that was killed, wherever the main thread is then, as a `UserError`."""
    if str(error).startswith("DataLoader worker"):
        raise UserError(
            f"{str(error).strip().splitlines()[0].rstrip('. ')}; where it was out of memory, lower loop.workers. The "
            "same command goes on from the last checkpoint"
        ) from None


class _Parcel(dict[str, Any]):
    """A batch whose small tensors travel as bytes: to share a tensor's memory with another process takes a millisecond,
    whatever its size. It is unpacked by the thread that receives it, which with `pin` is not the one that trains."""

    def __reduce__(self) -> tuple[Any, ...]:
        small = {k: v.numpy() for k, v in self.items() if isinstance(v, torch.Tensor) and v.nbytes <= SMALL}
        return _unpack, ({**self, **small},)


def _unpack(batch: dict[str, Any]) -> dict[str, Any]:
    return {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in batch.items()}


def _collate(samples: list[dict[str, Any]]) -> _Parcel:
    return _Parcel(default_collate(samples))


def check_batch(size: int, batch: int, world: int, accumulation: int, flag: str = "loop.batch") -> None:
    """Raises `UserError` where the global batch, which `flag` says, cannot be dealt out."""
    if batch < 1 or accumulation < 1 or batch % (world * accumulation):
        raise UserError(
            f"loop.batch is {batch}, for all processes together; it must be a multiple of processes x "
            f"loop.accumulation = {world} x {accumulation}"
        )
    if size < batch:
        raise UserError(f"the data has {size} samples, fewer than {flag} ({batch}); lower {flag} or add data")
