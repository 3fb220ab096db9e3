"""From a checkpoint, a sampler and seeds to uint8 images, or clips."""

from __future__ import annotations

import operator
import re
import reprlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from visgen import config as configs
from visgen.checks import SEEDS
from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.refill import refill, refillable
from visgen.decode.warp import Warp
from visgen.layout import Grid
from visgen.metrics.images import to_uint8
from visgen.model import Model
from visgen.nn.control import Hint
from visgen.prompts import Features, TextConfig, check_prompts, encode
from visgen.samplers import Sampler
from visgen.sampling import EngineConfig, SamplingConfig
from visgen.tokenizers import Tokenizer

BATCHES = 8  # drawn by one call where rows are refilled; its last images leave rows idle


@dataclass
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
        notes: what the sampler chose automatically or counted, of the last batch.
        clips: uint8 [B, T, 3, H, W] on the CPU, of a model of clips.
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

    @property
    def nfe_per_image(self) -> list[int]:
        """Evaluations after which each image was complete."""
        return self.rounds.amax(1).tolist()

    def pil(self) -> list[Image.Image]:
        """The images as PIL images."""
        return [Image.fromarray(p) for p in self.pixels.permute(0, 2, 3, 1).contiguous().numpy()]


class Generator:
    """A model with its tokenizer, ready to sample. Made by `visgen.load`.

    Attributes:
        classes: class names, as far as the checkpoint records them.
        meta: what the checkpoint says of itself.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        engine: EngineConfig | None = None,
        classes: Sequence[str] = (),
        meta: dict[str, Any] | None = None,
    ) -> None:
        self.settings = engine or EngineConfig()
        self.device, self.dtype = self.settings.resolve()
        self.engine_kind = self.settings.kind_on(self.device)
        self.model = model.to(self.device, self.dtype).eval()
        self.tokenizer = tokenizer.to(self.device).eval()
        self.classes = list(classes)
        self.meta = meta or {}
        self._engine: Engine | None = None

    def check_asked(self, kind: str) -> None:
        """Raises `UserError` unless the model is conditioned on `kind`, which is "label" or "text"."""
        asked = self.model.config.condition
        found = "label" if hasattr(asked, "classes") else configs.kind_of(asked)
        if found == kind:
            return
        if found == "text":
            raise UserError(
                "this model is conditioned on text, not on class labels: give it prompts, as `sample.py --prompt TEXT` "
                "or `sample(prompts=[TEXT])`"
            )
        raise UserError(
            "this model is conditioned on class labels, not on text: give it labels, as `sample.py --label` or "
            f"`sample(labels=[...])`; it knows {self.class_list}"
        )

    @property
    def class_count(self) -> int:
        """Raises `UserError` for a model of another condition than class labels."""
        self.check_asked("label")
        return self.model.config.condition.classes

    @property
    def class_list(self) -> str:
        """The classes in the words of a message."""
        if not self.classes:
            return f"ids 0 to {self.class_count - 1} (no names recorded)"
        more = f", ... ({len(self.classes)} in all)" if len(self.classes) > 20 else ""
        return ", ".join(self.classes[:20]) + more

    def label(self, name: str | int) -> int:
        """A class id from an id or a class name; a string that is both is the name."""
        count, lowered = self.class_count, [c.lower() for c in self.classes]
        if isinstance(name, str) and name in self.classes:
            return self.classes.index(name)
        if isinstance(name, str) and not re.fullmatch(r"-?\d+", name):
            if name.lower() not in lowered:
                raise UserError(f"label '{name}' is unknown; the checkpoint knows {self.class_list}")
            return lowered.index(name.lower())
        try:
            label = int(name) if isinstance(name, str) else operator.index(name)
        except TypeError:
            raise UserError(f"label {reprlib.repr(name)} is no class; the checkpoint knows {self.class_list}") from None
        if not 0 <= label < count:
            raise UserError(f"label {label} is out of range: the checkpoint knows classes 0 to {count - 1}")
        return label

    def check_guidance(self, guidance: Guidance, controlled: bool = False) -> None:
        """Raises `UserError` for a guidance that this model cannot follow; controlled: whether a control is given."""
        guidance, _ = self.settled(guidance, Warp())
        if guidance.control is not None and not (controlled and self.model.config.control):
            lacks = "a control is given" if self.model.config.control else "the checkpoint has a control of its own"
            raise UserError(
                f"guidance.control {guidance.control} scales a control: it has a meaning only where {lacks}"
            )
        if self.model.config.condition.dropout == 0 and guidance.branches > 1:
            raise UserError("guidance.scale must be 1: this checkpoint was trained without a null class (dropout 0)")

    def settled(self, guidance: Guidance, warp: Warp) -> tuple[Guidance, Warp]:
        """What the engine gets: of a student the defaults, for its weights hold the settings of its teacher.

        Raises:
            UserError: others than those that it learned.
        """
        if self.model.backbone.taught is None:
            return guidance, warp
        for name, given, learned in zip(
            ("guidance", "warp"), (guidance, warp), self.model.backbone.taught, strict=True
        ):
            if given not in (type(learned)(), learned):
                raise UserError(
                    f"{name} {given} is not what this student learned from its teacher, {learned}, and it cannot be "
                    "changed; leave it out"
                )
        return Guidance(), Warp()

    def encode(self, prompts: Sequence[str] | str, text: TextConfig | None = None) -> Features:
        """Text features of prompts, for as many calls of `sample` as are wanted; see `visgen.prompts.encode`."""
        self.check_asked("text")
        given = [prompts] if isinstance(prompts, str) else prompts
        return encode(given, self.model.config.condition, text, self.device)

    def sample(
        self,
        labels: Sequence[int | str] | int | str | None = None,
        seeds: Sequence[int] | None = None,
        guidance: Guidance | float | None = None,
        warp: Warp | None = None,
        sampler: Any = None,
        known: tuple[Tensor, Tensor] | None = None,
        on_step: Any = None,
        *,
        prompts: Features | Sequence[str] | str | None = None,
        text: TextConfig | None = None,
        control: Sequence[Hint] | Tensor | None = None,
        size: tuple[int, int] | None = None,
    ) -> Images:
        """Draws one image per label or prompt, `engine.batch` at once; image i depends on seed i, not on its batch.

        Where images take unequally long, a row that is complete goes on with the next one (`decode/refill.py`).

        Args:
            labels: class ids or names, B of them; or one, for all seeds.
            seeds: B whole numbers from 0 to 2^63 - 1; default 0 .. B - 1.
            guidance: a `Guidance` or just its scale.
            warp: temperature, top-k, top-p.
            sampler: config of a sampler plugin, or its kind; default the model's own.
            known: (pixels [1 or B, 3, H, W] in [-1, 1], mask [1 or B, H, W] bool, true = keep): completion and
                inpainting. A token is kept when all of its pixels are; in raster order the model looks back only. Of
                clips, the first frames: [1 or B, T, 3, H, W] and [1 or B, T, H, W].
            on_step: called as on_step(done, total) over all batches.
            prompts: of a model of texts instead of labels, B of them; or one, for all seeds; or their features
                (`encode`, `visgen.prompts.read`).
            text: how prompts become features.
            control: of a model trained for one, maps [1 or B, 3, H, W] in [-1, 1] of the size of the images; or several
                `Hint`s, whose additions are summed.
            size: (H, W) in pixels, multiples of the tokenizer's stride; default the checkpoint's own.

        Raises:
            UserError: a value that is not one of these, or that the model cannot follow.
        """
        ids, wanted, seeds = self._plan(labels, prompts, seeds)
        guidance, count, batch_size = _guidance(guidance), len(seeds), self.settings.batch
        if warp is not None and not isinstance(warp, Warp):
            raise UserError(f"warp {reprlib.repr(warp)} is no `visgen.decode.warp.Warp`, such as Warp(top_p=0.97)")
        hints = self._hints(control, count)
        self.check_guidance(guidance, bool(hints))
        guidance, warp = self.settled(guidance, warp or Warp())
        grid = self.grid_of(size)
        if known is not None and grid != self.model.grid:
            raise UserError(
                f"a known image goes with the checkpoint's own size {self.tokenizer.image_size}; leave size out"
            )
        if warp != Warp() and self.model.continuous:
            raise UserError(f"warp {warp} filters a law over codes, this model draws vectors; leave it out")
        sampler = sampler or self.model.backbone.sampler
        built: Sampler = configs.build(
            configs.plugin_config("visgen.samplers", sampler) if isinstance(sampler, str) else sampler
        )
        engine = self._engine_for(guidance, warp, grid)
        pinned = None if known is None else self._known_tokens(*known, count)
        features = self.encode(wanted, text) if isinstance(wanted, list) else wanted
        parts: list[Images] = []
        if features is None and pinned is None and not hints and self.refills(built):
            batch_size = max(batch_size, count)  # of which `engine.batch` at once
        for start in range(0, count, batch_size):
            part = slice(start, start + batch_size)
            chosen = None if pinned is None else (pinned[0][part], pinned[1][part])

            def progress(done: int, total: int, start: int = start) -> None:
                if on_step is not None:
                    on_step(start // batch_size * total + done, -(-count // batch_size) * total)

            batch: dict[str, Any]
            if features is None:
                batch = {"label": torch.tensor(ids[part], device=self.device)}
            else:
                batch = dict(features.rows(range(count)[part]).batch(self.device))
            if hints:
                batch["hints"] = [self._rows(hint, part) for hint in hints]
            parts.append(self._batch(engine, built, batch, seeds[part], chosen, progress))
        return Images(
            torch.cat([p.pixels for p in parts]),
            torch.cat([p.tokens for p in parts]),
            ids,
            seeds,
            sum(p.nfe for p in parts),
            sum(p.seconds for p in parts),
            torch.cat([p.rounds for p in parts]),
            parts[-1].notes,
            [] if features is None else features.prompts,
            torch.cat([p.clips for p in parts if p.clips is not None]) if parts[0].clips is not None else None,
        )

    def refills(self, sampler: Any) -> bool:
        """Whether rows go on with the next image with this sampler, or the one of this config."""
        return refillable(self.model, sampler if isinstance(sampler, Sampler) else configs.build(sampler))

    def grid_of(self, size: tuple[int, int] | None) -> Grid:
        """The token grid of images of `size` (H, W).

        Raises:
            UserError: sides that are no multiples of the stride, more tokens than positions, or another tokenizer.
        """
        own, grid = self.tokenizer.image_size, self.model.grid
        if size is None or tuple(size) == tuple(own):
            return grid
        stride = own[0] // grid[1]
        if not hasattr(self.tokenizer, "grid_of"):
            raise UserError(f"this tokenizer decodes images of {own} px alone; leave the size out")
        if min(size) < stride or any(side % stride for side in size):
            near = " ".join(str(max(stride, round(side / stride) * stride)) for side in size)
            raise UserError(
                f"size {size[0]} {size[1]} must be multiples of the tokenizer's stride {stride}, e.g. {near}"
            )
        rows, columns = size[0] // stride, size[1] // stride
        most = getattr(self.model.config.backbone, "rope_columns", None)
        if most is not None and rows * columns > most**2:
            raise UserError(
                f"size {size[0]} {size[1]} is {rows * columns} tokens, this checkpoint has positions for {most**2}; "
                "take a smaller one"
            )
        return grid[0], rows, columns

    def _engine_for(self, guidance: Guidance, warp: Warp, grid: Grid) -> Engine:
        """The last call's engine, with what it measured and loaded, where the settings are the same."""
        engine = self._engine
        if engine is None or (engine.guidance, engine.warp, engine.grid) != (guidance, warp, grid):
            model = self.model.at(grid)
            engine = self._engine = self.settings.make(model, guidance, warp, self.meta.get("tokenizer"))
        return engine

    def _hints(self, control: Sequence[Hint] | Tensor | None, count: int) -> list[Hint]:
        """What is given as control, each with one row or `count`."""
        hints = [Hint(control.unsqueeze(1))] if isinstance(control, Tensor) else list(control or ())
        if hints and self.model.controls is None:
            raise UserError(
                "this model was trained without control; leave it out, or load one that was trained with it"
            )
        if not hints and self.model.config.control is None and self.model.controls is not None:
            raise UserError("this model reads a control map as its prefix; give it one")
        for hint in hints:
            if len(hint.map) not in (1, count) or not hint.map.is_floating_point():
                raise UserError(
                    f"control maps are {hint.map.dtype} {list(hint.map.shape)} for {count} images; give floats in "
                    f"[-1, 1], 1 or {count} of them"
                )
        return hints

    def _rows(self, hint: Hint, part: slice) -> Hint:
        """The rows `part` of a hint, on the device."""
        maps = (hint.map[part] if len(hint.map) > 1 else hint.map).to(self.device)
        region = hint.region
        if region is not None:
            region = (region[part] if len(region) > 1 else region).to(self.device)
        return Hint(maps, hint.strength, region)

    def _plan(
        self, labels: Any, prompts: Any, seeds: Sequence[int] | None
    ) -> tuple[list[int], list[str] | Features | None, list[int]]:
        """(class ids or none, prompts or their features or none, seeds) of the images."""
        try:
            numbers = None if seeds is None else [operator.index(s) for s in seeds]
        except TypeError:
            raise UserError(
                f"seeds {' '.join(reprlib.repr(seeds).split())} must be whole numbers, one per image, such as [0, 1]"
            ) from None
        for seed in numbers or ():
            check_seed(seed)
        if labels is not None and prompts is not None:
            raise UserError("labels and prompts are both given; a model reads one of them, leave the other out")
        self.check_asked("label" if prompts is None else "text")
        what, asked = ("label", labels) if prompts is None else ("prompt", prompts)
        if not isinstance(asked, Features):
            single = isinstance(asked, str) or not hasattr(asked, "__iter__") or getattr(asked, "ndim", 1) == 0
            asked = [asked] * (1 if numbers is None else len(numbers)) if single else list(asked)
        numbers = list(range(len(asked))) if numbers is None else numbers
        ids: list[int] = [] if prompts is not None else [self.label(x) for x in asked]
        if isinstance(asked, list) and prompts is not None:
            check_prompts(asked)
        if not len(asked) or len(numbers) != len(asked):
            raise UserError(
                f"{len(asked)} {what}s and {len(numbers)} seeds; give at least one {what}, and one seed per {what}"
            )
        return ids, None if prompts is None else asked, numbers

    @torch.inference_mode()
    def _batch(
        self,
        engine: Engine,
        sampler: Sampler,
        batch: dict[str, Tensor],
        seeds: list[int],
        known: tuple[Tensor, Tensor] | None,
        progress: Any,
    ) -> Images:
        start, rows = time.perf_counter(), min(len(seeds), self.settings.batch)
        try:
            noise = Noise(torch.tensor(seeds, device=self.device))
            if len(seeds) > rows:
                generation = refill(engine, sampler, batch, noise, rows, progress)
            else:
                engine.begin(batch, known)
                generation = engine.run(sampler, noise, progress)
            other = {} if engine.grid == self.model.grid else {"grid": engine.grid}
            decoded = (to_uint8(self.tokenizer.decode(part, **other)).cpu() for part in generation.tokens.split(rows))
            frames = torch.cat(list(decoded))  # [B, T, 3, H, W]
        except torch.OutOfMemoryError:
            raise UserError(
                f"{rows} images at once do not fit the memory of {self.device}; lower --engine.batch"
            ) from None
        seconds = time.perf_counter() - start
        tokens, rounds = generation.tokens.cpu(), generation.rounds.cpu()
        clips = frames if frames.shape[1] > 1 else None
        return Images(frames[:, 0], tokens, [], seeds, generation.nfe, seconds, rounds, generation.notes, clips=clips)

    @torch.inference_mode()
    def _known_tokens(self, pixels: Tensor, mask: Tensor, images: int) -> tuple[Tensor, Tensor]:
        """Tokens [images, N] of the known pixels, or of known first frames, and which of them are kept."""
        height, width = self.tokenizer.image_size
        frames = pixels.shape[1:2] if pixels.ndim == 5 and self.model.grid[0] > 1 else ()
        if pixels.shape[1:] != (*frames, 3, height, width) or mask.shape[1:] != (*frames, height, width):
            raise UserError(
                f"known pixels {list(pixels.shape)} and mask {list(mask.shape)} must be [B, 3, {height}, {width}] and "
                f"[B, {height}, {width}], the size the checkpoint was trained at"
            )
        if not pixels.is_floating_point():
            raise UserError(f"known pixels are {pixels.dtype}; give floats in [-1, 1], as pixels / 127.5 - 1")
        if not {len(pixels), len(mask)} <= {1, images}:
            raise UserError(f"{len(pixels)} known images and {len(mask)} masks for {images} images; give 1 or {images}")
        tokens = self.tokenizer.encode(pixels.to(self.device) if frames else pixels.to(self.device).unsqueeze(1))
        _, rows, columns = self.tokenizer.grid
        cells = mask.to(self.device).unflatten(-1, (columns, -1)).unflatten(-3, (rows, -1))
        keep = cells.all(-1).all(-2).flatten(1)  # [B, N]: every pixel of the cell is known
        if not keep.any():
            raise UserError(
                f"the mask keeps no token: each is {height // rows} x {width // columns} px, of which all must be "
                "kept; keep more of the known image"
            )
        return tokens.expand(images, *tokens.shape[1:]), keep.expand(images, -1)


def _guidance(given: Guidance | float | None) -> Guidance:
    if isinstance(given, Guidance):
        return given
    try:
        scale = 1.0 if given is None else float(given)
    except (TypeError, ValueError):
        raise UserError(f"guidance {reprlib.repr(given)} must be its scale, a number, or a `Guidance`") from None
    return Guidance(scale)


def stream(
    generator: Generator,
    plan: Iterable[tuple[int, int]],
    settings: SamplingConfig,
    known: tuple[Tensor, Tensor] | None = None,
    on_step: Any = None,
    features: Features | None = None,
    control: Callable[[range], Sequence[Hint]] | None = None,
    size: tuple[int, int] | None = None,
) -> Iterator[Images]:
    """Images of a plan of (label, seed) pairs, batch by batch, for programs that need many. Reads it as it goes.

    Args:
        known: as for `Generator.sample`, one picture and one mask for all.
        on_step: called as on_step(done, total) within each batch of `at_a_time` images.
        features: of a model of texts; the plan then has (row of them, seed) pairs.
        control: gives the hints of the images with these numbers in the plan.
        size: as for `Generator.sample`.
    """
    rest, done = iter(plan), 0
    rules = (settings.guidance, settings.warp, settings.sampler, known, on_step)
    many = at_a_time(generator, settings, known, features, control)
    while part := list(islice(rest, many)):
        asked, seeds = [p[0] for p in part], [p[1] for p in part]
        hints = None if control is None else control(range(done, done + len(part)))
        done += len(part)
        if features is None:
            yield generator.sample(asked, seeds, *rules, control=hints, size=size)
        else:
            yield generator.sample(None, seeds, *rules, prompts=features.rows(asked), control=hints, size=size)


def at_a_time(
    generator: Generator,
    settings: SamplingConfig,
    known: Any = None,
    features: Features | None = None,
    control: Any = None,
) -> int:
    """Images that one call of `sample` should draw: the engine's batch, or several where rows are refilled."""
    plain = known is None and features is None and not control
    return settings.engine.batch * (BATCHES if plain and generator.refills(settings.sampler) else 1)


def check_seed(seed: int) -> None:
    """Raises `UserError` for a number that `checks.Seed` does not hold."""
    if seed not in SEEDS:
        raise UserError(f"seed {seed} is no seed; it must lie within 0 and 2^63 - 1")
