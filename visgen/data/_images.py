"""Pictures to uint8 pixels: the crops of ADM and LlamaGen, ten-crop views, and the pictures that a user gives.

Sources: ADM's centre crop (Dhariwal & Nichol 2021, arXiv:2105.05233, released code): BOX halvings while the shorter
side is at least twice the target, then BICUBIC, then the crop. LlamaGen (Sun et al. 2024, arXiv:2406.06525) adds the
random crop for tokenizers and the ten crops for cached codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from visgen.config import UserError
from visgen.image_files import Unreadable, open_image, read_image

SMALLEST_CROP = 0.8  # of LlamaGen's random crop: its share of the shorter side


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
    image = resize_adm(image, int(rng.integers(size, math.ceil(size / SMALLEST_CROP), endpoint=True)), exact)
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


def read_picture(path: Path, flag: str, background: str = "white", what: str = "picture") -> Image.Image:
    """Decode a user's file to RGB; see `open_picture`."""
    with _given(path, flag, what):
        return read_image(path, background)


def open_picture(path: Path, flag: str, what: str = "picture") -> Image.Image:
    """Decode a user's file in its own mode.

    Args:
        flag: the option that names it.
        what: what it shows.

    Raises:
        UserError: it is missing or unreadable; names the flag.
    """
    with _given(path, flag, what):
        return open_image(path)


@contextmanager
def _given(path: Path, flag: str, what: str) -> Iterator[None]:
    if not path.exists():
        raise UserError(f"{flag} {path} does not exist; pass the path of a {what}")
    try:
        yield
    except Unreadable as error:
        raise UserError(
            f"{flag} {path} is not a readable picture ({error.reason}); save it as an 8-bit PNG of usual size, or pass "
            "another"
        ) from None
