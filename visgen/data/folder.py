"""A folder of images: one class per sub-folder (torchvision's ImageFolder layout), or one class without sub-folders.

Held-out images are the sub-folder `held_out/`, `val/` or `test/` beside `train/` if there is one, otherwise a fixed
share chosen by a hash of each path relative to the root, which stays the same when files are added.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from visgen.config import UserError
from visgen.data import Split
from visgen.data._images import SUFFIXES, refuse, walk_links
from visgen.data._source import ImageConfig, ImageData, split_by_name

log = logging.getLogger(__name__)

HELD_OUT_NAMES = ("held_out", "val", "test")


@dataclass(frozen=True)
class Config(ImageConfig):
    root: Path = Path("data")
    """Folder with one sub-folder of images per class, or with train/ and held_out/ (val/, test/) of that layout."""
    maps: Path | None = None
    """Folder of control maps: of each image one under the same path, whatever the suffix (`python -m visgen.maps`)."""


class Folder(ImageData):
    """Classes are the sorted sub-folders; images are found recursively, sorted by path; hidden files are ignored."""

    config: Config

    def __init__(self, config: Config, split: Split) -> None:
        super().__init__(config, split)
        root = Path(config.root).expanduser()
        if not root.is_dir():
            what = "is not a folder" if root.exists() else "does not exist"
            raise UserError(f"data.root {root} {what}; pass a folder with one sub-folder of images per class")
        parts = _parts(root)
        names = _listing(parts["train"])[0]
        self.classes = names or ["all"]
        self._root = os.fsencode(parts[split])
        paths, labels = _images(parts[split], names)
        beside = sum(map(_is_image, _listing(parts[split])[1])) if names else 0
        if beside and (split == "train" or parts["train"] != parts["held_out"]):  # said once
            log.warning("%s: %d images beside its class folders are ignored; move them into one", parts[split], beside)
        if split == "train" and (bare := [names[k] for k in sorted(set(range(len(names))) - set(labels))]):
            log.warning("%s: class %s holds no image, yet counts; delete the folder", parts[split], ", ".join(bare))
        if parts["train"] == parts["held_out"]:
            kept = split_by_name(paths, config.held_out_fraction, split, f"data.root {root}")
            paths, labels = [paths[i] for i in kept], [labels[i] for i in kept]
        if config.maps is not None:
            maps = Path(config.maps).expanduser() / parts[split].relative_to(root)
            self._map_root, self.has_maps = os.fsencode(maps), True
            self._maps = np.array(_maps(maps, paths, parts[split]), dtype=np.bytes_)
        self._paths = np.array(paths, dtype=np.bytes_)  # one block: a list's reference counts would copy it per worker
        self._index(labels)

    def _file(self, index: int) -> Path:
        return Path(self._name(index))

    def _name(self, index: int) -> str:
        return os.fsdecode(os.path.join(self._root, self._paths[index].item()))

    def _map_file(self, index: int) -> Path:
        return Path(os.fsdecode(os.path.join(self._map_root, self._maps[index].item())))


def _parts(root: Path) -> dict[Split, Path]:
    """The folder of each split; both are the same one where the split goes by name."""
    names = _listing(root)[0]
    held_out = next((name for name in HELD_OUT_NAMES if name in names), None)
    if "train" in names and held_out:
        return {"train": root / "train", "held_out": root / held_out}
    if names == ["train"]:
        root = root / "train"
    return {"train": root, "held_out": root}


def _images(folder: Path, classes: list[str]) -> tuple[list[bytes], list[int]]:
    """Paths relative to `folder` and labels of all images, in the order of classes, then of paths; one class without
    a folder of its own if `classes` is empty."""
    names, files = _listing(folder)
    unknown = sorted(set(names) - set(classes)) if classes else []
    if unknown:
        raise UserError(f"{folder}: class '{unknown[0]}' is not among the {len(classes)} classes of the train folder")
    paths: list[bytes] = []
    labels: list[int] = []
    for label, name in enumerate(classes or [""]):
        if name in names or not classes:
            found = sorted(_walk(folder / name, folder))
            paths += found
            labels += [label] * len(found)
    if not paths:
        beside = sum(_is_image(f) for f in files)
        hint = f"the {beside} beside its sub-folders must move into one" if beside else "check data.root"
        raise UserError(f"{folder} holds no image ({' '.join(sorted(SUFFIXES))}); {hint}")
    return paths, labels


def _walk(folder: Path, relative_to: Path) -> Iterator[bytes]:
    start = os.fsencode(relative_to)
    for where, files in walk_links(folder):
        inside = os.path.relpath(where, start)
        for name in files:
            if _is_image(os.fsdecode(name)):
                yield name if inside == b"." else os.path.join(inside, name)


def _maps(folder: Path, images: list[bytes], beside: Path) -> list[bytes]:
    """The path in `folder` of each image's map.

    Raises:
        UserError: no such folder, or an image without a map.
    """
    if not folder.is_dir():
        raise UserError(f"data.maps: {folder} is no folder; pass one with the layout of {beside}")
    found = {}
    for where, names in walk_links(folder):
        inside = os.path.relpath(where, os.fsencode(folder))
        for name in names:
            if _is_image(os.fsdecode(name)) or name.lower().endswith(b".npy"):
                path = name if inside == b"." else os.path.join(inside, name)
                found[os.path.splitext(path)[0]] = path
    missing = [path for path in images if os.path.splitext(path)[0] not in found]
    if missing:
        raise UserError(
            f"data.maps {folder} has no map of {len(missing)} of {len(images)} images, the first being "
            f"{os.fsdecode(missing[0])}; make them with `python -m visgen.maps`"
        )
    return [found[os.path.splitext(path)[0]] for path in images]


def _listing(folder: Path) -> tuple[list[str], list[str]]:
    """Sorted names of the sub-folders and of the files, hidden ones left out."""
    try:
        entries = [e for e in os.scandir(folder) if not e.name.startswith((".", "__MACOSX"))]
    except OSError as error:
        refuse(error)
    folders = sorted(e.name for e in entries if e.is_dir())
    return folders, sorted(e.name for e in entries if not e.is_dir())


def _is_image(name: str) -> bool:
    return not name.startswith(".") and os.path.splitext(name)[1].lower() in SUFFIXES
