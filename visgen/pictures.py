"""Images and clips on disk: one file each, a grid of the first of them, all carrying what made them."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from visgen.config import UserError
from visgen.data._clips import write_gif, write_mp4
from visgen.hints import Given
from visgen.images import Images
from visgen.metrics.images import to_uint8

GRID = 256  # images that `grid.png` shows at most
# of a single image: LABEL_SEED.png or PROMPT-HASH_SEED.png, with MAP-HASH before the seed where there is a control
NAME = r"(\d{4,}|[a-z0-9-]+-[0-9a-f]{8})(_[a-z0-9-]+-[0-9a-f]{8})?_\d{6,}\.(png|mp4)"


def save(images: Images, out: Path, settings: dict[str, Any], maps: Sequence[str] | None = None, fps: int = 8) -> None:
    """Writes each image as `LABEL_SEED.png`, or as `PROMPT-HASH_SEED.png`, with its map's name before the seed; each
    clip as MP4 and GIF of such a name."""
    settings = settings | ({"notes": images.notes} if images.notes else {})
    names = [f"_{name}" for name in maps] if maps else [""] * len(images.seeds)
    rows = zip(images.pil(), asked_of(images), images.seeds, images.nfe_per_image, names, strict=True)
    for i, (picture, asked, seed, nfe, name) in enumerate(rows):
        about = {**asked, "seed": seed, "nfe": nfe, **({"map": name[1:]} if name else {}), **settings}
        path = out / f"{stem(*asked.values())}{name}_{seed:06d}.png"
        if images.clips is None:
            save_png(picture, path, about)
        else:
            said = json.dumps(about, sort_keys=True)
            write_mp4(path.with_suffix(".mp4"), images.clips[i], fps, said)
            write_gif(path.with_suffix(".gif"), images.clips[i], fps, said)


def save_maps(given: Given, out: Path) -> None:
    """Writes each control map as `control_MAP-HASH.png`."""
    for name, values in zip(given.names, to_uint8(given.maps), strict=True):
        save_png(Image.fromarray(values.permute(1, 2, 0).numpy()), out / f"control_{name}.png", given.about)


def asked_of(images: Images) -> list[dict[str, Any]]:
    """{"label": id} or {"prompt": text} of every image."""
    return [{"prompt": p} for p in images.prompts] or [{"label": label} for label in images.labels]


def stem(asked: int | str) -> str:
    """The label; or the beginning of the prompt and a hash of it all, so that each prompt has names of its own."""
    if isinstance(asked, int):
        return f"{asked:04d}"
    words = re.sub(r"[^a-z0-9]+", "-", asked.lower())[:40].strip("-") or "prompt"
    return f"{words}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"


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

    def save(self, path: Path, settings: dict[str, Any]) -> None:
        count = len(self.pixels)
        columns = self.columns if min(self.rows, self.columns) > 1 else max(min(count, 8), math.isqrt(count))
        if self.maps:
            columns = self.columns + 1
        picture = Image.fromarray(grid(torch.stack(self.pixels), columns))
        asked = {f"{kind}s": [a[kind] for a in self.asked] for kind in self.asked[0]}
        save_png(picture, path, {**asked, "seeds": self.seeds, **settings})


def save_png(picture: Image.Image, path: Path, settings: dict[str, Any]) -> None:
    """A PNG that carries its settings as text (key `visgen`, JSON)."""
    info = PngInfo()
    info.add_text("visgen", json.dumps(settings, sort_keys=True))
    temporary = path.with_name(f".{path.name}.tmp")  # so that a failed write leaves an older picture whole
    try:
        picture.save(temporary, format="PNG", pnginfo=info)
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path} cannot be written: {error.strerror}; make room, what is there already stays") from None


def grid(pixels: Tensor, columns: int, gap: int = 2) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [B, 3, H, W] -> one picture [h, w, 3], white gaps; small images are enlarged to about 128 px."""
    factor = max(1, 128 // pixels.shape[-1])
    pixels = pixels.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    from torchvision.utils import make_grid

    return make_grid(pixels, nrow=columns, padding=gap * factor, pad_value=255).permute(1, 2, 0).contiguous().numpy()


def strips(clips: Tensor, shown: int = 8) -> Tensor:
    """uint8 [B, T, 3, H, W] -> [B, 3, H, n W]: at most `shown` frames of each clip, evenly spaced, side by side."""
    count = min(shown, clips.shape[1])
    return torch.cat([clips[:, i * clips.shape[1] // count] for i in range(count)], -1)
