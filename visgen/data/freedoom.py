"""Freedoom: rendered views, or clips, of a game with true depth, true segmentation and the keys that were held.

    pip install 'visgen[freedoom]'
    python -m visgen.prepare.freedoom --out data_cache/freedoom64
    python -m visgen.prepare.freedoom --out data_cache/freedoom64_clips --kind clips

A label is what stands in front: one of 15 monsters, or a kind of scenery; of clips, the scenery of their first frame.
The split goes by map of the game: `held_out` has maps that `train` lacks, `same_maps` has other views of its maps.

A set is `<root>/<split>/`: `index.json`, and per shard `pixels_00000.npy` uint8 [n, T, H, W, 3], where they were kept
`depth_00000.npy` and `seg_00000.npy` uint8 [n, T, H, W], and `about_00000.npy` [n, T] of `about_type`. The files are
mapped into memory. Opening a set compares those that it needs with their checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from visgen import arrays
from visgen.checks import Positive
from visgen.config import UserError
from visgen.data import Data, Split, Views, _index, views_of
from visgen.files import from_home

VERSION = 1
Part = Literal["train", "held_out", "same_maps"]
STILL = 0  # the action of which nothing is known: that before the first frame


@dataclass(frozen=True)
class Config:
    root: Path = Path("data_cache/freedoom64")
    """Folder that `python -m visgen.prepare.freedoom --out` wrote."""
    maps: Literal["none", "depth", "seg"] = "none"
    """Control maps that samples come with, as the game has them: depth (near is bright) or segmentation (colours)."""
    frames: Positive = 1
    """Frames of a sample of clips: a window of a stored clip, anywhere while training, else its beginning."""
    hflip: bool = False
    """Mirror half of the training samples, their maps and actions with them."""
    held_out: Literal["held_out", "same_maps"] = "held_out"
    """What the held-out split is: maps of the game that training has not seen, or other views of those that it has."""


@dataclass
class Index:
    """`index.json`: what a set is of. All but the last three fields are settings that a resumed build must repeat."""

    split: Part
    kind: Literal["views", "clips"]
    samples: int
    frames: int
    image_size: list[int]
    has_maps: bool
    classes: list[str]
    parts: list[str]  # names of the numbers in `seg`
    colours: list[list[int]]  # their colours
    actions: list[str]
    levels: list[str]  # names of the game's maps, by number
    seed: int
    shard_samples: int
    settings: dict[str, Any]  # of the engine, the filters and the game data
    version: int = VERSION
    counts: dict[str, int] = field(default_factory=dict)  # shots, and those refused by each filter
    complete: bool = False
    shards: list[dict[str, Any]] = field(default_factory=list)  # checksums of each shard's files, once complete

    def __post_init__(self) -> None:
        sizes = (self.samples, self.frames, self.shard_samples, len(self.classes), len(self.levels), len(self.actions))
        if len(self.image_size) != 2 or not all((*sizes, *self.image_size)):
            raise ValueError("its samples, frames, image_size, shard_samples or names make no set")
        if len(self.parts) != len(self.colours) or any(len(c) != 3 or max(c) > 255 for c in self.colours):
            raise ValueError("its colours are not those of its parts")
        if self.complete and len(self.shards) != self.shard_count:
            raise ValueError(f"it is complete, and has no checksums for its {self.shard_count} shards")

    @property
    def shard_count(self) -> int:
        return -(-self.samples // self.shard_samples)

    def shard(self, number: int) -> range:
        """Return the samples of a shard."""
        return range(number * self.shard_samples, min((number + 1) * self.shard_samples, self.samples))

    def array(self, name: str, number: int) -> tuple[np.dtype, tuple[int, ...]]:
        """Return type and shape of the array `name` of a shard."""
        shape = (len(self.shard(number)), self.frames)
        if name == "about":
            return about_type(), shape
        return np.dtype(np.uint8), (*shape, *self.image_size, *((3,) if name == "pixels" else ()))


def about_type() -> np.dtype:
    """Return the type of what is known about a frame: its label, its map of the game, the action since the frame before
    it, and the pose x, y, z and angle in degrees."""
    return np.dtype([("label", "<i2"), ("level", "<i2"), ("action", "u1"), ("pose", "<f4", (4,))])


class Freedoom(Data):
    """Samples are `pixels` uint8 [T, 3, H, W] and `label`; with `maps`, `map` uint8 [T, 3, H, W]; of clips `action`
    int64 [T], where action t is what was held from frame t - 1 to frame t, and action 0 is `stay`.

    Attributes:
        index: everything that `index.json` says.
        about: [n, T] structured, of all frames of all samples.
        actions: names of the actions.
        has_maps: whether samples have a `map`; `read_map` is not needed, the maps are as control knows them.
    """

    config: Config
    read_map: Any = None

    def __init__(self, config: Config, split: Split) -> None:
        self.config, self.split = config, split
        self.part: Part = "train" if split == "train" else config.held_out
        self.folder = from_home(config.root) / self.part
        self.index = index = read_index(self.folder)
        if not index.complete:
            raise UserError(f"Freedoom set {self.folder} is incomplete; {_AGAIN}, it goes on from there")
        if config.frames > index.frames:
            raise UserError(f"data.frames {config.frames}: the clips of {self.folder} have {index.frames}")
        if config.maps != "none" and not index.has_maps:
            raise UserError(f"data.maps {config.maps}: {self.folder} has none; build it with --maps true")
        self.classes, self.frames, self.actions = index.classes, config.frames, index.actions
        self.image_size = (index.image_size[0], index.image_size[1])
        self.has_maps = config.maps != "none"
        self._names = ("pixels", *([config.maps] if self.has_maps else []))
        self.beside = self._shapes()
        self._shards, numbers = self._open(), range(index.shard_count)
        self.about = np.concatenate([self._about(number) for number in numbers])
        self.labels = torch.from_numpy(self.about["label"][:, 0].astype(np.int64))
        self._colours = np.array(index.colours, np.uint8)
        self._mirrored = mirrored(index.actions)
        arrays.once_a_host(self._verify, numbers, self.folder, sum(a.nbytes for s in self._shards for a in s.values()))

    def __len__(self) -> int:
        return self.index.samples

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        augment, start, flip = rng if self.split == "train" else None, 0, False
        if augment is not None:
            start = int(augment.integers(self.index.frames - self.frames + 1)) if self._has_actions else 0
            flip = self.config.hflip and bool(augment.random() < 0.5)
        sample: dict[str, Any] = self._samples([index], start, flip)
        return {name: values[0] for name, values in sample.items()} | {"label": int(sample["label"])}

    def get_many(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return self._samples(indices)

    def views(self, indices: Sequence[int], kind: Views, ranges: Sequence[float] = (1.1,)) -> dict[str, Tensor]:
        """As the contract says; and per view `action` [B, V, T], and `map`, of one channel where it is grey."""
        views, many = super().views(indices, kind, ranges), self.get_many(indices)
        if self.has_maps:
            views["map"] = views_of(many["map"], kind)[:, :, :, : self.beside["map"][1]]
        if self._has_actions:
            plain, count = many["action"], views["pixels"].shape[1]
            both = torch.stack([plain, torch.from_numpy(self._mirrored[plain])], 1)  # [B, 2, T]
            views["action"] = both[:, :1] if count == 1 else both.repeat_interleave(count // 2, 1)
        return views

    def _shapes(self) -> dict[str, list[int]]:
        map_ = [self.frames, 1 if self.config.maps == "depth" else 3, *self.image_size]
        action = {"action": [self.frames]} if self._has_actions else {}
        return ({"map": map_} if self.has_maps else {}) | action

    @property
    def _has_actions(self) -> bool:
        return self.index.kind == "clips"

    def _samples(self, indices: Sequence[int], start: int = 0, flip: bool = False) -> dict[str, Tensor]:
        """Samples, stacked; of clips the frames from `start` on."""
        chosen = np.asarray(indices, np.int64)
        window = slice(start, start + self.frames)
        pixels = torch.from_numpy(self._rows("pixels", chosen, window)).permute(0, 1, 4, 2, 3)  # [B, T, 3, H, W]
        out = {"pixels": pixels, "label": self.labels[torch.from_numpy(chosen)]}
        if self.has_maps:
            out["map"] = self._map(self._rows(self.config.maps, chosen, window))
        if self._has_actions:
            action = self.about["action"][chosen, window].astype(np.int64)  # [B, T]
            action[:, 0] = STILL
            out["action"] = torch.from_numpy(self._mirrored[action] if flip else action)
        if flip:
            out |= {name: out[name].flip(-1) for name in ("pixels", "map") if name in out}
        return {name: values.contiguous() for name, values in out.items()}

    def _map(self, values: np.ndarray) -> Tensor:
        """Stored depth or parts [B, T, H, W] -> uint8 [B, T, 3, H, W]."""
        if self.config.maps == "depth":
            return torch.from_numpy(values).unsqueeze(2).expand(-1, -1, 3, -1, -1)
        return torch.from_numpy(self._colours[values]).permute(0, 1, 4, 2, 3)

    def _rows(self, name: str, chosen: np.ndarray, window: slice) -> np.ndarray:
        """Copy stored values of samples, [B, T, ...]."""
        if not self._shards:
            self._shards = self._open()
        shard, place = np.divmod(chosen, self.index.shard_samples)
        dtype, shape = self.index.array(name, 0)
        out = np.empty((len(chosen), self.frames, *shape[2:]), dtype)
        for number in np.unique(shard):
            here = shard == number
            out[here] = self._shards[number][name][place[here], window]
        return out

    def _open(self) -> list[dict[str, np.ndarray]]:
        numbers = range(self.index.shard_count)
        return [{n: open_array(self.folder, self.index, n, i) for n in self._names} for i in numbers]

    def _about(self, number: int) -> np.ndarray:
        about, path = open_array(self.folder, self.index, "about", number), array_path(self.folder, "about", number)
        arrays.verify(path, about, _REMEDY, self.index.shards[number].get("about", ""))
        for name, names in (("label", self.index.classes), ("level", self.index.levels), ("action", self.actions)):
            values = about[name]
            if values.min() < 0 or values.max() >= len(names):
                raise UserError(f"{path} holds a {name} that is none of its {len(names)}; {_REMEDY}")
        return np.array(about)

    def _verify(self, number: int) -> None:
        for name, array in self._shards[number].items():
            path = array_path(self.folder, name, number)
            arrays.verify(path, array, _REMEDY, self.index.shards[number].get(name, ""))
            if name == "seg" and array.max(initial=0) >= len(self._colours):
                raise UserError(f"{path} holds part {array.max()}, there are {len(self._colours)}; {_REMEDY}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": []}  # a mapped file would be pickled as a copy of its bytes


def mirrored(actions: Sequence[str]) -> np.ndarray:
    """Return for each action the number of what it is in a mirror: left is right."""
    swap = {"left": "right", "right": "left"}
    return np.array([actions.index(" ".join(swap.get(word, word) for word in name.split())) for name in actions])


# ------------------------------------------------------------------------------------------------- files

_AGAIN = "run `python -m visgen.prepare.freedoom` again with the same options"
_REMEDY = f"delete the folder and {_AGAIN}"


def array_path(folder: Path, name: str, number: int) -> Path:
    """Return the file of a shard's array: `pixels`, `depth`, `seg` or `about`."""
    return folder / f"{name}_{number:05d}.npy"


def read_index(folder: Path) -> Index:
    """Read `index.json`.

    Raises:
        UserError: missing, damaged, or of another version.
    """
    absent = f"no Freedoom set at {folder}; build one: python -m visgen.prepare.freedoom --out {folder.parent}"
    return _index.read_index(folder, Index, VERSION, absent, "build it again", _REMEDY)


def write_index(folder: Path, index: Index) -> None:
    _index.write_index(folder, index)


def open_array(folder: Path, index: Index, name: str, number: int) -> np.ndarray:
    """Map an array of a shard.

    Raises:
        UserError: missing, truncated, or of another type or shape.
    """
    path, (dtype, shape) = array_path(folder, name, number), index.array(name, number)
    array = arrays.read(path, _AGAIN, _REMEDY, mapped=True)
    if array.dtype != dtype or array.shape != shape:
        raise UserError(f"{path} holds {array.dtype} {array.shape}, its index says {dtype} {shape}; {_REMEDY}")
    return array


def write_shard(folder: Path, index: Index, number: int, values: dict[str, np.ndarray]) -> dict[str, str]:
    """Write the arrays of a shard, and return their checksums."""
    return {name: arrays.write(array_path(folder, name, number), array) for name, array in values.items()}
