"""Known pixels of an image to be completed, and known first frames of a clip, from files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visgen.checks import Positive
from visgen.config import UserError
from visgen.data._clips import read_clip
from visgen.data._images import center_crop, read_picture, to_pixels

KEPT = 128  # the brightness from which a mask keeps a pixel
ELONGATED = 100  # a known picture of more than this ratio is refused: its square crop would show next to nothing


@dataclass(frozen=True)
class KnownConfig:
    """Known pixels: completion and inpainting.

    Attributes:
        image: a picture; decoded and centre-cropped to the checkpoint's size as training images are.
        mask: a picture of the same size, white and opaque where the image is kept, of which whole tokens count; None
            keeps the upper half.
        clip: a video or an animation whose first frames a model of clips goes on from.
        frames: how many of them.
        stride: every so many frames of the file are taken.
        paste: put the kept pixels into the image as they are. The tokens are kept in any case, but decoding changes
            their pixels; `--known.no-paste` leaves it so, and without a seam at the mask's edge.
    """

    image: Path | None = None
    mask: Path | None = None
    clip: Path | None = None
    frames: Positive = 1
    stride: Positive = 1
    paste: bool = True


def describe_known(known: KnownConfig) -> dict[str, Any]:
    """The files of the known pixels and what they held."""

    def file(path: Path) -> dict[str, str]:
        return {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:12]}

    if known.clip is not None:
        about: dict[str, Any] = {"clip": file(known.clip), "frames": known.frames, "stride": known.stride}
    elif known.image is not None:
        about = {"image": file(known.image), "mask": file(known.mask) if known.mask else "upper half"}
    else:
        return {}
    return {"known": {**about, "paste": known.paste}}


def known_clip(known: KnownConfig, size: int, frames: int, drawn: int | None = None) -> tuple[Tensor, Tensor] | None:
    """(pixels [1, T, 3, size, size] in [-1, 1], mask [1, T, size, size], all kept) of the known first frames.

    Args:
        size: side of the model's frames in pixels; frames: how many it was trained on.
        drawn: how many are drawn; None: as many.
    """
    if known.clip is None:
        for name in ("frames", "stride"):
            if getattr(known, name) != 1:
                raise UserError(
                    f"--known.{name} {getattr(known, name)} is of a clip; add --known.clip, or leave it out"
                )
        if known.image is not None and frames > 1:
            raise UserError("--known.image goes with a model of images, this checkpoint draws clips; use --known.clip")
        return None
    if known.image is not None:
        raise UserError("--known.image and --known.clip are both given; leave one of them out")
    if frames == 1:
        raise UserError("--known.clip goes with a model of clips, this checkpoint draws images; use --known.image")
    pixels = read_clip(known.clip, size, known.frames, known.stride)
    count, drawn = known.frames, drawn or frames
    if count >= drawn:
        raise UserError(
            f"--known.frames {count} leaves nothing to draw of {drawn} frames; lower it, or raise --sampler.frames"
        )
    mask = torch.ones(1, known.frames, size, size, dtype=torch.bool)
    return pixels.unsqueeze(0).float() / 127.5 - 1, mask


def read_known(known: KnownConfig) -> tuple[Image.Image, Image.Image | None] | None:
    """The known picture and its mask, decoded as training images are."""
    if known.image is None:
        if not (known.paste or known.clip):
            raise UserError("--known.paste is about known pixels: give --known.image or --known.clip, or leave it out")
        if known.mask is not None:
            raise UserError("--known.mask needs --known.image, the picture whose pixels it keeps")
        return None
    picture = _picture(known.image, "--known.image")
    if known.mask is None:
        return picture, None
    mask = _picture(known.mask, "--known.mask", background="black").convert("L")
    if mask.size != picture.size:
        raise UserError(
            f"--known.mask {known.mask} is {mask.width} x {mask.height} px, --known.image {known.image} is "
            f"{picture.width} x {picture.height}; give a mask of the picture's size"
        )
    brightest = int(np.asarray(mask).max())
    if brightest < KEPT:
        raise UserError(
            f"--known.mask {known.mask} keeps nothing: its brightest pixel is {brightest} of 255; paint what is kept "
            "white"
        )
    return picture, mask


def known_pixels(picture: Image.Image, mask: Image.Image | None, size: int) -> tuple[Tensor, Tensor]:
    """(pixels [1, 3, size, size] in [-1, 1], mask [1, size, size]), both by the centre crop of the training data."""
    pixels = to_pixels(center_crop(picture, size)).float() / 127.5 - 1
    if mask is None:
        return pixels, (torch.arange(size) < size // 2)[None, :, None].expand(1, size, size)
    return pixels, torch.from_numpy(np.array(center_crop(mask, size).convert("L")) >= KEPT).unsqueeze(0)


def _picture(path: Path, flag: str, background: str = "white") -> Image.Image:
    picture = read_picture(path, flag, background)
    if max(picture.size) > ELONGATED * min(picture.size):
        raise UserError(
            f"{flag} {path} is {picture.width} x {picture.height} px, of which the centre crop to a square shows next "
            "to nothing; crop it closer"
        )
    return picture
