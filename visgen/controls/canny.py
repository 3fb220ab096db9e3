"""Canny edges (Canny 1986) by OpenCV, of the colour image: each pixel's gradient is the largest of its channels'.

The thresholds are ControlAR's (arXiv:2410.02705), on uint8 pixels without blurring.
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
import torch
from torch import Tensor

from visgen.checks import Natural
from visgen.config import UserError
from visgen.controls._lines import Lines, LinesConfig
from visgen.metrics.images import to_uint8
from visgen.nn.control import Resize

cv2.setNumThreads(1)  # the processes that read data are parallel already

FAINT = 32  # contrast up to which a map counts as blank, noise of a JPEG aside
GREY = 0.25  # share of pixels that are neither edge nor background, above which a given picture is no edge map


@dataclass(frozen=True)
class Config(LinesConfig):
    """Canny edges.

    Attributes:
        low, high: thresholds of the gradient, in levels of 255: edges begin above `high` and go on above `low`.
    """

    resize: Resize = "nearest"
    low: Natural = 100
    high: Natural = 200


class Canny(Lines):
    """Edges of one pixel, full or nothing."""

    in_worker = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        if config.low > config.high:
            raise UserError(f"control.low {config.low} must be at most control.high {config.high}")

    def extract(self, pixels: Tensor) -> Tensor:
        images = to_uint8(pixels).flatten(0, 1).permute(0, 2, 3, 1).contiguous().cpu().numpy()  # OpenCV is CPU code
        edges = np.stack([cv2.Canny(image, self.config.low, self.config.high) for image in images])
        lines = torch.from_numpy(edges).to(pixels.device).to(pixels.dtype) / 127.5 - 1
        return self.polar(lines.unflatten(0, pixels.shape[:2]).unsqueeze(2)).expand_as(pixels)

    def checked(self, values: Tensor, name: str) -> Tensor:
        values = super().checked(values, name)
        between = ((values > 32) & (values < 223)).float().mean()
        if between > GREY:
            raise UserError(
                f"{name} is mostly grey ({between:.0%} of its pixels), an edge map is black and white; to have the map "
                "made from it, pass it as --control.image"
            )
        light = self.config.polarity == "light_on_dark"
        strongest = int(values.max()) if light else 255 - int(values.min())
        if FAINT < strongest <= 127:
            raise UserError(
                f"{name} has faint lines alone, at most {strongest} of 255 from their background; an edge map is black "
                "and white, so none would be left: raise its contrast"
            )
        return torch.where(values > 127, 255, 0).to(torch.uint8)
