"""The program behind `sample.py` and `visgen-sample`: its options, what it refuses, what it draws."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from visgen import __version__
from visgen import config as configs
from visgen.checks import Positive, Range, Seed, printable
from visgen.conditioned import check_seed
from visgen.config import UserError
from visgen.data._clips import av
from visgen.generate import Generator, at_a_time, stream
from visgen.hints import Given, HintConfig, check_asked, choose
from visgen.hints import read as read_hints
from visgen.images import NAME, pooled, save
from visgen.installed import if_shipped, program
from visgen.known import KnownConfig, describe_known, known_clip, known_pixels, read_known
from visgen.launch import Progress, writable
from visgen.loading import load
from visgen.metrics.images import to_uint8
from visgen.pictures import Sheet, save_maps
from visgen.prompts import Features, TextConfig, check_prompts, read
from visgen.run_files import Step
from visgen.sampling import SamplingConfig


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
    fps: Annotated[int, Range(1, 100)] = 8
    out: Path = Path("out/sample")


def main(argv: Sequence[str] | None = None) -> None:
    """`sample.py [configs/sample/X.yaml] --checkpoint DIR --label ID|NAME --num N --out DIR`."""
    configs.run_program(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> None:
    settings = configs.load(SampleConfig, argv, prog=program("sample.py"))
    if not settings.checkpoint:
        example = if_shipped("assets/fashion32", ", such as assets/fashion32")
        raise UserError(f"--checkpoint is needed: a run directory{example}, or a Hub id of the form owner/name")
    _check_asked(settings)
    pictures = read_known(settings.known)
    out = writable(settings.out, "--out", "grid.png")
    generator = load(settings.checkpoint, settings.step, settings.engine, settings.base or None)
    generator.check_guidance(settings.guidance, bool(settings.control.files))
    if generator.model.grid[0] > 1:
        av()  # clips are written as MP4
    size = settings.size or generator.tokenizer.image_size
    generator.check_memory(generator.grid_of(settings.size), 1, settings.guidance.branches)
    given = _read_controls(generator, settings, size)
    features = _ready_features(generator, settings)
    labels = [] if features or settings.prompt else _labels(generator, settings)
    rows = len(features or settings.prompt or labels) * (len(given[0].maps) if given else 1)
    side, total = generator.tokenizer.image_size[0], rows * settings.num
    _check_room(out, total, size)
    check_seed(settings.seed + total - 1)
    clip = known_clip(settings.known, side, generator.model.grid[0], getattr(settings.sampler, "frames", None))
    known = clip or (pictures and known_pixels(*pictures, side))
    if settings.prompt and features is None:
        features = generator.encode(settings.prompt, settings.text)
        for prompt in features.cut:
            print(f"cut to {features.text.shape[1]} tokens: {printable(prompt)}", file=sys.stderr)
    print(printable(draw(generator, features or labels, settings, known, out, given)))


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
    given = [read_hints(s, control, size, grid, flag) for (flag, s), control in pairs]
    for (flag, s), maps in zip(asked, given, strict=True):
        for path, values in zip(s.files, maps.maps, strict=True):
            if values.amin() == values.amax():
                print(f"--{flag}: the map of {printable(path)} is blank, one value everywhere", file=sys.stderr)
    return given


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
    about = {"visgen": __version__, **describe(settings, generator), **describe_known(settings.known)}
    about |= {"text": features.about} if features is not None else {}
    about |= {flag: g.about for flag, g in zip(("control", "second"), given, strict=False)}
    sheet = Sheet(len(rows), num, [to_uint8(given[0].maps[c]) for _, c in rows] if given else [])
    for g in given:
        save_maps(g, out)
    made, nfe, seconds, notes, apart = 0, 0, 0.0, [], 0
    size, paste = at_a_time(generator, settings, known, features, given), settings.known.paste

    def progress(done: int, of: int) -> None:
        step(made + min(size, total - made) * done // of, total)

    with Progress("sampling") as step:
        plan = ((rows[i // num][0], settings.seed + i) for i in range(total))
        hints = (lambda part: [g.rows([rows[i // num][1] for i in part]) for g in given]) if given else None
        for images in stream(generator, plan, settings, known, progress, features, hints, settings.size, paste):
            maps = [given[0].names[rows[i // num][1]] for i in range(made, made + len(images.seeds))] if given else None
            written = save(images, out, about, maps, settings.fps)
            apart += sum(re.search(r"-[0-9a-f]{6}$", path.stem) is not None for path in written)
            sheet.add(images)
            made, nfe, seconds = made + len(images.seeds), nfe + images.nfe, seconds + images.seconds
            notes.append((images.notes, len(images.seeds)))
    told = "".join(f", {k} {v}" for k, v in pooled(notes).items() if isinstance(v, int | float))
    grid = sheet.save(out / "grid.png", about)
    older = sum(re.fullmatch(NAME, p.name) is not None for p in out.iterdir()) - total
    beside = f"; older images kept there: {older}" if older > 0 else ""
    if apart:
        beside += f"; {apart} with the label and seed of a new one, which ends in {written[-1].stem[-7:]}"
    said = f"{total} image{'s' * (total > 1)} in {seconds:.2f} s ({total / seconds:.1f} images/s, NFE {nfe}{told})"
    return f"{said} -> {grid}{beside}"


def describe(settings: SamplingConfig, generator: Generator) -> dict[str, Any]:
    """Return what made an image, for its metadata and for reports."""
    return {"checkpoint": str(getattr(settings, "checkpoint", "")), **generator.describe(settings)}
