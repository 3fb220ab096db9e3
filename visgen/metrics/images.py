"""From model output to scored image: the one denormalise function, and what is checked on every scored image.

Everything that shows, saves or scores an image goes through `to_uint8`. Its two traps are measured facts: without the
clamp a cast to uint8 wraps, and `127.5 x + 128` evaluated in bfloat16 gets 63 of the 256 levels wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from visgen.config import UserError

AllReduce = Callable[[Tensor], Tensor]
QUANTISE = "floor(127.5x+128)"  # the name that a protocol records for `to_uint8`


def to_uint8(pixels: Tensor) -> Tensor:
    """Pixels in [-1, 1], any shape and float type, to uint8 of that shape: `floor(127.5 x + 128)`, clamped.

    Exact on all 256 levels of `u / 127.5 - 1`, a bfloat16 input included, because the arithmetic is float32.
    A uint8 input is returned as it is.
    """
    if pixels.dtype == torch.uint8:
        return pixels
    return (pixels.float() * 127.5 + 128).floor().clamp(0, 255).to(torch.uint8)


def as_frames(images: Tensor) -> Tensor:
    """`[B, 3, H, W]` or `[B, T, 3, H, W]` to `[B * T, 3, H, W]`, the shape that every metric works on."""
    if images.ndim not in (4, 5) or images.shape[-3] != 3:
        shape = tuple(images.shape)
        raise UserError(f"images have shape {shape}; expected [B, 3, H, W] or [B, T, 3, H, W], grey repeated to RGB")
    return images.flatten(0, -4)


def require_finite(values: Tensor, index: Tensor | None = None, what: str = "features") -> None:
    """Refuse values [B, ...] of images `index` [B] that are not finite: any score of them would be meaningless.

    Args:
        index: numbers of the images; default their places.
        what: what the values are, in the plural.

    Raises:
        UserError: naming the first such image.
    """
    bad = ~torch.isfinite(values).flatten(1).all(1).cpu()  # syncs: a silent NaN would void the whole run
    if bad.any():
        first = int(bad.nonzero()[0]) if index is None else int(index.cpu()[bad][0])
        raise UserError(
            f"{what} of image {first} are not finite; look at that image, at the model's output and at the weights"
        )


class ImageAudit:
    """Checks over a set of `n` images: all present and finite, unclipped, no two alike; and the set's content hash.

    The hash depends on the bytes and their order only, not on the device or batch size, so it can name a reference.
    """

    def __init__(self, n: int) -> None:
        self.n = n
        self.seen = torch.zeros(n, dtype=torch.int64)  # [n] how often an index came
        self.keys = torch.zeros(n, dtype=torch.int64)  # [n] 64-bit hash of the bytes
        self.counts = torch.zeros(2, dtype=torch.int64)  # values: outside [-1, 1], all

    def update(self, pixels: Tensor, index: Tensor) -> Tensor:
        """Take `pixels` [B, ...] (uint8, or float in [-1, 1]) of images `index` [B]; return them as uint8.

        Raises:
            UserError: a pixel is not finite.
        """
        index = index.cpu()
        if pixels.dtype != torch.uint8:
            require_finite(pixels, index, "pixels")
            self.counts[0] += (pixels.abs() > 1).sum().cpu()  # syncs: the bytes below come to the host
        self.counts[1] += pixels.numel()
        images = to_uint8(pixels)
        rows = images.flatten(1).cpu().numpy()
        keys = [int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "little") for row in rows]
        self.seen.index_add_(0, index, torch.ones_like(index))
        self.keys[index] = torch.from_numpy(np.array(keys, dtype=np.uint64).view(np.int64).copy())
        return images

    def reduce(self, all_reduce: AllReduce) -> None:
        """Adds the other processes' shares; each index must belong to one process."""
        self.seen, self.keys, self.counts = (all_reduce(t) for t in (self.seen, self.keys, self.counts))

    def require_complete(self) -> None:
        """Raises unless every image was seen exactly once."""
        require_once(self.seen, "image")

    @property
    def hash(self) -> str:
        """16 hex digits of the SHA-256 over the images' hashes in index order."""
        return hashlib.sha256(self.keys.numpy().astype("<i8").tobytes()).hexdigest()[:16]

    def checks(self) -> dict[str, float]:
        """The `checks` block of a report: number of images, of unique images, clipped share."""
        self.require_complete()
        clipped, total = self.counts.tolist()
        unique = int(torch.unique(self.keys).numel())
        return {"images": self.n, "unique_images": unique, "clipped_fraction": clipped / max(total, 1)}


def require_once(seen: Tensor, what: str) -> None:
    """Raises `UserError` naming the first index of `seen` [n] that is not 1."""
    wrong = (seen != 1).nonzero().flatten()
    if wrong.numel():
        first = int(wrong[0])
        raise UserError(
            f"{wrong.numel()} of {seen.numel()} {what}s did not come exactly once, the first is {what} {first} "
            f"({int(seen[first])} times); score each index of the plan once, over all processes"
        )
