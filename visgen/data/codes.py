"""Cached tokens `[image, view, N]`, or `[image, view, N, C]` of a continuous tokenizer, by `python -m visgen.encode`.

A cache is `<root>/<split>/`: `index.json`, and per shard `codes_00000.npy` (uint16, uint32 above 65536 codes, float16
of continuous tokens; mapped into memory) and `labels_00000.npy`; and where the source has control maps or actions,
`map_00000.npy` and `action_00000.npy` of every view. A training access draws one of the views (LlamaGen
section 2.10 keeps two mirrors or ten crops), so crops and flips cost nothing. The index records the source, the views
and the tokenizer's hash: a cache never meets a tokenizer that did not write it. Opening compares every file with its
checksum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visgen import arrays
from visgen.config import UserError, build, dump, load, plugin
from visgen.data import Data, Split, Views, _index
from visgen.files import from_home, read_json, write_json

VERSION = 1
BESIDE: dict[str, np.dtype] = {"map": np.dtype(np.uint8), "action": np.dtype(np.int64)}
CENTER = 4  # the centre crop's number among ten crops


@dataclass(frozen=True)
class Config:
    root: Path = Path("data_cache/codes")
    """Folder that `python -m visgen.encode --out` wrote; it holds train/ and perhaps held_out/."""


@dataclass(frozen=True)
class Source:
    """The data that a cache was made from."""

    data: Any = plugin("visgen.data", "synthetic")


@dataclass
class Index:
    """`index.json`. Every field but the last two is a setting that a resumed run must repeat."""

    version: int
    split: Split
    source: dict[str, Any]  # `dump(Source(...))["data"]`
    tokenizer: str  # hash of the tokenizer's weights and config
    grid: list[int]
    vocab: int  # 0 of continuous tokens
    views: Views
    ranges: list[float]  # of ten_crop
    image_size: list[int]
    classes: list[str]
    images: int
    shard_images: int
    channels: int = 0  # of continuous tokens
    beside: dict[str, list[int]] = dataclasses.field(default_factory=dict)  # shape of a view's `map` and `action`
    complete: bool = False
    shards: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # `write_shard`'s records, once complete

    def __post_init__(self) -> None:
        _index.check_sizes(self)
        if not (self.images and self.shard_images) or bool(self.vocab) == bool(self.channels):
            raise ValueError("its images, shard_images, vocab or channels make no cache")
        if any(name not in BESIDE or not all(shape) for name, shape in self.beside.items()):
            raise ValueError(f"its beside is {self.beside}")
        if self.complete and (len(self.shards) != self.shard_count or not all(map(_is_record, self.shards))):
            raise ValueError(f"it is complete, and has no checksums for its {self.shard_count} shards")

    @property
    def view_count(self) -> int:
        return {"center": 1, "flip": 2, "shift": 18, "ten_crop": 10 * len(self.ranges)}[self.views]

    @property
    def dtype(self) -> np.dtype:
        if self.channels:
            return np.dtype(np.float16)
        return np.dtype(np.uint16 if self.vocab <= 65536 else np.uint32)

    @property
    def shard_count(self) -> int:
        return -(-self.images // self.shard_images)

    def shard(self, number: int) -> range:
        """The images of a shard."""
        return range(number * self.shard_images, min((number + 1) * self.shard_images, self.images))

    def shape(self, number: int) -> tuple[int, ...]:
        """[images, views, N] or [images, views, N, C] of a shard."""
        return self.part("codes", number)[1]

    def part(self, name: str, number: int) -> tuple[np.dtype, tuple[int, ...]]:
        """Type and shape of a part of a shard: its codes, or what lies beside them."""
        codes = [int(np.prod(self.grid)), *([self.channels] if self.channels else [])]
        one = codes if name == "codes" else self.beside[name]
        dtype = self.dtype if name == "codes" else BESIDE[name]
        return dtype, (len(self.shard(number)), self.view_count, *one)


class Codes(Data):
    """Samples are `tokens` int64 [N] or float32 [N, C], `label` and `view`. Training draws a view; plain samples have
    the central one, 0. They have the view's `map` uint8 [T, 3, H, W] and `action` int64 [T] where the source had these.

    Args:
        index: of a cache that is not marked as complete yet; default: read, and refused where the cache is incomplete.

    Attributes:
        index: everything that `index.json` says.
        grid, vocab, channels, tokenizer_hash: of the tokenizer that wrote it; vocab or channels is None.
        has_maps: whether samples have a `map`; `read_map` is not needed.
    """

    config: Config
    read_map: Any = None

    def __init__(self, config: Config, split: Split, index: Index | None = None) -> None:
        self.config, self.split = config, split
        self.folder = from_home(config.root) / split
        self.index = index or read_index(self.folder)
        if index is None and not self.index.complete:
            done = sum(shard_path(self.folder, i, "done").is_file() for i in range(self.index.shard_count))
            raise UserError(
                f"code cache {self.folder} is incomplete, {done} of {self.index.shard_count} shards; run "
                f"`python -m visgen.encode --out {config.root} ...` again with the same options, it goes on from there"
            )
        self.classes, self.tokenizer_hash = self.index.classes, self.index.tokenizer
        self.image_size = (self.index.image_size[0], self.index.image_size[1])
        self.grid = (self.index.grid[0], self.index.grid[1], self.index.grid[2])
        self.vocab, self.channels = self.index.vocab or None, self.index.channels or None
        self.view_count = self.index.view_count
        self.has_maps = "map" in self.index.beside
        self._maps, numbers = self._open(), range(self.index.shard_count)
        self.labels = torch.from_numpy(np.concatenate([_labels(self.folder, self.index, i) for i in numbers]))
        size = sum(each.nbytes for parts in self._maps for each in parts.values())
        arrays.once_a_host(self._verify, numbers, self.folder, size)

    def __len__(self) -> int:
        return self.index.images

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        view = plain = CENTER if self.index.views == "ten_crop" else 0
        if rng is not None and self.split == "train":
            view = int(rng.integers(self.view_count))
        stored = self.tokens(index)[view]
        tokens = torch.from_numpy(stored.astype(np.float32 if self.channels else np.int64))
        sample = {"tokens": tokens, "label": int(self.labels[index]), "view": (view - plain) % self.view_count}
        beside = {name: torch.from_numpy(np.array(self._stored(name, index)[view])) for name in self.index.beside}
        if self.has_maps:
            beside["map"] = beside["map"].expand(-1, 3, -1, -1).contiguous()  # grey ones are stored once
        return sample | beside

    def tokens(self, index: int) -> np.ndarray:
        """All views of an image, [V, N] or [V, N, C] of the stored dtype, in the file's memory."""
        return self._stored("codes", index)

    def _stored(self, part: str, index: int) -> np.ndarray:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if not self._maps:
            self._maps = self._open()
        return self._maps[index // self.index.shard_images][part][index % self.index.shard_images]

    def views(self, indices: Sequence[int], kind: Views, ranges: Sequence[float] = (1.1,)) -> dict[str, Tensor]:
        raise UserError("data 'codes' holds tokens, no pixels; encode its source instead")

    def source(self) -> Data:
        """The data that was encoded, built again from its stored config.

        Raises:
            UserError: its files are not where they were.
        """
        try:
            return build(load(Source, values={"data": self.index.source}).data, self.split)
        except UserError as error:
            raise UserError(f"the source of code cache {self.folder} cannot be opened: {error}") from None

    def check(self, tokenizer_hash: str) -> None:
        """Refuses a tokenizer that did not write this cache.

        Raises:
            UserError: the hashes differ.
        """
        if tokenizer_hash != self.tokenizer_hash:
            raise UserError(
                f"code cache {self.folder} was written by tokenizer {self.tokenizer_hash[:12]}, not by "
                f"{tokenizer_hash[:12]}; pass that tokenizer, or encode again into another folder"
            )

    def _verify(self, number: int) -> None:
        verify_shard(self.folder, self.index, number, self.index.shards[number])

    def _open(self) -> list[dict[str, np.ndarray]]:
        parts, numbers = ("codes", *self.index.beside), range(self.index.shard_count)
        return [{part: open_shard(self.folder, self.index, i, part) for part in parts} for i in numbers]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": []}  # a mapped file would be pickled as a copy of its bytes


def source_of(config: Config, split: Split = "train") -> Any:
    """Return the config of the data that a cache was made from.

    Raises:
        UserError: there is no such cache, or its index is damaged.
    """
    return load(Source, values={"data": read_index(from_home(config.root) / split).source}).data


# ------------------------------------------------------------------------------------------------- files

_AGAIN = "run `python -m visgen.encode` again with the same options"
_REMEDY = f"delete it and {_AGAIN}"


def shard_path(folder: Path, number: int, part: str) -> Path:
    """File of a shard; part is `codes`, `labels`, `map`, `action`, or `done`, the record written last while the cache
    is incomplete."""
    return folder / (f"done_{number:05d}.json" if part == "done" else f"{part}_{number:05d}.npy")


def make_index(source: Data, **settings: Any) -> Index:
    """The index of a new cache of `source`."""
    return Index(
        version=VERSION,
        split=source.split,
        source=dump(Source(source.config))["data"],
        image_size=list(source.image_size),
        classes=list(source.classes),
        images=len(source),
        **settings,
    )


def read_index(folder: Path) -> Index:
    """Reads `index.json`.

    Raises:
        UserError: missing, not JSON, or of another version.
    """
    absent = (
        f"no code cache at {folder}; write one with `python -m visgen.encode --tokenizer T --data.kind KIND --out "
        f"{folder.parent} --split {folder.name}`, of the data that you would train on"
    )
    return _index.read_index(folder, Index, VERSION, absent, "encode again", _REMEDY)


def write_index(folder: Path, index: Index) -> None:
    _index.write_index(folder, index)


def write_shard(
    folder: Path, index: Index, number: int, codes: np.ndarray, labels: np.ndarray, **beside: np.ndarray
) -> None:
    """Write codes of `index.shape`, labels [n] and what lies beside them [n, V, ...]; and last the record that marks
    the shard as done."""
    record = {
        **{part: arrays.write(shard_path(folder, number, part), beside[part]) for part in index.beside},
        "codes": arrays.write(shard_path(folder, number, "codes"), codes.astype(index.dtype)),
        "labels": arrays.write(shard_path(folder, number, "labels"), labels.astype(np.int64)),
    }
    write_record(folder, number, record)


def write_record(folder: Path, number: int, record: dict[str, Any]) -> None:
    """Mark a shard as done."""
    write_json(shard_path(folder, number, "done"), record)


def shard_record(folder: Path, index: Index, number: int) -> dict[str, Any] | None:
    """Return the checksums of a shard that is whole and as it was written, else None."""
    record = read_record(folder, index, number)
    try:
        if record is not None:
            verify_shard(folder, index, number, record)
    except UserError:
        return None
    return record


def read_record(folder: Path, index: Index, number: int) -> dict[str, Any] | None:
    """Return the checksums of a shard that was written, else None; its files are not read."""
    done = shard_path(folder, number, "done")
    try:
        record = read_json(done, _REMEDY) if done.is_file() else index.shards[number] if index.shards else None
    except UserError:
        return None
    return record if _is_record(record) else None


def verify_shard(folder: Path, index: Index, number: int, record: dict[str, Any]) -> None:
    """Read the files of a shard and compare them with their checksums and their range.

    Raises:
        UserError: a file is not what was written, or holds no codes, vectors or labels.
    """
    codes, path = open_shard(folder, index, number), shard_path(folder, number, "codes")
    arrays.verify(path, codes, _REMEDY, record["codes"])
    if index.channels and not arrays.is_finite(codes):
        raise UserError(f"{path} holds a value that is not finite; {_REMEDY}")
    if index.vocab and codes.max(initial=0) >= index.vocab:
        raise UserError(f"{path} holds code {codes.max()}, the vocabulary has {index.vocab}; {_REMEDY}")
    for part in index.beside:
        path, stored = shard_path(folder, number, part), open_shard(folder, index, number, part)
        arrays.verify(path, stored, _REMEDY, record.get(part, ""))
    path = shard_path(folder, number, "labels")
    arrays.verify(path, arrays.read(path, _AGAIN, _REMEDY, mapped=True), _REMEDY, record["labels"])
    _labels(folder, index, number)


def open_shard(folder: Path, index: Index, number: int, part: str = "codes") -> np.ndarray:
    """Map a shard's codes, or what lies beside them.

    Raises:
        UserError: missing, truncated, or of another shape.
    """
    path, (dtype, shape) = shard_path(folder, number, part), index.part(part, number)
    stored = arrays.read(path, _AGAIN, _REMEDY, mapped=True)
    if stored.shape != shape or stored.dtype != dtype:
        raise UserError(f"{path} holds {stored.dtype} {stored.shape}, its index says {dtype} {shape}; {_REMEDY}")
    return stored


def _labels(folder: Path, index: Index, number: int) -> np.ndarray:
    """Return a shard's labels [n] int64.

    Raises:
        UserError: missing, truncated, of another shape, or a label that is no class.
    """
    path = shard_path(folder, number, "labels")
    labels, count = arrays.read(path, _AGAIN, _REMEDY), len(index.shard(number))
    if labels.shape != (count,) or labels.dtype != np.int64:
        raise UserError(f"{path} holds {labels.dtype} {labels.shape}, not {count} labels; {_REMEDY}")
    if labels.min() < 0 or labels.max() >= len(index.classes):
        bad = labels.min() if labels.min() < 0 else labels.max()
        raise UserError(f"{path} holds label {bad}, the cache has {len(index.classes)} classes; {_REMEDY}")
    return labels


def _is_record(value: Any) -> bool:
    """Whether a value is a record of a shard, `write_shard`'s."""
    return isinstance(value, dict) and all(isinstance(value.get(part), str) for part in ("codes", "labels"))
