"""What lies beside the images of a call: a grid of the first of them, and their control maps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from visgen.hints import Given
from visgen.images import Images, asked_of, grid, save_png
from visgen.metrics.images import to_uint8

GRID = 256  # images that `grid.png` shows at most


def save_maps(given: Given, out: Path) -> None:
    """Write each control map as `control_MAP-HASH.png`."""
    for name, values, file in zip(given.names, to_uint8(given.maps), given.about["files"], strict=True):
        pixels = values.permute(1, 2, 0).contiguous().numpy()
        about = {**given.about, "files": [file], "pixels": hashlib.sha256(pixels).hexdigest()[:12]}
        about = {k: about[k] for k in ("kind", "given", "files", "pixels")}  # what does not depend on the images
        save_png(Image.fromarray(pixels), out / f"control_{name}.png", about)


class Sheet:
    """`grid.png`: the first images of each label or prompt, at most `GRID` in all; a row for each if there are several.

    Args:
        rows, num: how many labels or prompts are drawn, and images of each, in this order.
        maps: uint8 [3, H, W], what begins each row; or none.
    """

    def __init__(self, rows: int, num: int, maps: Sequence[Tensor] = ()) -> None:
        self.num, self.seen, self.maps = num, 0, maps
        self.rows, self.columns = min(rows, GRID), min(num, max(1, GRID // rows))
        self.pixels: list[Tensor] = []
        self.asked: list[dict[str, Any]] = []
        self.seeds: list[int] = []

    def add(self, images: Images) -> None:
        """Takes what it shows of the next images."""
        shown = images.pixels if images.clips is None else strips(images.clips)
        for pixels, asked, seed in zip(shown, asked_of(images), images.seeds, strict=True):
            row, column = divmod(self.seen, self.num)
            if row < self.rows and column < self.columns:
                if self.maps and column == 0:
                    self.pixels.append(self.maps[row])
                self.pixels.append(pixels.clone())  # a view would keep its whole batch
                self.asked.append(asked)
                self.seeds.append(seed)
            self.seen += 1

    def save(self, path: Path, settings: dict[str, Any]) -> Path:
        """Write the sheet and return its path; see `images.place`."""
        count = len(self.pixels)
        columns = self.columns if min(self.rows, self.columns) > 1 else max(min(count, 8), math.isqrt(count))
        if self.maps:
            columns = self.columns + 1
        picture = Image.fromarray(grid(torch.stack(self.pixels), columns))
        asked = {f"{kind}s": [a[kind] for a in self.asked] for kind in self.asked[0]}
        return save_png(picture, path, {**asked, "seeds": self.seeds, **settings})


def strips(clips: Tensor, shown: int = 8) -> Tensor:
    """uint8 [B, T, 3, H, W] -> [B, 3, H, n W]: at most `shown` frames of each clip, evenly spaced, side by side."""
    count = min(shown, clips.shape[1])
    return torch.cat([clips[:, i * clips.shape[1] // count] for i in range(count)], -1)
