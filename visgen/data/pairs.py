"""Pairs of noise and tokens of a teacher, written by `python -m visgen.trajectories`: targets of a one-step student.

A set is `<root>/<split>/`: `index.json`, and per shard `tokens_00000.npy` [n, N] (uint16, uint32 above 65536 codes).
Noise is not stored: pair i is of seed `first_seed` + i, from which noise follows exactly, and of label i modulo the
number of classes. The index records the teacher and all settings of its draws. Opening a set compares every file with
the checksum that it carries (`arrays.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visgen import arrays
from visgen.config import UserError
from visgen.data import Data, Split, Views, _index
from visgen.files import from_home

VERSION = 1


@dataclass(frozen=True)
class Config:
    root: Path = Path("data_cache/pairs")
    """Folder that `python -m visgen.trajectories --out` wrote; it holds train/ and perhaps held_out/."""


@dataclass
class Index:
    """`index.json`: what a set is of."""

    split: str
    pairs: int
    shard_pairs: int
    first_seed: int
    classes: list[str]
    image_size: list[int]
    grid: list[int]
    vocab: int
    tokenizer: str  # hash
    teacher: str  # hash of its weights
    guidance: dict[str, Any]
    warp: dict[str, Any]
    map_steps: int  # `nn.mixture.STEPS`
    precision: str  # that the teacher ran in
    version: int = VERSION

    def __post_init__(self) -> None:
        _index.check_sizes(self)
        if not (self.pairs and self.shard_pairs and self.vocab):
            raise ValueError(f"its pairs are {self.pairs}, its shard_pairs {self.shard_pairs}, its vocab {self.vocab}")

    @property
    def shard_count(self) -> int:
        return -(-self.pairs // self.shard_pairs)

    def shard(self, number: int) -> range:
        """The pairs of a shard."""
        return range(number * self.shard_pairs, min((number + 1) * self.shard_pairs, self.pairs))

    def seeds(self, part: range) -> Tensor:
        return torch.arange(part.start, part.stop) + self.first_seed

    def labels(self, part: range) -> Tensor:
        return torch.arange(part.start, part.stop) % len(self.classes)


class Pairs(Data):
    """Samples are `tokens` int64 [N], `label` and `seed`; never augmented.

    Attributes:
        index: everything that `index.json` says.
        grid, vocab: of the tokens.
    """

    config: Config

    def __init__(self, config: Config, split: Split) -> None:
        self.config, self.split = config, split
        self.folder = from_home(config.root) / split
        self.index = read_index(self.folder)
        self.classes, self.vocab = self.index.classes, self.index.vocab
        self.image_size = (self.index.image_size[0], self.index.image_size[1])
        self.grid = (self.index.grid[0], self.index.grid[1], self.index.grid[2])
        self._shards = self._open()
        self.labels = self.index.labels(range(self.index.pairs))
        size = sum(each.nbytes for each in self._shards)
        arrays.once_a_host(self._verify, range(len(self._shards)), self.folder, size)

    def __len__(self) -> int:
        return self.index.pairs

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        if not self._shards:
            self._shards = self._open()
        stored = self._shards[index // self.index.shard_pairs][index % self.index.shard_pairs]
        tokens = torch.from_numpy(stored.astype(np.int64))
        return {"tokens": tokens, "label": int(self.labels[index]), "seed": self.index.first_seed + index}

    def views(self, indices: Sequence[int], kind: Views, ranges: Sequence[float] = (1.1,)) -> dict[str, Tensor]:
        raise UserError("data 'pairs' holds tokens, no pixels")

    def _open(self) -> list[np.ndarray]:
        return [read_shard(self.folder, self.index, number) for number in range(self.index.shard_count)]

    def _verify(self, number: int) -> None:
        verify_shard(self.folder, self.index, number)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": []}  # a mapped file would be pickled as a copy of its bytes


# ------------------------------------------------------------------------------------------------- files

_REMEDY = "run the same `python -m visgen.trajectories` again, which writes what is missing"


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"tokens_{number:05d}.npy"


def read_index(folder: Path) -> Index:
    """Reads `index.json`.

    Raises:
        UserError: missing, not JSON, or of another version.
    """
    absent = (
        f"no pairs at {folder}; write some with `python -m visgen.trajectories --teacher T --out {folder.parent} "
        f"--split {folder.name}`"
    )
    return _index.read_index(
        folder, Index, VERSION, absent, "write it again", "delete the folder and write the pairs again"
    )


def write_index(folder: Path, index: Index) -> None:
    _index.write_index(folder, index)


def read_shard(folder: Path, index: Index, number: int) -> np.ndarray:
    """Map the tokens [n, N] of a shard.

    Raises:
        UserError: missing, truncated, or of another shape.
    """
    path, wanted = shard_path(folder, number), (len(index.shard(number)), int(np.prod(index.grid)))
    tokens = arrays.read(path, _REMEDY, f"delete it, then {_REMEDY}", mapped=True)
    if tokens.shape != wanted:
        raise UserError(f"{path} holds {tokens.shape}, its index says {wanted}; delete it, then {_REMEDY}")
    return tokens


def verify_shard(folder: Path, index: Index, number: int) -> None:
    """Read a shard, compare it with its checksum and its tokens with the vocabulary.

    Raises:
        UserError: it is missing, not what was written, or holds no ids of codes.
    """
    tokens, path = read_shard(folder, index, number), shard_path(folder, number)
    arrays.verify(path, tokens, f"delete it, then {_REMEDY}")
    if tokens.dtype.kind != "u" or tokens.max(initial=0) >= index.vocab:
        found = tokens.dtype if tokens.dtype.kind != "u" else f"token {tokens.max()}"
        raise UserError(
            f"{path} is damaged: it holds {found}, codes are 0 to {index.vocab - 1}; delete it, then {_REMEDY}"
        )


def write_shard(folder: Path, index: Index, number: int, tokens: np.ndarray) -> None:
    """Write tokens [n, N] so that they are there whole or not at all."""
    arrays.write(shard_path(folder, number), tokens.astype(np.uint16 if index.vocab <= 65536 else np.uint32))
