"""Timed training steps of any config on random data: the loop's own step, without checkpoints, logs and reading.

The data lie in memory, so this is what the device (or several, under `accelerate launch`) can do; a real run shows the
share of its time that it waits for data.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from visgen.config import UserError
from visgen.data import Batch
from visgen.metrics.timing import Stopwatch
from visgen.model import Model
from visgen.objectives import Objective
from visgen.speed import peak as held
from visgen.train.ema import EmaConfig
from visgen.train.loop import prepare
from visgen.train.optim import OptimConfig
from visgen.train.state import LoopConfig, State
from visgen.train.step import train_step
from visgen.train.throughput import operations, peak, speeds


@dataclass(frozen=True)
class Measured:
    """Steps of a global batch.

    Attributes:
        batch, processes, accumulation: images of a step, and how they are dealt out.
        seconds: of a step, median over laps; first: of the first one, which compiles.
        images_per_s, tokens_per_s, mfu: of all processes together; None where they have no meaning, or no known peak.
        gflop: an image's operations, in 10^9.
        peak_bytes: most that the allocator of the main process held; None off CUDA.
        loss: of the exported net, mean over all steps; random data teach nothing.
    """

    batch: int
    processes: int
    accumulation: int
    seconds: float
    first: float
    images_per_s: float
    tokens_per_s: float | None
    mfu: float | None
    gflop: float | None
    peak_bytes: int | None
    loss: float


def measure(
    objective: Objective,
    accelerator: Accelerator,
    loop: LoopConfig,
    optim: OptimConfig,
    ema: EmaConfig,
    laps: int = 3,
    steps: int = 10,
) -> Measured:
    """`laps` of `steps` steps each, after a first step and one more lap; nothing waits for the device within a lap.

    Raises:
        UserError: an objective that needs files to train, or a batch that cannot be dealt out.
    """
    loop = loop.resolved()
    shares = accelerator.num_processes * loop.accumulation
    if loop.batch % shares:
        raise UserError(f"batch {loop.batch} is no multiple of processes x accumulation = {shares}")
    device = accelerator.device
    state = prepare(objective, Path(), [], accelerator, loop, optim, ema)
    batches = [random_batch(objective, loop.batch // shares, device, i) for i in range(loop.accumulation)]
    watch, done = Stopwatch(device, warmup=2), 0
    for count in (1, *[steps] * (1 + laps)):
        with watch.lap():
            for step in range(done, done + count):
                train_step(state, batches, step)
        done += count
    seconds = statistics.median(lap for lap, _ in watch.counted) / steps
    work, rate = operations(objective), peak(device, loop.peak_tflops)
    found = speeds(1 / seconds, loop.batch, objective, work, rate and rate * accelerator.num_processes)
    return Measured(
        batch=loop.batch,
        processes=accelerator.num_processes,
        accumulation=loop.accumulation,
        seconds=seconds,
        first=watch.laps[0][0],
        images_per_s=found["images_per_s"],
        tokens_per_s=found.get("tokens_per_s"),
        mfu=found.get("mfu"),
        gflop=None if work is None else work / 1e9,
        peak_bytes=held(device),
        loss=_loss(state),
    )


def _loss(state: State) -> float:
    means, _ = state.meter.read(state.accelerator)
    return means[f"{state.objective.export}/loss"]


def random_batch(objective: Any, rows: int, device: torch.device, seed: int) -> Batch:
    """Tokens, or pixels, and labels, of one micro-batch.

    Raises:
        UserError: the objective needs a teacher, maps or texts.
    """
    model, rng = objective.exported(), torch.Generator(device).manual_seed(seed)
    if not isinstance(model, Model):
        if objective.config.losses.perceptual > 0 or objective.config.discriminator.kind == "features":
            raise UserError("this tokenizer's losses read a file of perceptual weights, which is not timed here")
        size = (rows, 1, 3, *model.image_size)
        return {"pixels": torch.rand(*size, generator=rng, device=device) * 2 - 1}
    if not objective.shards or model.controls is not None or not hasattr(model.config.condition, "classes"):
        raise UserError("only tokenizers, next_token, masked and acdit, of classes and without control, are timed here")
    label = torch.randint(model.config.condition.classes, (rows,), generator=rng, device=device)
    if model.continuous:
        tokens = torch.randn(rows, model.tokens, model.config.channels or 0, generator=rng, device=device)
    else:
        tokens = torch.randint(model.config.vocab, (rows, model.tokens), generator=rng, device=device)
    return {"tokens": tokens, "label": label}
