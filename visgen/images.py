"""Drawn images, and how they are written: a file carries what made it, and replaces none that was made otherwise."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from visgen.data._clips import REMEDY, comment_of, write_gif, write_mp4
from visgen.files import locked, publishing
from visgen.launch import writable
from visgen.metrics.images import to_uint8

# of a single image: LABEL_SEED.png or PROMPT-HASH_SEED.png, with MAP-HASH before the seed where there is a control, and
# a hash of the settings where an image of other settings had this name
NAME = r"(\d{4,}|[a-z0-9-]+-[0-9a-f]{8})(_[a-z0-9-]+-[0-9a-f]{8})?_\d{6,}(-[0-9a-f]{6})?\.(png|mp4)"
OUTCOMES = ("checkpoint", "nfe", "notes")  # may differ between equal images: a path, and what was counted


@dataclass(repr=False)
class Images:
    """A batch of drawn images.

    Attributes:
        pixels: uint8 [B, 3, H, W] on the CPU; of clips, the first frames.
        tokens: [B, N], or [B, N, C], on the CPU.
        labels: of every image, none where they were drawn from prompts.
        seeds: of every image.
        nfe: backbone evaluations of the batch.
        seconds: wall time of decoding tokens and pixels.
        prompts: of every image, none where they were drawn from labels.
        rounds: [B, N] on the CPU, the evaluation, from 1, that fixed each token; an image's largest is its own NFE.
        notes: what the sampler chose automatically or counted; see `pooled`.
        clips: uint8 [B, T, 3, H, W] on the CPU, of a model of clips.
        settings: what made them, for `save`.
    """

    pixels: Tensor
    tokens: Tensor
    labels: list[int]
    seeds: list[int]
    nfe: int
    seconds: float
    rounds: Tensor
    notes: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    clips: Tensor | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Return one short line: how many, their size, what was asked for."""
        shape = self.pixels.shape if self.clips is None else self.clips.shape
        kind = "images" if self.clips is None else f"clips of {shape[1]} frames"
        asked = f"prompts {_some(self.prompts)}" if self.prompts else f"labels {_some(self.labels)}"
        return f"<{shape[0]} {kind}, {shape[-1]} x {shape[-2]} px, {asked}, seeds {_some(self.seeds)}>"

    def _repr_png_(self) -> bytes:
        """Return the images side by side, as a notebook shows them."""
        data = io.BytesIO()
        Image.fromarray(grid(self.pixels, max(min(len(self.pixels), 8), math.isqrt(len(self.pixels))))).save(
            data, "PNG"
        )
        return data.getvalue()

    def save(self, out: str | Path, fps: int = 8) -> list[Path]:
        """Write each image into the directory `out`, as `sample.py` does, and return the files' paths; see `save`."""
        return save(self, writable(Path(out), "out"), self.settings, fps=fps)

    def paste(self, pixels: Tensor, mask: Tensor) -> None:
        """Put known pixels, in [-1, 1], where `mask` is true; for the shapes see `Generator.sample`."""
        known, mask = to_uint8(pixels).cpu(), mask.bool().cpu()
        if self.clips is None:
            self.pixels = torch.where(mask.unsqueeze(-3), known, self.pixels)
            return
        begun = self.clips[:, : known.shape[1]]
        begun.copy_(torch.where(mask.unsqueeze(-3), known, begun))
        self.pixels = self.clips[:, 0]

    @property
    def nfe_per_image(self) -> list[int]:
        """Evaluations after which each image was complete."""
        return self.rounds.amax(1).tolist()

    def pil(self) -> list[Image.Image]:
        """The images as PIL images."""
        return [Image.fromarray(p) for p in self.pixels.permute(0, 2, 3, 1).contiguous().numpy()]

    @classmethod
    def joined(cls, parts: Sequence[Images], labels: list[int], seeds: list[int], prompts: list[str]) -> Self:
        """Batches as one."""
        clips = [p.clips for p in parts if p.clips is not None]
        return cls(
            torch.cat([p.pixels for p in parts]),
            torch.cat([p.tokens for p in parts]),
            labels,
            seeds,
            sum(p.nfe for p in parts),
            sum(p.seconds for p in parts),
            torch.cat([p.rounds for p in parts]),
            pooled([(p.notes, len(p.seeds)) for p in parts]),
            prompts,
            torch.cat(clips) if clips else None,
        )


def _some(values: Sequence[Any]) -> str:
    shown = [repr(v) if isinstance(v, str) else str(v) for v in values[:4]]
    return ", ".join(shown) + (f", ... {values[-1]!r}" if len(values) > 4 else "")


COUNTS = ("head_steps", "teacher_evaluations")  # of a batch


def pooled(notes: Sequence[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """Notes of several batches, each with its number of images, as one: counts add up, of other numbers that differ the
    mean over images, of all else the last."""
    found = dict(notes[-1][0])
    for name, last in found.items():
        values, images = zip(*((n[name], count) for n, count in notes if name in n), strict=True)
        if name in COUNTS:
            found[name] = sum(values)
        elif isinstance(last, int | float) and len(set(values)) > 1:
            found[name] = round(sum(v * n for v, n in zip(values, images, strict=True)) / sum(images), 4)
    return found


# ---------------------------------------------------------------------------------------------------------- on disk


def save(
    images: Images, out: Path, settings: dict[str, Any], maps: Sequence[str] | None = None, fps: int = 8
) -> list[Path]:
    """Write each image as `LABEL_SEED.png` or `PROMPT-HASH_SEED.png`, with its map's name before the seed, and return
    the paths. A clip is an MP4 and a GIF of such a name.

    An image of other settings that has this name stays: the new one's name then ends in a hash of its settings.
    """
    settings = settings | ({"notes": images.notes} if images.notes else {})
    names = [f"_{name}" for name in maps] if maps else [""] * len(images.seeds)
    rows = zip(images.pil(), asked_of(images), images.seeds, images.nfe_per_image, names, strict=True)
    written = []
    for i, (picture, asked, seed, nfe, name) in enumerate(rows):
        about = {**asked, "seed": seed, "nfe": nfe, **({"map": name[1:]} if name else {}), **settings}
        path = out / f"{stem(*asked.values())}{name}_{seed:06d}.png"
        if images.clips is None:
            written.append(save_png(picture, path, about, settings))
            continue
        with locked(out):
            path, said = place(path.with_suffix(".mp4"), about, settings, ".gif"), _json(about)
            write_mp4(path, images.clips[i], fps, said)
            write_gif(path.with_suffix(".gif"), images.clips[i], fps, said)
        written.append(path)
    return written


def save_png(picture: Image.Image, path: Path, about: dict[str, Any], settings: dict[str, Any] | None = None) -> Path:
    """Write a PNG that carries `about` as text (key `visgen`, JSON), and return its path; see `place`."""
    info = PngInfo()
    info.add_text("visgen", _json(about))
    with locked(path.parent):
        path = place(path, about, about if settings is None else settings)
        with publishing(path, REMEDY) as unfinished:
            picture.save(unfinished, format="PNG", pnginfo=info)
    return path


def place(path: Path, about: dict[str, Any], settings: dict[str, Any], *also: str) -> Path:
    """Return where a picture goes: `path`, or where something else is there, a name beside it.

    Args:
        about: what the picture will carry.
        settings: of which the other name has a hash; equal for all pictures of one call.
        also: suffixes of files that are written beside `path`.
    """
    there = [p for p in (path, *map(path.with_suffix, also)) if os.path.lexists(p)]
    if all(_same(_settings_in(p)) == _same(about) for p in there):
        return path
    digest = hashlib.sha256(_json(_same(settings)).encode()).hexdigest()
    return path.with_stem(f"{path.stem}-{digest[:6]}")


def _settings_in(path: Path) -> dict[str, Any]:
    """Return the settings that a picture or clip carries; {} where it carries none, or cannot be read."""
    if not path.is_file():  # a pipe of this name would never end
        return {}
    try:
        if path.suffix == ".png":
            with Image.open(path) as picture:
                found = json.loads(picture.info["visgen"])
        else:
            found = json.loads(comment_of(path))
    except Exception:  # whatever is there is not ours
        return {}
    return found if isinstance(found, dict) else {}


def _same(about: dict[str, Any]) -> dict[str, Any]:
    """Return what equal images have in common, as JSON gives it back."""
    plain: dict[str, Any] = json.loads(_json({k: v for k, v in about.items() if k not in OUTCOMES}))
    return plain


def _json(about: dict[str, Any]) -> str:
    return json.dumps(about, sort_keys=True)


def asked_of(images: Images) -> list[dict[str, Any]]:
    """Return {"label": id} or {"prompt": text} of every image."""
    return [{"prompt": p} for p in images.prompts] or [{"label": label} for label in images.labels]


def stem(asked: int | str) -> str:
    """Return the label; or the beginning of the prompt and a hash of it all, so that each prompt has its own names."""
    if isinstance(asked, int):
        return f"{asked:04d}"
    words = re.sub(r"[^a-z0-9]+", "-", asked.lower())[:40].strip("-") or "prompt"
    return f"{words}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"


def grid(pixels: Tensor, columns: int, gap: int = 2) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [B, 3, H, W] -> one picture [h, w, 3], white gaps; small images are enlarged to about 128 px."""
    factor = max(1, 128 // pixels.shape[-1])
    pictures = pixels.repeat_interleave(factor, -1).repeat_interleave(factor, -2).permute(0, 2, 3, 1).numpy()
    count, height, width, _ = pictures.shape
    columns, gap = min(columns, count), gap * factor
    high, wide = height + gap, width + gap
    sheet = np.full((-(-count // columns) * high + gap, columns * wide + gap, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        top, left = gap + i // columns * high, gap + i % columns * wide
        sheet[top : top + height, left : left + width] = picture
    return sheet
