"""What `folder` and `webdataset` share: the image options, the held-out split by name, unreadable images."""

from __future__ import annotations

import copy
import hashlib
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from visgen.config import UserError
from visgen.data import Data, Split, Views
from visgen.data._images import SMALLEST_CROP, center_crop, random_crop, stack_pixels, ten_crop, to_pixels
from visgen.image_files import decoding, read_image, require_resizable

log = logging.getLogger(__name__)

OnError = Literal["stop", "skip"]
T = TypeVar("T")
PATIENCE = 1000  # unreadable samples in a row before `skip` gives up


class Readable:
    """What a source does at samples that cannot be read.

    Args:
        count: samples of the source.
        on_error: `stop`, or `skip`: name it once, count it, and take the next readable one in its place.
    """

    def __init__(self, count: int, on_error: OnError) -> None:
        self.on_error = on_error
        self._damaged = torch.zeros(count, dtype=torch.uint8).share_memory_()  # seen by every worker

    @property
    def skipped(self) -> int:
        return int(self._damaged.sum())

    def read(self, index: int, one: Callable[[int], T]) -> tuple[T, int]:
        """`one(index)`, or that of the first readable sample after it; and the index of that. `one` raises
        `UserError` where it cannot, and draws no random number."""
        count = len(self._damaged)
        if not 0 <= index < count:
            raise IndexError(f"sample {index} of {count}")
        for step in range(min(count, PATIENCE)):
            i = (index + step) % count
            if self._damaged[i]:
                continue
            try:
                return one(i), i
            except UserError as error:
                if self.on_error == "stop":
                    raise UserError(f"{error}, or pass --data.on-error skip") from None
                self._damaged[i] = 1
                log.warning("%s; skipped", error)
        raise UserError(f"nothing readable from sample {index} on: {self.skipped} of {count} are damaged")


@dataclass(frozen=True)
class ImageConfig:
    """Options of every source of image files."""

    image_size: int = 256
    """Side of the square images in pixels."""
    crop: Literal["center", "random"] = "center"
    """center: ADM's; random: LlamaGen's, shorter side in [size, ceil(size / 0.8)], train split only."""
    hflip: bool = False
    """Mirror half of the training images."""
    on_error: OnError = "stop"
    """An unreadable image stops the run, or is named once, counted, and replaced by the next readable one."""
    held_out_fraction: float = 0.05
    """Share of the images held out by a hash of their names, where the source has no held-out part of its own."""


class ImageData(Data):
    """Image files by index. A subclass sets `classes`, calls `_index` and implements `_file` and `_name`; one that sets
    `has_maps` also `_map_file`, and its samples then have a control `map` uint8 [1, 3, H, W], cropped as their pixels.

    Attributes:
        read_map: how a map's file becomes uint8 [3, H, W], which a kind of control knows; None: as a picture.
    """

    config: ImageConfig
    has_maps: bool = False
    read_map: Callable[[Path], Tensor] | None = None

    def __init__(self, config: ImageConfig, split: Split) -> None:
        if config.image_size < 1:
            raise UserError(f"data.image_size {config.image_size} must be a positive number of pixels")
        if not 0 <= config.held_out_fraction < 1:
            raise UserError(f"data.held_out_fraction {config.held_out_fraction} must lie in [0, 1)")
        self.config, self.split = config, split
        self.image_size = (config.image_size, config.image_size)

    def _index(self, labels: Sequence[int] | np.ndarray) -> None:
        """Takes the labels of this split's samples, in order."""
        self.labels = torch.as_tensor(labels, dtype=torch.int64)
        self._readable = Readable(len(self.labels), self.config.on_error)

    @abstractmethod
    def _file(self, index: int) -> Path | BytesIO: ...

    @abstractmethod
    def _name(self, index: int) -> str: ...

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def skipped(self) -> int:  # type: ignore[override]
        return self._readable.skipped

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        (image, shown), index = self._readable.read(index, self._opened_with_map)
        augment = rng if self.split == "train" else None
        again = copy.deepcopy(augment) if self.has_maps else None  # a map is cropped and mirrored by the same draws
        sample = {"pixels": to_pixels(self._shown(image, augment)), "label": int(self.labels[index])}
        if shown is not None:
            sample["map"] = to_pixels(self._shown(shown, again, exact=True))
        return sample | self._more(index, augment)

    def fingerprint(self, indices: Sequence[int]) -> str:
        return stamps((self._name(i) for i in indices), self._sources(indices))

    def _sources(self, indices: Sequence[int]) -> Iterable[Path]:
        """The files that hold these samples."""
        return (Path(self._name(i)) for i in indices)

    def _more(self, index: int, augment: np.random.Generator | None) -> dict[str, Any]:
        """What else the sample has, drawn after its pixels."""
        return {}

    def _shown(self, image: Image.Image, augment: np.random.Generator | None, exact: bool = False) -> Image.Image:
        """The square that training sees of an image, or of its map."""
        if augment is not None and self.config.crop == "random":
            image = random_crop(image, self.config.image_size, augment, exact)
        else:
            image = center_crop(image, self.config.image_size, exact)
        mirrored = augment is not None and self.config.hflip and augment.random() < 0.5
        return ImageOps.mirror(image) if mirrored else image

    def _map_file(self, index: int) -> Path:
        raise NotImplementedError("a source that has_maps says where they lie")

    def views(self, indices: Sequence[int], kind: Views, ranges: Sequence[float] = (1.1,)) -> dict[str, Tensor]:
        if kind != "ten_crop":
            return super().views(indices, kind, ranges)
        pixels, labels = [], []
        largest = max(int(self.config.image_size * r) for r in ranges)
        for index in indices:
            image, found = self._readable.read(int(index), partial(self._opened, shorter=largest))
            pixels.append(stack_pixels([v for r in ranges for v in ten_crop(image, self.config.image_size, r)]))
            labels.append(int(self.labels[found]))
        return {"pixels": torch.stack(pixels), "label": torch.tensor(labels)}

    def _opened(self, index: int, shorter: int | None = None) -> Image.Image:
        """An image that can be resized to a shorter side of so many pixels; default: the most that a crop needs."""
        name = self._name(index)
        with decoding(name):
            image = read_image(self._file(index), name=name)
            require_resizable(image.size, shorter or math.ceil(self.config.image_size / SMALLEST_CROP))
            return image

    def _opened_with_map(self, index: int) -> tuple[Image.Image, Image.Image | None]:
        """An image, and its control map at the image's size where the source has maps."""
        image = self._opened(index)
        if not self.has_maps:
            return image, None
        path = self._map_file(index)
        with decoding(path, "control map"):
            if self.read_map is None:
                picture = read_image(path, "black")
            else:
                picture = Image.fromarray(self.read_map(path).permute(1, 2, 0).contiguous().numpy())
            return image, picture.resize(image.size, Image.Resampling.NEAREST)


def stamps(names: Iterable[str], files: Iterable[Path]) -> str:
    """Return a hash of the names of samples, and of the sizes and times of their files."""
    digest = hashlib.sha256("\n".join(names).encode(errors="surrogateescape"))
    for path in files:
        try:
            about = path.stat()
            digest.update(f"{about.st_size} {about.st_mtime_ns}\n".encode())
        except OSError:  # what is wrong with it is said when it is read
            digest.update(b"none\n")
    return digest.hexdigest()[:16]


def held_out_by_name(name: bytes, fraction: float) -> bool:
    """Whether the sample called `name` is held out: fixed by its name alone, so it stays when others are added."""
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def split_by_name(names: Sequence[bytes], fraction: float, split: Split, where: str) -> np.ndarray:
    """Positions of the samples of `split`.

    Raises:
        UserError: the split would be empty.
    """
    held = np.array([held_out_by_name(name, fraction) for name in names], dtype=bool)
    kept = np.flatnonzero(held if split == "held_out" else ~held)
    if len(kept) == 0:
        raise UserError(
            f"{where}: data.held_out_fraction {fraction} leaves none of its {len(names)} images for the split "
            f"'{split}'; change the fraction, add images, or make the folders train/ and held_out/"
        )
    return kept
