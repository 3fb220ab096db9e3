"""Data sources: one file each, all map-style.

The loop draws `(index, epoch)` pairs, and the random generator of a sample is keyed by (seed, epoch, index). What a
sample looks like therefore depends neither on the worker nor on the number of processes, and resuming is exact.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np
import torch
from torch import Tensor

from visgen.config import UserError, kind_of

Split = Literal["train", "held_out"]
Views = Literal["center", "flip", "shift", "ten_crop"]  # which unaugmented views of an image are cached as codes
_MOVES = [(0, 0), *((y, x) for y in (-1, 0, 1) for x in (-1, 0, 1) if (y, x) != (0, 0))]  # of `shift`, in pixels


class Batch(TypedDict, total=False):
    """What a training step receives; B samples stacked."""

    pixels: Tensor  # [B, T, 3, H, W] float in [-1, 1]; an image is T = 1
    tokens: Tensor  # [B, N] int64 | [B, N, C] float (cached instead of pixels)
    label: Tensor  # [B] int64
    text: Tensor  # [B, S, Dt] float, left-padded (`conditions.text.left_pad`)
    text_mask: Tensor  # [B, S] bool, true where a slot of `text` is real
    map: Tensor  # [B, T, 3, H, W] control map
    action: Tensor  # [B, T] int64, what was done between frame t - 1 and frame t
    index: Tensor  # [B] int64, position of the sample in its source
    seed: Tensor  # [B] int64, of the noise whose tokens these are
    view: Tensor  # [B] int64, which view of the sample the cached tokens are of; 0 is the plain one


class Data(ABC):
    """A source of samples. Implementations are built as `Data(config, split)` and define `Config`.

    Attributes:
        config, split: what it was built from.
        classes: class names; a label is an index into this list.
        image_size: (H, W) in pixels.
        frames: number T of frames of a sample.
        labels: [n] int64, of all samples, where the source knows them beforehand.
        skipped: unreadable samples met so far, by this process and its workers.
        beside: shapes of `map` and `action` of a view, where `views` gives them.
    """

    config: Any
    split: Split
    classes: list[str]
    image_size: tuple[int, int]
    frames: int = 1
    labels: Tensor
    skipped: int = 0
    beside: Mapping[str, Sequence[int]] = {}

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        """One sample: `pixels` uint8 [T, 3, H, W] or `tokens` int64 [N], and `label` int; augmented by `rng` only,
        so without `rng` it is the plain sample that references and caches are made of."""

    def get_many(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Plain samples, stacked: `pixels` [B, T, 3, H, W] or `tokens` [B, N], and `label` [B] int64. Sources held in
        memory override it: it is the fast path of `encode` and of reference statistics."""
        samples = [self.get(int(i)) for i in indices]
        return {k: torch.stack([torch.as_tensor(s[k]) for s in samples]) for k in samples[0]}

    def fingerprint(self, indices: Sequence[int]) -> str:
        """Return a hash that changes where one of the plain samples does. This one is of their pixels; a source of
        files has one of their names, sizes and times instead, and reads none."""
        digest = hashlib.sha256()
        for start in range(0, len(indices), 256):
            digest.update(self.get_many(indices[start : start + 256])["pixels"].numpy().tobytes())
        return digest.hexdigest()[:16]

    def views(self, indices: Sequence[int], kind: Views, ranges: Sequence[float] = (1.1,)) -> dict[str, Tensor]:
        """Plain views of samples: `pixels` uint8 [B, V, T, 3, H, W] and `label` [B].

        `center`: V = 1. `flip`: the image and its mirror. `shift`: nine of each, moved by -1, 0 and 1 pixels in y and
        x with the edge repeated, the unmoved one first. `ten_crop`: for each r of `ranges`, ten crops of the image
        whose shorter side is int(H r): corners TL TR BL BR, centre, then their mirrors (LlamaGen; see `_images`).
        """
        if kind == "ten_crop":
            raise UserError(f"data '{kind_of(self.config)}' has no 'ten_crop' views; allowed: center, flip, shift")
        many = self.get_many(indices)
        return {"pixels": views_of(many["pixels"], kind), "label": many["label"]}


def views_of(pixels: Tensor, kind: Views) -> Tensor:
    """Views [B, V, T, 3, H, W] of images [B, T, 3, H, W]; other than ten crops."""
    pixels = pixels.unsqueeze(1)
    if kind != "center":
        pixels = torch.cat([pixels, pixels.flip(-1)], 1)
    if kind == "shift":
        pixels = torch.stack([_moved(pixels, y, x) for y, x in _MOVES], 2).flatten(1, 2)  # [B, 2 * 9, T, 3, H, W]
    return pixels


def _moved(pixels: Tensor, y: int, x: int) -> Tensor:
    """Images [..., H, W] moved down by y and right by x pixels; their edge is repeated."""
    for dim, move in ((-2, y), (-1, x)):
        size = pixels.shape[dim]
        pixels = pixels.index_select(dim, (torch.arange(size) - move).clamp(0, size - 1))
    return pixels


class Samples(torch.utils.data.Dataset):
    """A `Data` as a torch dataset addressed by `(index, epoch)`."""

    def __init__(self, data: Data, seed: int) -> None:
        self.data, self.seed = data, seed

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: tuple[int, int]) -> dict[str, Any]:
        index, epoch = key
        rng = np.random.default_rng((self.seed, epoch, index))
        return {**self.data.get(index, rng), "index": index}


def to_batch(samples: dict[str, Tensor], device: torch.device | str) -> Batch:
    """Moves collated samples to `device`; uint8 pixels travel as bytes and become float in [-1, 1] there."""
    moved: Any = {k: v.to(device, non_blocking=True) for k, v in samples.items()}
    for name in ("pixels", "map"):
        if name in moved and moved[name].dtype == torch.uint8:
            moved[name] = moved[name].float() / 127.5 - 1
    return moved
