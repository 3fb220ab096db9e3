"""The program behind `sample.py` and `visgen-sample`: options, pictures on disk, progress."""

from __future__ import annotations

import json
import sys
import tempfile
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
from visgen.checkpoint import Step
from visgen.config import UserError
from visgen.data._images import UNREADABLE
from visgen.generate import Generator, Images, SamplingConfig, load


@dataclass(frozen=True)
class KnownConfig:
    """Known pixels: completion and inpainting.

    Attributes:
        image: a picture; centre-cropped to the checkpoint's size.
        mask: a picture of the same size, white where the image is kept; None keeps the upper half.
    """

    image: Path | None = None
    mask: Path | None = None


@dataclass(frozen=True)
class SampleConfig(SamplingConfig):
    """Draws images from a checkpoint.

    Attributes:
        checkpoint: run directory, step directory or Hub id.
        step: which step of the run, or `best`; default the newest.
        label: class ids or names; default: all classes of the checkpoint, at most 8.
        num: images of each label.
        seed: image i of a call has seed `seed + i`.
        known: completion and inpainting.
        out: directory of `grid.png` and one PNG per image.
    """

    checkpoint: str = ""
    step: Step = None
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
    out = writable(settings.out)
    generator = load(settings.checkpoint, settings.step, settings.engine)
    names = settings.label or tuple(str(i) for i in range(min(generator.class_count, 8)))
    labels = [generator.label(n) for n in names for _ in range(settings.num)]
    known = _read_known(settings.known, generator.tokenizer.image_size)
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


def writable(out: Path) -> Path:
    """Makes the directory and checks, before any work, that it can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):  # without a name, so that the processes of one launch do not meet
            pass
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; choose another directory") from None
    return out


def _read_known(known: KnownConfig, size: tuple[int, int]) -> tuple[Tensor, Tensor] | None:
    """(pixels [1, 3, H, W] in [-1, 1], mask [1, H, W])."""
    if known.image is None:
        if known.mask is not None:
            raise UserError("--known.mask needs --known.image, the picture whose pixels it keeps")
        return None
    height, width = size
    picture = _centre(_open(known.image, "--known.image").convert("RGB"), size, Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1).unsqueeze(0).float() / 127.5 - 1
    if known.mask is None:
        mask = torch.zeros(1, height, width, dtype=torch.bool)
        mask[:, : height // 2] = True
        return pixels, mask
    drawn = _centre(_open(known.mask, "--known.mask").convert("L"), size, Image.Resampling.NEAREST)
    return pixels, torch.from_numpy(np.array(drawn) >= 128).unsqueeze(0)


def _open(path: Path, flag: str) -> Image.Image:
    try:
        picture = Image.open(path)
        picture.load()
    except FileNotFoundError:
        raise UserError(f"{flag} {path} does not exist") from None
    except UNREADABLE as error:
        raise UserError(f"{flag} {path} is not a readable picture: {error}") from None
    return picture


def _centre(picture: Image.Image, size: tuple[int, int], resample: Image.Resampling) -> Image.Image:
    from PIL import ImageOps

    return ImageOps.fit(picture, (size[1], size[0]), method=resample)


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
