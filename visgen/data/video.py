"""A folder of clips: one class per sub-folder, read by PyAV (`pip install 'visgen[video]'`); GIF and WebP by Pillow.

As ACDiT takes UCF-101 (arXiv 2412.07720): so many frames at a stride from a random start, centre crop, one mirror for
all frames of a clip. Held-out clips are the sub-folder `held_out/` beside `train/` if there is one (`val/`, `test/` and
other names of `_folders.HELD_OUT` too), otherwise a fixed share chosen by a hash of each path.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visgen.checks import Positive, Rate
from visgen.config import UserError
from visgen.data import Data, Split
from visgen.data._clips import ANIMATION, VIDEO, av, count, read_clip, too_short
from visgen.data._folders import find_samples
from visgen.data._source import OnError, Readable, split_by_name, stamps
from visgen.files import from_home


@dataclass(frozen=True)
class Config:
    root: Path = Path("data")
    """Folder with one sub-folder of clips per class, or with train/ and held_out/ (val/, test/, ...) of that layout."""
    image_size: Positive = 256
    """Side of the square frames in pixels."""
    frames: Positive = 16
    """Frames of a sample."""
    stride: Positive = 3
    """Every so many frames of the file are taken."""
    hflip: bool = False
    """Mirror half of the training clips, all frames of one alike."""
    on_error: OnError = "stop"
    """A clip that is too short or cannot be read stops the run, or is named once, counted, and replaced by the next."""
    held_out_fraction: Rate = 0.05
    """Share of the clips held out by a hash of their names, where the folder has no held-out part of its own."""


class Video(Data):
    """Training clips begin anywhere in the file, plain ones so that they lie in its middle."""

    config: Config

    def __init__(self, config: Config, split: Split) -> None:
        self.config, self.split = config, split
        root = from_home(config.root)
        if not root.is_dir():
            raise UserError(f"data.root {root} is no folder; pass one with a sub-folder of clips per class")
        found = find_samples(root, split, VIDEO | ANIMATION, "clip")
        paths, labels = found.paths, found.labels
        if found.shared:
            kept = split_by_name(paths, config.held_out_fraction, split, f"data.root {root}")
            paths, labels = [paths[i] for i in kept], [labels[i] for i in kept]
        self.classes, self._paths = found.classes, [found.folder / os.fsdecode(path) for path in paths]
        if any(path.suffix.lower() in VIDEO for path in self._paths):
            av()  # said before a worker needs it
        self.labels = torch.tensor(labels)
        self._readable = Readable(len(self._paths), config.on_error)
        self.image_size, self.frames = (config.image_size, config.image_size), config.frames
        self._length = functools.lru_cache(maxsize=None)(count)

    def __len__(self) -> int:
        return len(self._paths)

    def fingerprint(self, indices: Sequence[int]) -> str:
        paths = [self._paths[i] for i in indices]
        return stamps(map(str, paths), paths)

    @property
    def skipped(self) -> int:  # type: ignore[override]
        return self._readable.skipped

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        drawn = rng if self.split == "train" else None
        clip, index = self._readable.read(index, functools.partial(self._clip, rng=drawn))
        if drawn is not None and self.config.hflip and drawn.random() < 0.5:
            clip = clip.flip(-1)
        return {"pixels": clip, "label": int(self.labels[index])}

    def _clip(self, index: int, rng: np.random.Generator | None) -> Tensor:
        path, config = self._paths[index], self.config
        spare = self._length(path) - ((config.frames - 1) * config.stride + 1)
        if spare < 0:
            raise too_short(path, self._length(path), config.frames, config.stride)
        drawn = copy.deepcopy(rng)  # a clip that cannot be read takes no draw from the next one
        start = spare // 2 if drawn is None else int(drawn.integers(spare + 1))
        clip = read_clip(path, config.image_size, config.frames, config.stride, start)
        if rng is not None and drawn is not None:
            rng.bit_generator.state = drawn.bit_generator.state
        return clip

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "_length"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _length=functools.lru_cache(maxsize=None)(count))
