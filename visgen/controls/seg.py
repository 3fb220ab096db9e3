"""Segmentation: one colour per class; a given map, or the labels of a segmentation network of transformers.

A picture of colours is taken as it is. A picture of class numbers (grey of any depth, or a palette) is coloured by the
colour map of the Pascal VOC devkit, in which the bits of a number are dealt to red, green and blue in turn, highest
first. Transparent parts of a grey picture are class 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from visgen.config import UserError
from visgen.controls import ControlConfig
from visgen.controls._network import NetworkControl
from visgen.data._images import open_picture
from visgen.image_files import decoding, opened
from visgen.nn.control import Resize


@dataclass(frozen=True)
class Config(ControlConfig):
    """Label maps.

    Attributes:
        network: directory or Hub id of a semantic segmentation network of transformers, for maps that are not given.
    """

    resize: Resize = "nearest"
    network: str = ""


class Seg(NetworkControl):
    """Colours of classes."""

    auto = "AutoModelForSemanticSegmentation"
    needs = (
        "a segmentation network to read an image: pass --control.network, a directory or Hub id of transformers, or a "
        "map of labels or class colours"
    )

    @torch.no_grad()
    def labels(self, pixels: Tensor) -> Tensor:
        """Images [B, T, 3, H, W] in [-1, 1] -> class numbers [B, T, H, W] int64."""
        logits = self.outputs(pixels).logits.float()
        logits = F.interpolate(logits, pixels.shape[-2:], mode="bilinear", align_corners=False)
        return logits.argmax(1).unflatten(0, pixels.shape[:2])

    def extract(self, pixels: Tensor) -> Tensor:
        shown = colours().to(pixels.device)[self.labels(pixels)]  # [B, T, H, W, 3]
        return shown.permute(0, 1, 4, 2, 3).to(pixels.dtype) / 127.5 - 1

    def read(self, path: Path, invert: bool = False, flag: str = "--control.map") -> Tensor:
        if invert:
            raise UserError("--control.invert has no meaning for a map of labels; leave it out")
        numbers = class_numbers(open_picture(path, flag, "map"))
        if numbers is None:
            return super().read(path, invert, flag)
        factor = stretch(path)
        numbers = np.round(numbers / factor) if factor > 1 else numbers
        known = (numbers >= 0) & (numbers <= 255) & (numbers == np.round(numbers))  # false for NaN
        if not known.all():
            raise UserError(f"{flag} {path} holds {numbers[~known][0]}, which is no class number; allowed: 0 to 255")
        return colours()[torch.from_numpy(numbers.astype(np.int64))].permute(2, 0, 1).contiguous()


def class_numbers(picture: Image.Image) -> np.ndarray | None:
    """The values [H, W] of a picture of class numbers; None for a picture of colours."""
    if picture.mode in ("LA", "La", "PA"):
        return np.where(np.asarray(picture.getchannel(1)) > 127, np.asarray(picture.getchannel(0)), 0)
    return np.asarray(picture) if picture.mode in ("1", "L", "P", "F") or picture.mode[0] == "I" else None


def stretch(path: Path) -> float:
    """By what Pillow multiplies grey values that fill less than the range of its mode: those of 2 or 4 bits, and those
    of a PGM whose header names a largest value."""
    with decoding(path), opened(path) as picture:
        parts = picture.tile[0].args if picture.tile else ""
        parts = parts if isinstance(parts, tuple) else (parts,)
        if picture.format == "PPM" and len(parts) == 2 and isinstance(parts[1], int):
            return (255 if picture.mode == "L" else 65535) / parts[1]
        return {"L;2": 85.0, "L;4": 17.0}.get(str(parts[0])[:3], 1.0)


def colours() -> Tensor:
    """uint8 [256, 3]: bit 3 i + c of a number is bit 7 - i of channel c."""
    number = torch.arange(256)
    channels = [sum(((number >> (3 * i + c)) & 1) << (7 - i) for i in range(3)) for c in range(3)]
    return torch.stack([torch.as_tensor(c) for c in channels], -1).to(torch.uint8)
