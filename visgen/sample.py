"""The program behind `sample.py` and `visgen-sample`: options, pictures on disk, progress."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
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
from visgen.checkpoint import Step
from visgen.checks import Positive, Seed
from visgen.config import UserError
from visgen.data._clips import av, read_clip, write_gif, write_mp4
from visgen.data._images import UNREADABLE, center_crop, read_image, to_pixels
from visgen.generate import Generator, Images, SamplingConfig, at_a_time, check_seed, stream
from visgen.hints import Given, HintConfig, check_asked, choose
from visgen.hints import read as read_hints
from visgen.launch import writable
from visgen.loading import load
from visgen.metrics.images import to_uint8
from visgen.prompts import Features, TextConfig, check_prompts, read

GRID = 256  # images that `grid.png` shows at most
# of a single image: LABEL_SEED.png or PROMPT-HASH_SEED.png, with MAP-HASH before the seed where there is a control
NAME = r"(\d{4,}|[a-z0-9-]+-[0-9a-f]{8})(_[a-z0-9-]+-[0-9a-f]{8})?_\d{6,}\.(png|mp4)"
KEPT = 128  # the brightness from which a mask keeps a pixel
ELONGATED = 100  # a known picture of more than this ratio is refused: its square crop would show next to nothing


@dataclass(frozen=True)
class KnownConfig:
    """Known pixels: completion and inpainting.

    Attributes:
        image: a picture; decoded and centre-cropped to the checkpoint's size as training images are.
        mask: a picture of the same size, white and opaque where the image is kept; None keeps the upper half.
        clip: a video or an animation whose first frames a model of clips goes on from.
        frames: how many of them.
        stride: every so many frames of the file are taken.
    """

    image: Path | None = None
    mask: Path | None = None
    clip: Path | None = None
    frames: Positive = 1
    stride: Positive = 1


@dataclass(frozen=True)
class SampleConfig(SamplingConfig):
    """Draws images from a checkpoint.

    Attributes:
        checkpoint: run directory, step directory or Hub id.
        base: of a checkpoint that holds a control alone, the run with its frozen weights; default: where it was.
        step: which step of the run, or `best`; default the newest.
        label: class ids or names; default: all classes of the checkpoint, at most 8; a known image needs it given.
        prompt: texts, of a checkpoint that is conditioned on them.
        text: how prompts become features.
        num: images of each label or prompt.
        seed: image i of a call has seed `seed + i`.
        known: completion and inpainting, or the beginning of a clip.
        size: height and width in pixels, multiples of the tokenizer's stride; default the checkpoint's own.
        control: what shall be where; each of its pictures is drawn with each label or prompt.
        second: another control beside it, of as many pictures or one; what the two add is summed.
        fps: frames a second of clips.
        out: directory of one PNG per image, LABEL_SEED.png or PROMPT-HASH_SEED.png (of a clip an MP4 and a GIF), and of
            `grid.png` with the first of them. Images of other labels, prompts and seeds stay there. Maps are kept there
            too, and begin their rows of the grid.
    """

    checkpoint: str = ""
    base: str = ""
    step: Step = None
    label: tuple[str, ...] = ()
    prompt: tuple[str, ...] = ()
    text: TextConfig = field(default_factory=TextConfig)
    num: Positive = 4
    seed: Seed = 0
    known: KnownConfig = field(default_factory=KnownConfig)
    size: tuple[Positive, Positive] | None = None
    control: HintConfig = field(default_factory=HintConfig)
    second: HintConfig = field(default_factory=HintConfig)
    fps: Positive = 8
    out: Path = Path("out/sample")


def main(argv: Sequence[str] | None = None) -> None:
    """`sample.py [configs/sample/X.yaml] --checkpoint DIR --label ID|NAME --num N --out DIR`."""
    configs.run_program(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> None:
    settings = configs.load(SampleConfig, argv, prog="sample.py")
    if not settings.checkpoint:
        raise UserError("--checkpoint is needed: a run directory, such as assets/fashion32, or a Hub id")
    _check_asked(settings)
    pictures = _read_known(settings.known)
    out = writable(settings.out, "--out")
    generator = load(settings.checkpoint, settings.step, settings.engine, settings.base or None)
    generator.check_guidance(settings.guidance, bool(settings.control.files))
    if generator.model.grid[0] > 1:
        av()  # clips are written as MP4
    size = settings.size or generator.tokenizer.image_size
    given = _read_controls(generator, settings, size)
    features = _ready_features(generator, settings)
    labels = [] if features or settings.prompt else _labels(generator, settings)
    rows = len(features or settings.prompt or labels) * (len(given[0].maps) if given else 1)
    side, total = generator.tokenizer.image_size[0], rows * settings.num
    _check_room(out, total, size)
    check_seed(settings.seed + total - 1)
    known = _known_clip(generator, settings.known) or (pictures and _known_pixels(*pictures, side))
    if settings.prompt and features is None:
        features = generator.encode(settings.prompt, settings.text)
        for prompt in features.cut:
            print(f"cut to {features.text.shape[1]} tokens: {prompt}", file=sys.stderr)
    print(draw(generator, features or labels, settings, known, out, given))


def _check_asked(settings: SampleConfig) -> None:
    """Refuses what no checkpoint can be asked."""
    if settings.label and (settings.prompt or settings.text.features):
        raise UserError("--label is given beside a text; a checkpoint reads one of them, leave the other out")
    if settings.text != TextConfig() and not (settings.prompt or settings.text.features):
        raise UserError("--text says how prompts become features: give --prompt TEXT, or --text.features FILE")
    check_prompts(settings.prompt)
    check_asked(settings.control, "control")
    check_asked(settings.second, "second")
    if settings.second.files and not settings.control.files:
        raise UserError("--second is a control beside another: give --control first")
    if settings.known.image and (settings.control.files or settings.size):
        what = "--control" if settings.control.files else "--size"
        raise UserError(
            f"{what} and --known.image are both given; a known image is completed at its own size, uncontrolled"
        )
    if len(settings.second.files) not in (0, 1, len(settings.control.files)):
        raise UserError(
            f"--second has {len(settings.second.files)} pictures, --control {len(settings.control.files)}; give as "
            "many, or one for all"
        )


def _read_controls(generator: Generator, settings: SampleConfig, size: tuple[int, int]) -> list[Given]:
    """The maps of `--control` and `--second`, as far as they are given."""
    asked = [(f, s) for f, s in (("control", settings.control), ("second", settings.second)) if s != HintConfig()]
    if not asked:
        return []
    trained, where = generator.model.controls, f"checkpoint {settings.checkpoint}"
    controls = [choose(s, trained, where, flag) for flag, s in asked]
    grid = generator.grid_of(settings.size)
    pairs = zip(asked, controls, strict=True)
    return [read_hints(s, control, size, grid, flag) for (flag, s), control in pairs]


def _ready_features(generator: Generator, settings: SampleConfig) -> Features | None:
    """The features of a file, None where none is given; refuses prompts to a model of labels."""
    if settings.prompt or settings.text.features:
        generator.check_asked("text")
    if settings.text.features is None:
        return None
    return read(settings.text.features, generator.model.config.condition, settings.prompt)


def _labels(generator: Generator, settings: SampleConfig) -> list[int]:
    """The classes to draw; of one known picture or clip, or one map, that is not every class there is."""
    if not settings.label and generator.class_count > 1:
        known, flags = settings.known, ("known.image", "known.clip", "control")
        for given, flag in zip((known.image, known.clip, settings.control.files), flags, strict=True):
            if given:
                raise UserError(f"--{flag} needs --label, the class of what it shows: {generator.class_list}")
    return [generator.label(name) for name in settings.label or range(min(generator.class_count, 8))]


def _check_room(out: Path, total: int, size: tuple[int, int]) -> None:
    """Refuses more images than the disk can hold, at the least that they take: a byte a pixel, a block of 4 KiB."""
    needed, free = total * max(size[0] * size[1], 4096), shutil.disk_usage(out).free
    if needed > free:
        raise UserError(
            f"--num asks for {total} images of {size[1]} x {size[0]} px, which take {needed / 1e9:,.1f} GB or more; "
            f"the disk of --out {out} has {free / 1e9:,.1f} GB free: lower --num, or choose an --out with more room"
        )


def draw(
    generator: Generator,
    asked: Sequence[int] | Features,
    settings: SampleConfig,
    known: tuple[Tensor, Tensor] | None,
    out: Path,
    given: Sequence[Given] = (),
) -> str:
    """Draws `settings.num` images of each label or row of features, and each map, into `out`; returns a line about it.

    Single images are written batch by batch, so an interruption keeps what is done; the grid comes at the end.
    """
    features, ids = (asked, range(len(asked))) if isinstance(asked, Features) else (None, asked)
    rows = [(i, c) for i in ids for c in range(len(given[0].maps) if given else 1)]  # label or text, and map
    num, total = settings.num, len(rows) * settings.num
    about = describe(settings, generator) | _describe_known(settings.known)
    about |= {"text": features.about} if features is not None else {}
    about |= {flag: g.about for flag, g in zip(("control", "second"), given, strict=False)}
    sheet = Sheet(len(rows), num, [to_uint8(given[0].maps[c]) for _, c in rows] if given else [])
    for g in given:
        save_maps(g, out)
    made, nfe, seconds, notes = 0, 0, 0.0, ""
    size = at_a_time(generator, settings, known, features, given)

    def progress(done: int, of: int) -> None:
        step(made + min(size, total - made) * done // of, total)

    with Progress("sampling") as step:
        plan = ((rows[i // num][0], settings.seed + i) for i in range(total))
        hints = (lambda part: [g.rows([rows[i // num][1] for i in part]) for g in given]) if given else None
        for images in stream(generator, plan, settings, known, progress, features, hints, settings.size):
            maps = [given[0].names[rows[i // num][1]] for i in range(made, made + len(images.seeds))] if given else None
            save(images, out, about, maps, settings.fps)
            sheet.add(images)
            made, nfe, seconds = made + len(images.seeds), nfe + images.nfe, seconds + images.seconds
            notes = "".join(f", {k} {v}" for k, v in images.notes.items() if isinstance(v, int | float))
    sheet.save(out / "grid.png", about)
    older = sum(re.fullmatch(NAME, p.name) is not None for p in out.iterdir()) - total
    beside = f"; older images kept there: {older}" if older > 0 else ""
    said = f"{total} image{'s' * (total > 1)} in {seconds:.2f} s ({total / seconds:.1f} images/s, NFE {nfe}{notes})"
    return f"{said} -> {out}/grid.png{beside}"


def describe(settings: SamplingConfig, generator: Generator) -> dict[str, Any]:
    """What made an image, for its metadata and for reports."""
    kept = {k: v for k, v in configs.dump(settings).items() if k in ("sampler", "guidance", "warp", "engine")}
    precision = str(generator.dtype).removeprefix("torch.")
    kept["engine"] |= {"kind": generator.engine_kind, "device": generator.device.type, "precision": precision}
    return {"checkpoint": str(getattr(settings, "checkpoint", "")), "model": generator.meta, **kept}


def _describe_known(known: KnownConfig) -> dict[str, Any]:
    """The files of the known pixels and what they held."""

    def file(path: Path) -> dict[str, str]:
        return {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:12]}

    if known.clip is not None:
        return {"known": {"clip": file(known.clip), "frames": known.frames, "stride": known.stride}}
    if known.image is None:
        return {}
    return {"known": {"image": file(known.image), "mask": file(known.mask) if known.mask else "upper half"}}


def save(images: Images, out: Path, settings: dict[str, Any], maps: Sequence[str] | None = None, fps: int = 8) -> None:
    """Writes each image as `LABEL_SEED.png`, or as `PROMPT-HASH_SEED.png`, with its map's name before the seed; each
    clip as MP4 and GIF of such a name."""
    settings = settings | ({"notes": images.notes} if images.notes else {})
    names = [f"_{name}" for name in maps] if maps else [""] * len(images.seeds)
    rows = zip(images.pil(), asked_of(images), images.seeds, images.nfe_per_image, names, strict=True)
    for i, (picture, asked, seed, nfe, name) in enumerate(rows):
        about = {**asked, "seed": seed, "nfe": nfe, **({"map": name[1:]} if name else {}), **settings}
        path = out / f"{_stem(*asked.values())}{name}_{seed:06d}.png"
        if images.clips is None:
            _save_png(picture, path, about)
        else:
            said = json.dumps(about, sort_keys=True)
            write_mp4(path.with_suffix(".mp4"), images.clips[i], fps, said)
            write_gif(path.with_suffix(".gif"), images.clips[i], fps, said)


def save_maps(given: Given, out: Path) -> None:
    """Writes each control map as `control_MAP-HASH.png`."""
    for name, values in zip(given.names, to_uint8(given.maps), strict=True):
        _save_png(Image.fromarray(values.permute(1, 2, 0).numpy()), out / f"control_{name}.png", given.about)


def asked_of(images: Images) -> list[dict[str, Any]]:
    """{"label": id} or {"prompt": text} of every image."""
    return [{"prompt": p} for p in images.prompts] or [{"label": label} for label in images.labels]


def _stem(asked: int | str) -> str:
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
        _save_png(picture, path, {**asked, "seeds": self.seeds, **settings})


def _save_png(picture: Image.Image, path: Path, settings: dict[str, Any]) -> None:
    """A PNG that carries its settings as text (key `visgen`, JSON)."""
    info = PngInfo()
    info.add_text("visgen", json.dumps(settings, sort_keys=True))
    try:
        picture.save(path, pnginfo=info)
    except OSError as error:
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


def _known_clip(generator: Generator, known: KnownConfig) -> tuple[Tensor, Tensor] | None:
    """(pixels [1, T, 3, H, W] in [-1, 1], mask [1, T, H, W], all kept) of the known first frames."""
    if known.clip is None:
        return None
    if known.image is not None:
        raise UserError("--known.image and --known.clip are both given; leave one of them out")
    if generator.model.grid[0] == 1:
        raise UserError("--known.clip goes with a model of clips, this checkpoint draws images; use --known.image")
    pixels = read_clip(known.clip, generator.tokenizer.image_size[0], known.frames, known.stride)
    mask = torch.ones(1, known.frames, *generator.tokenizer.image_size, dtype=torch.bool)
    return pixels.unsqueeze(0).float() / 127.5 - 1, mask


def _read_known(known: KnownConfig) -> tuple[Image.Image, Image.Image | None] | None:
    """The known picture and its mask, decoded as training images are."""
    if known.image is None:
        if known.mask is not None:
            raise UserError("--known.mask needs --known.image, the picture whose pixels it keeps")
        return None
    picture = _decode(known.image, "--known.image")
    if known.mask is None:
        return picture, None
    mask = _decode(known.mask, "--known.mask", background="black").convert("L")
    if mask.size != picture.size:
        raise UserError(
            f"--known.mask {known.mask} is {mask.width} x {mask.height} px, --known.image {known.image} is "
            f"{picture.width} x {picture.height}; give a mask of the picture's size"
        )
    brightest = int(np.asarray(mask).max())
    if brightest < KEPT:
        raise UserError(
            f"--known.mask {known.mask} keeps nothing: its brightest pixel is {brightest} of 255; paint what is kept "
            "white"
        )
    return picture, mask


def _known_pixels(picture: Image.Image, mask: Image.Image | None, size: int) -> tuple[Tensor, Tensor]:
    """(pixels [1, 3, size, size] in [-1, 1], mask [1, size, size]), both by the centre crop of the training data."""
    pixels = to_pixels(center_crop(picture, size)).float() / 127.5 - 1
    if mask is None:
        return pixels, (torch.arange(size) < size // 2)[None, :, None].expand(1, size, size)
    return pixels, torch.from_numpy(np.array(center_crop(mask, size).convert("L")) >= KEPT).unsqueeze(0)


def _decode(path: Path, flag: str, background: str = "white") -> Image.Image:
    try:
        picture = read_image(path, background)
    except FileNotFoundError:
        raise UserError(f"{flag} {path} does not exist; pass the path of a picture") from None
    except UNREADABLE as error:
        raise UserError(
            f"{flag} {path} is not a readable picture ({error}); save it as an 8-bit PNG of usual size, or pass another"
        ) from None
    if max(picture.size) > ELONGATED * min(picture.size):
        raise UserError(
            f"{flag} {path} is {picture.width} x {picture.height} px, of which the centre crop to a square shows next "
            "to nothing; crop it closer"
        )
    return picture


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
