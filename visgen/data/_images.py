"""Image files to uint8 pixels: finding them, decoding to RGB, the crops of ADM and LlamaGen, ten-crop views.

Sources: ADM's centre crop (Dhariwal & Nichol 2021, arXiv:2105.05233, released code): BOX halvings while the shorter
side is at least twice the target, then BICUBIC, then the crop. LlamaGen (Sun et al. 2024, arXiv:2406.06525) adds the
random crop for tokenizers and the ten crops for cached codes.
"""

from __future__ import annotations

import logging
import math
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from visgen.config import UserError

log = logging.getLogger(__name__)

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif"}
)

# What Pillow raises for a file that it cannot read: missing, empty, truncated, damaged, or absurdly large.
UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, IndexError, struct.error, Image.DecompressionBombError)


def read_image(file: Path | BytesIO, background: str = "white") -> Image.Image:
    """Decodes an image to RGB, the first of an animation; raises one of `UNREADABLE`."""
    with Image.open(file) as image:
        image.load()
        return to_rgb(image, background)


def to_rgb(image: Image.Image, background: str = "white") -> Image.Image:
    """Any Pillow mode to RGB: EXIF orientation applied, alpha composited on `background`, 16 bits rounded to 8. May
    turn the image that it is given, and may return it."""
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "F":
        raise ValueError("its pixels are floats, whose range is not known; convert it to 8 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("its grey values exceed 16 bits; convert it to 8 bits")
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))  # 65535 = 255 * 257
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, background), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def resize_adm(image: Image.Image, size: int, exact: bool = False) -> Image.Image:
    """Resizes the shorter side to `size` as ADM does: BOX halvings, then one BICUBIC step.

    Args:
        exact: keep the pixels' values, as maps of edges and labels need: one NEAREST step to the same size.
    """
    if exact:
        like = resize_adm(Image.new("1", image.size), size)  # the halvings round, so the size is theirs to say
        return image.resize(like.size, Image.Resampling.NEAREST)
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    return image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)


def center_crop(image: Image.Image, size: int, exact: bool = False) -> Image.Image:
    """ADM's centre crop to `size` x `size`; `exact` as in `resize_adm`."""
    image = resize_adm(image, size, exact)
    return _crop(image, (image.width - size) // 2, (image.height - size) // 2, size)


def random_crop(image: Image.Image, size: int, rng: np.random.Generator, exact: bool = False) -> Image.Image:
    """LlamaGen's random crop: the shorter side drawn in [size, ceil(size / 0.8)], then a uniform position; `exact` as
    in `resize_adm`."""
    image = resize_adm(image, int(rng.integers(size, math.ceil(size / 0.8), endpoint=True)), exact)
    left = int(rng.integers(0, image.width - size, endpoint=True))
    top = int(rng.integers(0, image.height - size, endpoint=True))
    return _crop(image, left, top, size)


def ten_crop(image: Image.Image, size: int, crop_range: float) -> list[Image.Image]:
    """LlamaGen's ten views: TL TR BL BR centre of the centre square of side int(size * crop_range), and of its mirror.

    As in torchvision's TenCrop the second five are crops of the mirrored square, so number 5 is the mirror of TR.
    """
    if crop_range < 1:
        raise UserError(f"crop range {crop_range} must be at least 1: the crop would be larger than the image")
    square = center_crop(image, int(size * crop_range))
    end = square.width - size
    middle = round(end / 2)
    corners = [(0, 0), (end, 0), (0, end), (end, end), (middle, middle)]
    both = [square, ImageOps.mirror(square)]
    return [_crop(side, left, top, size) for side in both for left, top in corners]


def to_pixels(image: Image.Image) -> Tensor:
    """RGB image -> uint8 [1, 3, H, W]."""
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1)[None].copy())


def stack_pixels(images: Sequence[Image.Image]) -> Tensor:
    """V RGB images of one size -> uint8 [V, 1, 3, H, W]."""
    return torch.stack([to_pixels(image) for image in images])


def _crop(image: Image.Image, left: int, top: int, size: int) -> Image.Image:
    return image.crop((left, top, left + size, top + size))


def read_picture(path: Path, flag: str, background: str = "white") -> Image.Image:
    """`read_image` of a user's file; raises `UserError` as `readable` does."""
    with readable(path, flag):
        return read_image(path, background)


@contextmanager
def readable(path: Path, flag: str, what: str = "picture") -> Iterator[None]:
    """While a user's file is opened as a picture, which shows a `what`.

    Raises:
        UserError: none such, or unreadable; names the flag that asked for it.
    """
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{flag} {path} does not exist; pass the path of a {what}") from None
    except UNREADABLE as error:
        raise UserError(
            f"{flag} {path} is not a readable picture ({error}); save it as an 8-bit PNG of usual size, or pass another"
        ) from None


def walk_links(folder: Path) -> Iterator[tuple[bytes, list[bytes]]]:
    """Every folder below, with its files; hidden folders are left out, links are followed, but not to a folder that
    they lie in, which would never end."""
    top = os.fsencode(folder)
    above = {top: [os.path.realpath(top)]}  # of each folder on the way, the true paths of it and of those above it
    for where, folders, files in os.walk(top, onerror=refuse, followlinks=True):
        known, kept = above.pop(where), []
        for name in folders:
            path = os.path.join(where, name)
            true = os.path.realpath(path)
            if name.startswith(b"."):
                continue
            if any(os.path.commonpath([true, outer]) == true for outer in known):
                _tell(os.fsdecode(path))
                continue
            above[path] = [*known, true]
            kept.append(name)
        folders[:] = kept
        yield where, files


@cache
def _tell(path: str) -> None:
    """Said once, though each split walks."""
    log.warning("%s is a link to a folder that it lies in; it is left out", path)


def refuse(error: OSError) -> None:
    """Of a folder that cannot be listed."""
    where = os.fsdecode(error.filename)
    raise UserError(f"folder {where} cannot be read ({error.strerror}); check its permissions") from None
