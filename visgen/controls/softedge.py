"""Soft edges by HED (Xie & Tu, arXiv:1504.06375): VGG16 with an edge map from each block, and their learned mixture.

Weights: `python -m visgen.convert hed`. ControlAR's `hed` is another network (the mean of its side outputs), so models
are trained for one or the other: see `hed.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visgen.checks import Positive
from visgen.config import UserError
from visgen.controls._lines import Lines, LinesConfig
from visgen.nn.perceptual import CONVERT, HED_MEAN_BGR, VGG16, WIDTHS, read_weights


@dataclass(frozen=True)
class Config(LinesConfig):
    """Soft edges.

    Attributes:
        weights: file that `python -m visgen.convert hed` writes.
        enlarge: images are enlarged so many times before they are read. HED learned photographs of 320 x 480 px; of
            images of 64 px it sees only the coarsest edges.
    """

    weights: Path | None = None
    enlarge: Positive = 1


class SoftEdge(Lines):
    """Probability of an edge at each pixel."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.network: HED | None = None

    def ready(self) -> None:
        if self.network is not None:
            return
        path: Path | None = self.config.weights
        if path is None or not path.is_file():
            what = "needs weights" if path is None else f"weights {path} do not exist"
            raise UserError(f"control softedge: {what}; {CONVERT}, and pass its path as control.weights")
        self.network = HED()
        tensors = read_weights(path)
        try:
            self.network.load_state_dict(tensors)
        except RuntimeError as error:
            reason = " ".join(str(error).split())[:120]
            raise UserError(f"control softedge: {path} does not hold HED ({reason}); {CONVERT}") from None
        self.network.requires_grad_(False).eval()

    @torch.no_grad()
    def extract(self, pixels: Tensor) -> Tensor:
        assert self.network is not None, "ready comes first"
        network = self.network.to(pixels.device)
        images = pixels.flatten(0, 1).float()
        size, times = images.shape[-2:], self.config.enlarge
        with torch.autocast(pixels.device.type, enabled=False):
            if times > 1:
                images = F.interpolate(images, scale_factor=times, mode="bilinear", align_corners=False)
            lines = F.interpolate(network(images), size, mode="area") * 2 - 1  # [B T, 1, H, W]
        return self.polar(lines.unflatten(0, pixels.shape[:2])).to(pixels.dtype).expand_as(pixels)


class HED(VGG16):
    """[B, 3, H, W] in [-1, 1] -> edge probability [B, 1, H, W]."""

    def __init__(self) -> None:
        super().__init__(ceil_mode=True)
        self.side = nn.ModuleList(nn.Conv2d(widths[-1], 1, 1) for widths in WIDTHS)
        self.fuse = nn.Conv2d(len(WIDTHS), 1, 1)

    def forward(self, pixels: Tensor) -> Tensor:  # type: ignore[override]
        mean = pixels.new_tensor(HED_MEAN_BGR).view(1, 3, 1, 1)
        maps = super().forward((pixels.flip(1) + 1) * 127.5 - mean)
        size = pixels.shape[-2:]
        sides = [
            F.interpolate(side(features), size, mode="bilinear", align_corners=False)
            for side, features in zip(self.side, maps, strict=True)
        ]
        return self.fuse(torch.cat(sides, 1)).sigmoid()
