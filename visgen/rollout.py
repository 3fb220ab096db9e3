"""Clips beyond the length that a model was trained on: how far they drift, and what memory they take.

Blockwise diffusion goes on past the trained length block by block (`samplers/blockwise.py`). A window of as many frames
as training had, moved along the rollout, is scored against real clips of that length: the distance at its place is the
drift. Memory is that of the cache, which holds the clean blocks that a block may look back on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from visgen import clip_score as cs
from visgen import config as configs
from visgen import evaluate as ev
from visgen.config import UserError
from visgen.decode.noise import Noise
from visgen.generate import Generator
from visgen.metrics.plots import Panel
from visgen.metrics.protocol import EvalProtocol, SamplePlan, Score
from visgen.sampling import SamplingConfig


@dataclass(frozen=True)
class Memory:
    """What decoding clips of a length holds.

    Attributes:
        frames: of a clip; clips: decoded at once.
        context: blocks that are looked back on; None: all.
        cache_bytes: of keys and values.
        peak_bytes: most that the allocator held besides the weights; None off CUDA.
        seconds: of a decode with one step a block, kernels compiled before.
    """

    frames: int
    clips: int
    context: int | None
    cache_bytes: int
    peak_bytes: int | None
    seconds: float


def sampler_of(settings: SamplingConfig, frames: int, context: int | None, **values: Any) -> Any:
    """The settings' sampler for clips of that many frames.

    Raises:
        UserError: it is not `blockwise`.
    """
    if configs.kind_of(settings.sampler) != "blockwise":
        raise UserError(f"sampler {configs.kind_of(settings.sampler)} draws no clips block by block; use blockwise")
    return replace(settings.sampler, frames=frames, context=context, **values)


@torch.inference_mode()
def memory(generator: Generator, settings: SamplingConfig, frames: int, context: int | None, clips: int) -> Memory:
    """Decodes `clips` clips of `frames` frames, without their pixels, by an engine of its own."""
    device, model = generator.device, generator.model
    cuda = device.type == "cuda"
    if cuda:
        gc.collect()  # the engine of before, whose memory is not this one's
        torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device) if cuda else 0
    engine = generator.settings.make(model, settings.guidance)
    sampler = configs.build(sampler_of(settings, frames, context, steps=1))
    for _ in range(2):
        if cuda:
            torch.cuda.reset_peak_memory_stats(device)
        engine.begin({"label": torch.arange(clips, device=device) % model.config.condition.classes})
        seconds = engine.run(sampler, Noise(torch.arange(clips, device=device))).seconds
    return Memory(
        frames=frames,
        clips=clips,
        context=context,
        cache_bytes=engine.cache_bytes,
        peak_bytes=torch.cuda.max_memory_allocated(device) - before if cuda else None,
        seconds=seconds,
    )


def rolled(
    generator: Generator,
    plan: SamplePlan,
    settings: SamplingConfig,
    frames: int,
    context: int | None,
    on_step: Callable[[int, int], None] | None = None,
    labels: Tensor | None = None,
) -> Tensor:
    """uint8 clips [n, F, 3, H, W] of the plan's labels and seeds, on the CPU; with `labels`, what the plan balances are
    these."""
    drawn: list[Tensor] = []
    asked = replace(settings, sampler=sampler_of(settings, frames, context))
    for clips, _ in cs.generated(generator, plan, asked, frames, labels=labels):
        drawn.append(clips)
        if on_step is not None:
            on_step(sum(map(len, drawn)), plan.n)
    return torch.cat(drawn)


def drift(
    clips: Tensor, window: int, starts: range, ref: ev.Reference, extractor: Any, protocol: EvalProtocol, **more: Any
) -> dict[int, dict[str, Score]]:
    """The scores of frames start .. start + window - 1 of clips uint8 [n, F, 3, H, W], for each start."""
    batch, found = 32, {}
    for start in starts:
        rows = (
            (part[:, start : start + window], torch.arange(i * batch, i * batch + len(part)))
            for i, part in enumerate(clips.split(batch))
        )
        found[start] = ev.score(rows, ref, extractor, protocol, **more)[0]
    return found


def name_of(context: int | None) -> str:
    return "all blocks" if context is None else f"context {context}"


def drift_table(found: dict[str, dict[int, dict[str, Score]]], metric: str = "fd") -> str:
    """Markdown: a row for each kind of clips, a column for each first frame."""
    starts = list(next(iter(found.values())))
    lines = [f"| {metric} of frames from | {' | '.join(map(str, starts))} |", "|---" * (len(starts) + 1) + "|"]
    for name, row in found.items():
        shown = (
            f"{s.value:.5g}" + (f" ± {s.se:.2g}" if s.se is not None else "") for s in (row[i][metric] for i in starts)
        )
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def memory_table(found: list[Memory]) -> str:
    """Markdown: a row for each context, a column for each length; MiB of the cache, and the peak where it is known."""
    lengths = sorted({m.frames for m in found})
    lines = [f"| MiB, of frames | {' | '.join(map(str, lengths))} |", "|---" * (len(lengths) + 1) + "|"]
    for context in dict.fromkeys(m.context for m in found):
        row = {m.frames: m for m in found if m.context == context}
        cells = []
        for frames in lengths:
            peak = row[frames].peak_bytes
            most = "" if peak is None else f" (peak {peak / 2**20:.1f})"
            cells.append(f"{row[frames].cache_bytes / 2**20:.2f}{most}")
        lines.append(f"| {name_of(context)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def drift_panel(found: dict[str, dict[int, dict[str, Score]]], metric: str = "fd") -> Panel:
    curves = {
        name: [(float(start), scores[metric].value, scores[metric].se) for start, scores in row.items()]
        for name, row in found.items()
    }
    return Panel("first frame of the window", metric, curves)


def memory_panel(found: list[Memory]) -> Panel:
    curves: dict[str, list[tuple[float, float, float | None]]] = {}
    for m in found:
        curves.setdefault(name_of(m.context), []).append((float(m.frames), m.cache_bytes / 2**20, None))
    return Panel("frames", "cache, MiB", curves)
