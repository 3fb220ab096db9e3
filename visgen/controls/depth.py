"""Depth: a ready map, or that of a depth network of transformers that lies on this machine.

The network's output is inverse depth, large where near. `max` divides by the largest value (ControlAR's text-to-image
models with DPT-large), `minmax` also takes the smallest off (its class models with DPT-hybrid).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from visgen.config import UserError
from visgen.controls import ControlConfig
from visgen.controls._network import NetworkControl
from visgen.data._images import open_picture
from visgen.image_files import Unreadable, decoding

GREY = ("I;16", "I;16B", "I", "F")  # Pillow's modes of deep grey pictures


@dataclass(frozen=True)
class Config(ControlConfig):
    """Depth.

    Attributes:
        norm: how depths become brightness.
        network: directory or Hub id of a depth network of transformers, for maps that are not given.
    """

    norm: Literal["max", "minmax"] = "minmax"
    network: str = ""


class Depth(NetworkControl):
    """Near is bright."""

    auto = "AutoModelForDepthEstimation"
    needs = (
        "a depth network to read an image: pass --control.network, a directory or Hub id of transformers such as "
        "Intel/dpt-large, or a ready map (8- or 16-bit PNG, .npy)"
    )

    @torch.no_grad()
    def extract(self, pixels: Tensor) -> Tensor:
        depth = self.outputs(pixels).predicted_depth.float().unsqueeze(1)  # [B T, 1, h, w]
        depth = F.interpolate(depth, pixels.shape[-2:], mode="bicubic", align_corners=False)
        grey = self.normalised(depth) * 2 - 1
        return grey.unflatten(0, pixels.shape[:2]).to(pixels.dtype).expand_as(pixels)

    def normalised(self, depth: Tensor) -> Tensor:
        """Depths [B, 1, H, W] -> [0, 1]; a constant map becomes 0."""
        low = (
            depth.amin((2, 3), keepdim=True) if self.config.norm == "minmax" else torch.zeros_like(depth[:, :, :1, :1])
        )
        span = depth.amax((2, 3), keepdim=True) - low
        return ((depth - low) / span.clamp(min=1e-12)).clamp(0, 1) * (span > 0)

    def read(self, path: Path, invert: bool = False, flag: str = "--control.map") -> Tensor:
        values: np.ndarray | None
        if path.suffix.lower() == ".npy":
            values = self._array(path, flag)
        else:
            picture = open_picture(path, flag, "map")
            values = np.asarray(picture).astype(np.float64) if picture.mode in GREY else None
            if values is None:
                return super().read(path, invert, flag)
        with np.errstate(over="ignore"):
            finite = np.isfinite(values.astype(np.float32)).all()
        if not values.size or not finite:
            raise UserError(f"{flag} {path} holds {values.dtype} {list(values.shape)}; give finite depths [H, W]")
        depth = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float64))[None, None]
        grey = self.normalised(depth)[0]
        return ((1 - grey if invert else grey) * 255).round().to(torch.uint8).expand(3, -1, -1).contiguous()

    def checked(self, values: Tensor, name: str) -> Tensor:
        if (values.amax(0).int() - values.amin(0).int()).float().mean() > 12:
            raise UserError(f"{name} is a colour picture, a depth map is grey; pass a photo as --control.image")
        return values

    def _array(self, path: Path, flag: str) -> np.ndarray:
        if not path.is_file():
            raise UserError(f"{flag} {path} is no file; pass the path of a map")
        try:
            with decoding(path):
                values = np.load(path, allow_pickle=False)
        except Unreadable as error:
            raise UserError(f"{flag} {path} cannot be read ({error.reason}); write it again with numpy.save") from None
        values = np.squeeze(values)
        if values.ndim != 2 or values.dtype.kind not in "fiu":
            raise UserError(f"{flag} {path} holds {values.dtype} {list(values.shape)}; give finite depths [H, W]")
        return values
