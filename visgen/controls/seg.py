"""Segmentation: one colour per class; a given map, or the labels of a segmentation network of transformers.

A picture of colours is taken as it is. A picture of class numbers (8-bit grey, or a palette) is coloured by the colour
map of the Pascal VOC devkit, in which the bits of a number are dealt to red, green and blue in turn, highest first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from visgen.config import UserError
from visgen.controls import Control, ControlConfig
from visgen.controls._network import load_network
from visgen.data._images import UNREADABLE
from visgen.metrics.images import to_uint8
from visgen.nn.control import Resize


@dataclass(frozen=True)
class Config(ControlConfig):
    """Label maps.

    Attributes:
        network: directory or Hub id of a semantic segmentation network of transformers, for maps that are not given.
    """

    resize: Resize = "nearest"
    network: str = ""


class Seg(Control):
    """Colours of classes."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._loaded: tuple[Any, Any] | None = None  # (processor, network)

    def ready(self) -> None:
        if self._loaded is not None:
            return
        if not self.config.network:
            raise UserError(
                "control seg needs a segmentation network to read an image: pass --control.network, a directory or Hub "
                "id of transformers, or a map of labels or class colours as --control.map"
            )
        self._loaded = load_network("seg", "AutoModelForSemanticSegmentation", self.config.network)

    @torch.no_grad()
    def labels(self, pixels: Tensor) -> Tensor:
        """Images [B, T, 3, H, W] in [-1, 1] -> class numbers [B, T, H, W] int64."""
        assert self._loaded is not None, "ready comes first"
        processor, network = self._loaded
        network.to(pixels.device)
        images = list(to_uint8(pixels.flatten(0, 1)).permute(0, 2, 3, 1).cpu().numpy())
        logits = network(**processor(images=images, return_tensors="pt").to(pixels.device)).logits.float()
        logits = F.interpolate(logits, pixels.shape[-2:], mode="bilinear", align_corners=False)
        return logits.argmax(1).unflatten(0, pixels.shape[:2])

    def extract(self, pixels: Tensor) -> Tensor:
        shown = colours().to(pixels.device)[self.labels(pixels)]  # [B, T, H, W, 3]
        return shown.permute(0, 1, 4, 2, 3).to(pixels.dtype) / 127.5 - 1

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
