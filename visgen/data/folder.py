"""A folder of images: one class per sub-folder (torchvision's ImageFolder layout), or one class without sub-folders.

Held-out images are the sub-folder `held_out/` beside `train/` if there is one (`val/`, `test/` and other names of
`_folders.HELD_OUT` too), otherwise a fixed share chosen by a hash of each path relative to the root, which stays the
same when files are added.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from visgen.config import UserError
from visgen.data import Split
from visgen.data._folders import find_samples
from visgen.data._source import ImageConfig, ImageData, OnError, split_by_name
from visgen.files import from_home
from visgen.image_files import SUFFIXES, find_files


@dataclass(frozen=True)
class Config(ImageConfig):
    root: Path = Path("data")
    """Folder with one sub-folder of images per class, or with train/ and held_out/ (val/, ...) of that layout."""
    maps: Path | None = None
    """Folder of control maps: of each image one under the same path, whatever the suffix (`python -m visgen.maps`)."""


class Folder(ImageData):
    """Classes are the sorted sub-folders; images are found recursively, sorted by path; hidden files are ignored."""

    config: Config

    def __init__(self, config: Config, split: Split) -> None:
        super().__init__(config, split)
        root = from_home(config.root)
        if not root.is_dir():
            what = "is not a folder" if root.exists() else "does not exist"
            raise UserError(f"data.root {root} {what}; pass a folder with one sub-folder of images per class")
        found = find_samples(root, split, SUFFIXES, "image")
        self.classes, paths, labels = found.classes, found.paths, found.labels
        self._root = os.fsencode(found.folder)
        if found.shared:
            kept = split_by_name(paths, config.held_out_fraction, split, f"data.root {root}")
            paths, labels = [paths[i] for i in kept], [labels[i] for i in kept]
        if config.maps is not None:
            maps = from_home(config.maps) / found.folder.relative_to(root)
            self._map_root, self.has_maps = os.fsencode(maps), True
            self._maps = np.array(_maps(maps, paths, found.folder, config.on_error), dtype=np.bytes_)
        self._paths = np.array(paths, dtype=np.bytes_)  # one block: a list's reference counts would copy it per worker
        self._index(labels)

    def _file(self, index: int) -> Path:
        return Path(self._name(index))

    def _name(self, index: int) -> str:
        return os.fsdecode(os.path.join(self._root, self._paths[index].item()))

    def _map_file(self, index: int) -> Path:
        return Path(os.fsdecode(os.path.join(self._map_root, self._maps[index].item())))


def _maps(folder: Path, images: list[bytes], beside: Path, on_error: OnError) -> list[bytes]:
    """The path in `folder` of each image's map. Where `on_error` is `skip`, some maps may be missing: their images are
    skipped when they are read.

    Raises:
        UserError: no such folder, or images without a map.
    """
    if not folder.is_dir():
        raise UserError(f"data.maps: {folder} is no folder; pass one with the layout of {beside}")
    found = {os.path.splitext(path)[0]: path for path in find_files(folder, SUFFIXES | {".npy"}).paths}
    stems = [os.path.splitext(path)[0] for path in images]
    missing = [path for path, stem in zip(images, stems, strict=True) if stem not in found]
    if missing and (on_error == "stop" or len(missing) == len(images)):
        raise UserError(
            f"data.maps {folder} has no map of {len(missing)} of {len(images)} images, the first being "
            f"{os.fsdecode(missing[0])}; make them with `python -m visgen.maps`"
        )
    return [found.get(stem, stem + b".png") for stem in stems]
