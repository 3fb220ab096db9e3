"""Segmentation: a given map of labels, one colour per class.

A picture of colours is taken as it is. A picture of class numbers (8-bit grey, or a palette) is coloured by the colour
map of the Pascal VOC devkit, in which the bits of a number are dealt to red, green and blue in turn, highest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visgen.config import UserError
from visgen.controls import Control, ControlConfig
from visgen.data._images import UNREADABLE
from visgen.nn.control import Resize


@dataclass(frozen=True)
class Config(ControlConfig):
    """Label maps."""

    resize: Resize = "nearest"


class Seg(Control):
    """Colours of classes."""

    def ready(self) -> None:
        raise UserError("control seg has given maps only: pass a map of labels or of class colours as --control.map")

    def extract(self, pixels: Tensor) -> Tensor:
        self.ready()
        return pixels

    def read(self, path: Path, invert: bool = False, flag: str = "--control.map") -> Tensor:
        if invert:
            raise UserError("--control.invert has no meaning for a map of labels; leave it out")
        try:
            with Image.open(path) as picture:
                numbers = np.array(picture) if picture.mode in ("L", "P") else None
        except FileNotFoundError:
            raise UserError(f"{flag} {path} does not exist; pass the path of a map") from None
        except UNREADABLE as error:
            raise UserError(f"{flag} {path} is not a readable picture ({error}); save it as an 8-bit PNG") from None
        if numbers is None:
            return super().read(path, invert, flag)
        return colours()[torch.from_numpy(numbers.astype(np.int64))].permute(2, 0, 1).contiguous()


def colours() -> Tensor:
    """uint8 [256, 3]: bit 3 i + c of a number is bit 7 - i of channel c."""
    number = torch.arange(256)
    channels = [sum(((number >> (3 * i + c)) & 1) << (7 - i) for i in range(3)) for c in range(3)]
    return torch.stack([torch.as_tensor(c) for c in channels], -1).to(torch.uint8)
