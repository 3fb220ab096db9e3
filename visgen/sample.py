"""The program behind `sample.py` and `visgen-sample`: options, pictures on disk, progress."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from torch import Tensor

from visgen import config as configs
from visgen.config import UserError
from visgen.data._images import UNREADABLE, center_crop, read_image, to_pixels
from visgen.generate import Generator, Images, SamplingConfig, load
from visgen.launch import writable


@dataclass(frozen=True)
class KnownConfig:
    """Known pixels: completion and inpainting.

    Attributes:
        image: a picture; decoded and centre-cropped to the checkpoint's size as training images are.
        mask: a picture of the same size, white where the image is kept; None keeps the upper half.
    """

    image: Path | None = None
    mask: Path | None = None


@dataclass(frozen=True)
class SampleConfig(SamplingConfig):
    """Draws images from a checkpoint.

    Attributes:
        checkpoint: run directory, step directory or Hub id.
        step: which step of the run; default the newest.
        label: class ids or names; default: all classes of the checkpoint, at most 8.
        num: images of each label.
        seed: image i of a call has seed `seed + i`.
        known: completion and inpainting.
        out: directory of `grid.png` and one PNG per image.
    """

    checkpoint: str = ""
    step: int | None = None
    label: tuple[str, ...] = ()
    num: int = 4
    seed: int = 0
    known: KnownConfig = field(default_factory=KnownConfig)
    out: Path = Path("out/sample")


def main(argv: Sequence[str] | None = None) -> None:
    """`sample.py [configs/sample/X.yaml] --checkpoint DIR --label ID|NAME --num N --out DIR`."""
    configs.run_program(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> None:
    settings = configs.load(SampleConfig, argv, prog="sample.py")
    if not settings.checkpoint:
        raise UserError("--checkpoint is needed: a run directory, such as assets/fashion32, or a Hub id")
    if settings.num < 1:
        raise UserError(f"--num {settings.num} must be at least 1")
    pictures = _read_known(settings.known)
    out = writable(settings.out, "--out")
    generator = load(settings.checkpoint, settings.step, settings.engine)
    names = settings.label or tuple(str(i) for i in range(min(generator.class_count, 8)))
    labels = [generator.label(n) for n in names for _ in range(settings.num)]
    known = pictures and _known_pixels(*pictures, generator.tokenizer.image_size[0])
    seeds = [settings.seed + i for i in range(len(labels))]
    with Progress("sampling") as step:
        images = generator.sample(labels, seeds, settings.guidance, settings.warp, settings.sampler, known, step)
    save(images, out, settings.num, describe(settings, generator))
    rate = len(labels) / images.seconds
    print(f"{len(labels)} images in {images.seconds:.2f} s ({rate:.1f} images/s, NFE {images.nfe}) -> {out}/grid.png")


def describe(settings: SamplingConfig, generator: Generator) -> dict[str, Any]:
    """What made an image, for its metadata and for reports."""
    kept = {k: v for k, v in configs.dump(settings).items() if k in ("sampler", "guidance", "warp", "engine")}
    kept["engine"] |= {"device": generator.device.type, "precision": str(generator.dtype).removeprefix("torch.")}
    return {"checkpoint": str(getattr(settings, "checkpoint", "")), "model": generator.meta, **kept}


def save(images: Images, out: Path, columns: int, settings: dict[str, Any]) -> None:
    """Writes `grid.png` and `LABEL_SEED.png`; each PNG carries its settings as text (key `visgen`, JSON)."""
    for picture, label, seed in zip(images.pil(), images.labels, images.seeds, strict=True):
        info = PngInfo()
        info.add_text("visgen", json.dumps({"label": label, "seed": seed, **settings}, sort_keys=True))
        picture.save(out / f"{label:04d}_{seed:06d}.png", pnginfo=info)
    info = PngInfo()
    info.add_text("visgen", json.dumps({"labels": images.labels, "seeds": images.seeds, **settings}, sort_keys=True))
    Image.fromarray(grid(images.pixels, columns)).save(out / "grid.png", pnginfo=info)


def grid(pixels: Tensor, columns: int, gap: int = 2) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """uint8 [B, 3, H, W] -> one picture [h, w, 3], white gaps; small images are enlarged to about 128 px."""
    factor = max(1, 128 // pixels.shape[-1])
    pixels = pixels.repeat_interleave(factor, -1).repeat_interleave(factor, -2)
    from torchvision.utils import make_grid

    return make_grid(pixels, nrow=columns, padding=gap * factor, pad_value=255).permute(1, 2, 0).contiguous().numpy()


def _read_known(known: KnownConfig) -> tuple[Image.Image, Image.Image | None] | None:
    """The known picture and its mask, decoded as training images are."""
    if known.image is None:
        if known.mask is not None:
            raise UserError("--known.mask needs --known.image, the picture whose pixels it keeps")
        return None
    picture = _decode(known.image, "--known.image")
    if known.mask is None:
        return picture, None
    mask = _decode(known.mask, "--known.mask")
    if mask.size != picture.size:
        raise UserError(
            f"--known.mask {known.mask} is {mask.width} x {mask.height} px, --known.image {known.image} is "
            f"{picture.width} x {picture.height}; give a mask of the picture's size"
        )
    return picture, mask


def _known_pixels(picture: Image.Image, mask: Image.Image | None, size: int) -> tuple[Tensor, Tensor]:
    """(pixels [1, 3, size, size] in [-1, 1], mask [1, size, size]), both by the centre crop of the training data."""
    pixels = to_pixels(center_crop(picture, size)).float() / 127.5 - 1
    if mask is None:
        return pixels, (torch.arange(size) < size // 2)[None, :, None].expand(1, size, size)
    return pixels, torch.from_numpy(np.array(center_crop(mask, size).convert("L")) >= 128).unsqueeze(0)


def _decode(path: Path, flag: str) -> Image.Image:
    try:
        return read_image(path)
    except FileNotFoundError:
        raise UserError(f"{flag} {path} does not exist; pass the path of a picture") from None
    except UNREADABLE as error:
        raise UserError(f"{flag} {path} is not a readable picture: {error}") from None


class Progress:
    """A progress bar with time left on stderr: `with Progress("sampling") as step: step(done, total)`."""

    def __init__(self, what: str, shown: bool = True) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed}/{task.total}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Bar(*columns, console=Console(stderr=True), disable=not shown)
        self.task = self.bar.add_task(what, total=None)

    def __enter__(self) -> Callable[[int, int], None]:
        self.bar.start()
        return lambda done, total: self.bar.update(self.task, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self.bar.stop()
