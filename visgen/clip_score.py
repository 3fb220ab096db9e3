"""Rows of clips for one protocol: what `eval/fvd.py` is made of, as `evaluate.py` is of images.

Beside what a model draws stand the rows that make a number readable: real clips, the tokenizer's round trip (the best
that a model of its tokens can do), and two that a distance must see through: a real frame that never moves, and real
frames in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from visgen import evaluate as ev
from visgen.config import UserError, kind_of
from visgen.data import Data
from visgen.generate import Generator
from visgen.metrics.protocol import SamplePlan
from visgen.sampling import SamplingConfig

Clips = Iterator[tuple[Tensor, Tensor]]  # (pixels uint8 or float in [-1, 1] [B, T, 3, H, W], plan index [B])


def stratified(labels: Tensor, n: int, seed: int) -> list[int]:
    """n places in `labels`, each once, every class by its share, chosen by `seed`; in the order of the source.

    Raises:
        UserError: fewer than n.
    """
    if n > len(labels):
        raise UserError(f"{n} clips are asked for, the data have {len(labels)}; lower --n or --reference-n")
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    order = order[labels[order].argsort(stable=True)]  # class by class, each in random order
    kept = order[torch.arange(n) * len(labels) // n]  # evenly over the classes
    return kept.sort().values.tolist()


def reference(
    data: Data,
    extractor: Any,
    n: int | None,
    seed: int,
    batch: int,
    world: ev.World | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> ev.Reference:
    """Statistics of `n` clips (default all) of a split."""
    chosen = stratified(ev.labels_of(data), n or len(data), seed)
    features, audit = ev.collect(real(data, chosen, batch, world), len(chosen), extractor, world, on_step)
    stride = getattr(data.config, "stride", 1)
    name = f"{kind_of(data.config)}/{data.split}-{data.frames}f-s{stride}"
    return ev.Reference(name, audit.hash, ev.stats_of(features), features)


def real(data: Data, chosen: Sequence[int], batch: int, world: ev.World | None = None) -> Clips:
    """Plain clips `chosen` of `data`; their place in `chosen` is their index."""
    for places in ev.shares(len(chosen), world, batch):
        yield data.get_many([chosen[i] for i in places])["pixels"], torch.tensor(places)


def last_frame(clips: Clips) -> Clips:
    """The last frame of each clip, standing still."""
    for pixels, index in clips:
        yield pixels[:, -1:].expand_as(pixels), index


def shuffled(clips: Clips, seed: int) -> Clips:
    """The frames of each clip in an order of its own."""
    for pixels, index in clips:
        keys = [torch.Generator().manual_seed(seed + int(i)) for i in index]
        orders = torch.stack([torch.randperm(pixels.shape[1], generator=key) for key in keys])
        yield pixels[torch.arange(len(pixels)).unsqueeze(1), orders], index


def round_trip(tokenizer: Any, clips: Clips) -> Clips:
    """The same clips through the tokenizer and back, in fp32."""
    for pixels, index in clips:
        yield ev.reconstruct(tokenizer, pixels)[1], index


def check_length(generator: Generator, settings: SamplingConfig, frames: int, start: int) -> None:
    """Raises `UserError` where the model draws images, or clips that are too short."""
    drawn = generator.frames(settings.sampler)
    if drawn == 1:
        raise UserError("the model draws single images; score them by eval/fid.py")
    if drawn < start + frames:
        raise UserError(
            f"the model draws {drawn} frames, {start + frames} are to be scored; set --data.frames "
            "and --start to what it draws, or --sampler.frames"
        )


def generated(
    generator: Generator,
    plan: SamplePlan,
    settings: SamplingConfig,
    frames: int,
    start: int = 0,
    world: ev.World | None = None,
    labels: Tensor | None = None,
) -> Clips:
    """Clips drawn by a model under the plan's labels and seeds: `frames` frames of each from `start` on; with `labels`,
    what the plan balances are these.

    Raises:
        UserError: as `check_length`.
    """
    check_length(generator, settings, frames, start)
    world = world or ev.World()
    rows = plan.rows(world.rank, world.size)
    rows = rows if labels is None else replace(rows, label=labels[rows.label])
    for at in range(0, len(rows), settings.engine.batch):
        part = slice(at, at + settings.engine.batch)
        asked, seeds = rows.label[part].tolist(), rows.seed[part].tolist()
        clips = generator.sample(asked, seeds, settings.guidance, settings.warp, settings.sampler).clips
        assert clips is not None
        yield clips[:, start : start + frames], rows.index[part]
