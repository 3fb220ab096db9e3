"""From a checkpoint, a sampler and seeds to uint8 images, or clips."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from visgen import __version__
from visgen import config as configs
from visgen.conditioned import Conditioned, check_no_others, filters
from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.refill import refill, refillable
from visgen.decode.warp import Warp
from visgen.images import Images
from visgen.launch import memory_of, out_of_memory
from visgen.layout import Grid
from visgen.metrics.images import to_uint8
from visgen.model import Model
from visgen.nn.control import Hint
from visgen.prompts import Features, TextConfig, encode
from visgen.samplers import Sampler
from visgen.sampling import EngineConfig, SamplingConfig
from visgen.tokenizers import Tokenizer

BATCHES = 8  # drawn by one call where rows are refilled; its last images leave rows idle


@dataclass(frozen=True)
class Request:
    """What one call of `Generator.sample` draws, read and checked; B images.

    Attributes:
        ids, features: class ids, or what the prompts became; the other is empty, or None.
        seeds: B of them.
        known: tokens [B, N] and which are kept, or None.
        hints: the control, each of one row or B.
    """

    ids: list[int]
    features: Features | None
    seeds: list[int]
    known: tuple[Tensor, Tensor] | None
    hints: list[Hint]

    @property
    def plain(self) -> bool:
        """Labels and seeds are all there is, so that rows may be refilled."""
        return self.features is None and self.known is None and not self.hints

    def batch(self, part: slice, device: torch.device) -> dict[str, Any]:
        """What the engine is told of the images `part`."""
        batch: dict[str, Any]
        if self.features is None:
            batch = {"label": torch.tensor(self.ids[part], device=device)}
        else:
            batch = dict(self.features.rows(range(len(self.seeds))[part]).batch(device))
        if self.hints:
            batch["hints"] = [_rows(hint, part, device) for hint in self.hints]
        return batch


class Generator(Conditioned):
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
        super().__init__(
            model.to(self.device, self.dtype).eval(), tokenizer.to(self.device).eval(), classes, self.device
        )
        self.meta = meta or {}
        self._engine: Engine | None = None

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
        control: Hint | Sequence[Hint] | Tensor | None = None,
        size: tuple[int, int] | None = None,
        num: int | None = None,
        seed: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        paste: bool = True,
        **unknown: Any,
    ) -> Images:
        """Draws one image per label or prompt, `engine.batch` at once; image i depends on seed i, not on its batch.

        Where images take unequally long, a row that is complete goes on with the next one (`decode/refill.py`).

        Args:
            labels: class ids or names, B of them; or one, for all seeds. A model of one class needs none.
            seeds: B whole numbers from 0 to 2^63 - 1; default 0 .. B - 1.
            guidance: a `Guidance` or just its scale.
            warp: temperature, top-k and top-p as a `Warp`; or give them by their names.
            sampler: config of a sampler plugin, or its kind; default the model's own.
            known: (pixels [1 or B, 3, H, W] in [-1, 1], mask [1 or B, H, W] bool, true = keep): completion and
                inpainting. A token is kept when all of its pixels are; in raster order the model looks back only. Of
                clips, the first frames: [1 or B, T, 3, H, W] and [1 or B, T, H, W].
            on_step: called as on_step(done, total) over all batches.
            prompts: of a model of texts instead of labels, B of them; or one, for all seeds; or their features
                (`encode`, `visgen.prompts.read`).
            text: how prompts become features.
            control: of a model trained for one, maps [1 or B, 3, H, W] in [-1, 1] of the size of the images; or
                `Hint`s, whose additions are summed.
            size: (H, W) in pixels, multiples of the tokenizer's stride; default the checkpoint's own.
            num: images of each label or prompt; default 1.
            seed: instead of seeds, that of the first image; image i has `seed + i`.
            temperature, top_k, top_p: instead of warp.
            paste: put the known pixels back into the images. The decoder changes them, though their tokens are kept.

        Raises:
            UserError: a value that is not one of these, or that the model cannot follow; or an unknown argument.
        """
        check_no_others(unknown, self.sample)
        warp = filters(warp, temperature=temperature, top_k=top_k, top_p=top_p)
        ids, wanted, seeds = self.plan(labels, prompts, seeds, num, seed)
        grid = self.grid_of(size)
        hints = self.hints(control, len(seeds), grid)
        guidance, warp = self.rules(guidance, warp, bool(hints))
        if known is not None and grid != self.model.grid:
            raise UserError(
                f"a known image goes with the checkpoint's own size {self.tokenizer.image_size}; leave size out"
            )
        config = self._sampler_config(sampler or self.model.backbone.sampler)
        built: Sampler = configs.build(config)
        self.check_memory(grid, min(len(seeds), self.settings.batch), guidance.branches)
        engine = self._engine_for(guidance, warp, grid)
        pinned = None if known is None else self.known_tokens(known, len(seeds))
        features = self.encode(wanted, text) if isinstance(wanted, list) else wanted
        request = Request(ids, features, seeds, pinned, hints)
        parts = self._parts(engine, built, request, on_step)
        images = Images.joined(parts, ids, seeds, [] if features is None else features.prompts)
        images.settings = {
            "visgen": __version__,
            **self.describe(SamplingConfig(config, guidance, warp, self.settings)),
        }
        images.settings |= {"text": features.about} if features is not None else {}
        images.settings |= {"control": [_describe_hint(hint) for hint in hints]} if hints else {}
        if known is not None:
            images.settings["known"] = {"sha256": _digest(to_uint8(known[0]), known[1]), "paste": paste}
            if paste:
                images.paste(*known)
        return images

    def _sampler_config(self, sampler: Any) -> Any:
        """Return the config of a sampler that is given by its kind, or is one."""
        if isinstance(sampler, str):
            return configs.plugin_config("visgen.samplers", sampler)
        if not dataclasses.is_dataclass(sampler):
            raise UserError(
                f"sampler is a {type(sampler).__name__}; pass a kind, such as '{self.model.backbone.sampler}', or the "
                "Config of its module in visgen.samplers"
            )
        return sampler

    def _parts(self, engine: Engine, sampler: Sampler, request: Request, on_step: Any) -> list[Images]:
        """The batches of a request."""
        count, size = len(request.seeds), self.settings.batch
        if request.plain and self.refills(sampler):
            size = max(size, count)  # of which `engine.batch` at once
        parts = []
        for start in range(0, count, size):
            part = slice(start, start + size)
            known = None if request.known is None else (request.known[0][part], request.known[1][part])

            def progress(done: int, total: int, start: int = start) -> None:
                if on_step is not None:
                    on_step(start // size * total + done, -(-count // size) * total)

            told = request.batch(part, self.device)
            parts.append(self._batch(engine, sampler, told, request.seeds[part], known, progress))
        return parts

    def describe(self, settings: SamplingConfig) -> dict[str, Any]:
        """Return what makes an image under these settings: model, sampler, guidance, filters, engine."""
        kept = {k: v for k, v in configs.dump(settings).items() if k in ("sampler", "guidance", "warp", "engine")}
        if self.model.backbone.taught is not None:  # what a student has learned, whatever is left out
            kept |= zip(("guidance", "warp"), map(configs.dump, self.model.backbone.taught), strict=True)
        precision = str(self.dtype).removeprefix("torch.")
        kept["engine"] |= {"kind": self.engine_kind, "device": self.device.type, "precision": precision}
        return {"model": self.meta, **kept}

    def frames(self, sampler: Any = None) -> int:
        """Frames of what this model draws, by this sampler's config; 1 of images."""
        latent: int = getattr(sampler, "frames", None) or self.model.grid[0]
        return latent // self.tokenizer.grid[0]

    def refills(self, sampler: Any) -> bool:
        """Whether rows go on with the next image with this sampler, or the one of this config."""
        return refillable(self.model, sampler if isinstance(sampler, Sampler) else configs.build(sampler))

    @torch.inference_mode()
    def check_sampling(self, settings: SamplingConfig) -> None:
        """Refuses guidance, filters or a sampler that do not fit a class-conditional model, before anything is drawn; a
        draft model or teacher is read for it."""
        guidance, warp = self.rules(settings.guidance, settings.warp, controlled=False)
        sampler = settings.sampler
        if getattr(sampler, "window", None) == "auto":  # whose choice takes a trial
            sampler = replace(sampler, window=1)
        built: Sampler = configs.build(sampler)
        Engine(self.model, guidance, warp, self.meta.get("tokenizer")).rehearse(built)

    def check_memory(self, grid: Grid, rows: int, branches: int) -> None:
        """Refuses images whose pixels and cache alone are more than there is: a CPU ends a process without a word."""
        own = self.model.tokens
        each = 3 * 4 * math.prod(self.tokenizer.image_size) * self.model.grid[0] / own  # bytes a token: decoded pixels
        if self.model.backbone.cached:
            cache = self.model.backbone.make_cache(branches, torch.device("meta"), self.dtype)
            each += (cache.keys.nbytes + cache.values.nbytes) / cache.keys.shape[3]
        needed, there = each * rows * math.prod(grid), memory_of(self.device)
        if needed > there:
            what = "--engine.batch" if rows > 1 else "--size"
            raise UserError(
                f"{rows} image{'s' * (rows > 1)} of {math.prod(grid)} tokens at once take {needed / 1e9:,.0f} GB or "
                f"more, there are {there / 1e9:,.0f} GB of memory; lower {what}"
            )

    def _engine_for(self, guidance: Guidance, warp: Warp, grid: Grid) -> Engine:
        """The last call's engine, with what it measured and loaded, where the settings are the same."""
        engine = self._engine
        if engine is None or (engine.guidance, engine.warp, engine.grid) != (guidance, warp, grid):
            if engine is not None:
                engine = self._engine = None
                gc.collect()  # a sampler's state may refer to its engine, whose buffers go before new ones are made
            model = self.model.at(grid)
            engine = self._engine = self.settings.make(model, guidance, warp, self.meta.get("tokenizer"))
        return engine

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
            decoded = (self.tokenizer.decode(part, **other) for part in generation.tokens.split(rows))
            checked = [(to_uint8(part).cpu(), part.isfinite().flatten(1).all(1).cpu()) for part in decoded]
            frames, finite = (torch.cat(of) for of in zip(*checked, strict=True))  # [B, T, 3, H, W], [B]
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise UserError(
                f"{rows} images at once do not fit the memory of {self.device}; lower --engine.batch"
            ) from None
        if not finite.all():
            lost = seeds[int(finite.float().argmin())]
            raise UserError(
                f"the image of seed {lost} has pixels that are not finite; try --engine.precision fp32, less guidance "
                "or temperature, or another step of the run"
            )
        seconds = time.perf_counter() - start
        tokens, rounds = generation.tokens.cpu(), generation.rounds.cpu()
        clips = frames if frames.shape[1] > 1 else None
        return Images(frames[:, 0], tokens, [], seeds, generation.nfe, seconds, rounds, generation.notes, clips=clips)


def _digest(*tensors: Tensor) -> str:
    """Return the beginning of a SHA-256 of the values."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:12]


def _describe_hint(hint: Hint) -> dict[str, Any]:
    """Return what an image's settings say of a control that was given as tensors."""
    region = [] if hint.region is None else [hint.region.float()]
    strength = torch.as_tensor(hint.strength).flatten().tolist()
    return {"sha256": _digest(to_uint8(hint.map), *region), "strength": strength}


def _rows(hint: Hint, part: slice, device: torch.device) -> Hint:
    """The rows `part` of a hint, on the device."""
    maps = (hint.map[part] if len(hint.map) > 1 else hint.map).to(device)
    region = hint.region
    if region is not None:
        region = (region[part] if len(region) > 1 else region).to(device)
    return Hint(maps, hint.strength, region)


def stream(
    generator: Generator,
    plan: Iterable[tuple[int, int]],
    settings: SamplingConfig,
    known: tuple[Tensor, Tensor] | None = None,
    on_step: Any = None,
    features: Features | None = None,
    control: Callable[[range], Sequence[Hint]] | None = None,
    size: tuple[int, int] | None = None,
    paste: bool = True,
) -> Iterator[Images]:
    """Images of a plan of (label, seed) pairs, batch by batch, for programs that need many. Reads it as it goes.

    Args:
        known: as for `Generator.sample`, one picture and one mask for all.
        on_step: called as on_step(done, total) within each batch of `at_a_time` images.
        features: of a model of texts; the plan then has (row of them, seed) pairs.
        control: gives the hints of the images with these numbers in the plan.
        size, paste: as for `Generator.sample`.
    """
    rest, done = iter(plan), 0
    rules = (settings.guidance, settings.warp, settings.sampler, known, on_step)
    many = at_a_time(generator, settings, known, features, control)
    while part := list(islice(rest, many)):
        asked, seeds = [p[0] for p in part], [p[1] for p in part]
        hints = None if control is None else control(range(done, done + len(part)))
        done += len(part)
        if features is None:
            yield generator.sample(asked, seeds, *rules, control=hints, size=size, paste=paste)
        else:
            rows = features.rows(asked)
            yield generator.sample(None, seeds, *rules, prompts=rows, control=hints, size=size, paste=paste)


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
