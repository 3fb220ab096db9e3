"""Sweeps of samplers under one protocol: one report with tables, pictures and Pareto plots.

python eval/report.py configs/eval/emoji64.yaml
python eval/report.py --checkpoint assets/fashion32 --data.kind fashion_mnist --score fd --n 10000 \
    --rows "ar: sampler.kind=ar guidance.scale=1,1.1,1.2,1.5"
accelerate launch eval/report.py configs/eval/emoji64.yaml      # the same numbers, images dealt out over the GPUs
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from visgen import config as configs
from visgen import evaluate as ev
from visgen import speed, sweep
from visgen.checks import Positive, Range, Seed
from visgen.config import UserError, plugin
from visgen.data import Data
from visgen.generate import Generator
from visgen.launch import Progress, claim, writable
from visgen.metrics.features import FeatureExtractor, build_extractor
from visgen.metrics.protocol import SamplePlan
from visgen.scale import CHUNK
from visgen.scored_data import build_pictures, check_checkpoint, fit_size
from visgen.small_set import SmallSet
from visgen.sweep import Cell, CellConfig, Generators, Run, Target
from visgen.sweep_report import SweepReport
from visgen.train.main import data_of
from visgen.train.mirror import mirror_sweep


@dataclass(frozen=True)
class SweepConfig(CellConfig):
    """Draws, scores and times every cell; writes OUT/report.{json,md}, pareto_*.png, same_seeds.png, grid_*.png. A
    cell that is done, and a chunk of one that is not, stay in OUT/cells over an interruption.

    Attributes:
        title: heading of the report.
        rows: "name: setting=value setting=value,value,..": how images are drawn, in addition to the settings above; a
            value with commas is an axis. The first cell is the baseline.
        sweep: settings that every row has, axes too, such as guidance.scale=1,2,4 or step=1000,2000.
        data: the data set; default that of the first checkpoint's config.yaml.
        score: fd (Fréchet distance and KID against the held-out split) or kid (by base, for a small set:
            docs/small_sets.md).
        n: images of a cell; default 10,000, with kid ten for each held-out base.
        plan_seed: seed of the sample plan. Choose settings under one seed, report them under another.
        reference_n, reference_cache: as in eval/fid.py, for fd.
        extractor, weights: feature network and, where it needs one, its weight file.
        extractor_batch: images per pass of the feature network; default by device.
        groups: jackknife groups.
        allow_small: score fd although N does not exceed the feature width.
        batches: batch sizes that are timed; none with `--no-timed`.
        timed: time the cells.
        repeats: decodes of a timing after the first one; their median counts.
        shown: images of a cell's grid.
        chunk: images of a chunk, what an interruption costs.
        wandb: mirror the report to Weights & Biases (offline without a key).
        out: directory of the report.
    """

    title: str = "Samplers"
    rows: Annotated[tuple[str, ...], Range(1)] = ("ar: sampler.kind=ar",)
    sweep: tuple[str, ...] = ()
    data: Any = plugin("visgen.data", None)
    score: Literal["fd", "kid"] = "fd"
    n: Annotated[int, Range(2)] | None = None
    plan_seed: Seed = 0
    reference_n: Annotated[int, Range(2)] | None = None
    reference_cache: Path | None = None
    extractor: str = "fd_efflite0"
    weights: Path | None = None
    extractor_batch: Positive | None = None
    groups: Annotated[int, Range(2)] = 25
    allow_small: bool = False
    batches: tuple[Positive, ...] = (1, 16)
    timed: bool = True
    repeats: Positive = 3
    shown: Positive = 36
    chunk: Positive = CHUNK
    wandb: bool = True
    out: Path = Path("out/eval/report")


def main() -> None:
    settings = configs.load(SweepConfig, sys.argv[1:], prog="eval/report.py")
    world = ev.World.current()
    out = writable(settings.out, "--out")
    claim(out)
    base = CellConfig(
        settings.sampler, settings.guidance, settings.warp, settings.engine, settings.checkpoint, settings.step
    )
    cells = sweep.cells_of(settings.rows, settings.sweep, base)
    device, _ = settings.engine.resolve()
    extractor = build_extractor(
        settings.extractor, weights=settings.weights, device=device, batch=settings.extractor_batch
    )
    data, generators = settings.data or data_of(cells[0].settings.checkpoint), Generators()
    data = fit_size(data, generators.get(cells[0].settings).tokenizer, sys.argv[1:])
    pictures: Any = SmallSet(data) if settings.score == "kid" else build_pictures(data, "held_out")
    for cell in cells:  # whatever can be refused is refused before the first image
        check(cell, generators, pictures.held_out if settings.score == "kid" else pictures)
    target = make_target(settings, pictures, extractor, generators.get(cells[0].settings), world)
    run = Run(
        target,
        extractor,
        world,
        out / "cells",
        settings.shown,
        settings.batches if settings.timed else (),
        settings.repeats,
        settings.chunk,
    )
    copy = speed.bandwidth(device) if settings.timed and world.rank == 0 else 1.0
    found = []
    with Progress("cells", world.rank == 0) as step:
        for i, cell in enumerate(cells):
            found.append(sweep.measure(cell, generators.get(cell.settings), run, copy))
            step(i + 1, len(cells))
    if world.rank:
        return
    report = SweepReport(settings.title, configs.dump(settings), target, found, shlex.join(["python", *sys.argv]))
    values = report.write(out)
    print(report.markdown(values))
    if settings.wandb:
        print(mirror_sweep(values, out), file=sys.stderr)


def check(cell: Cell, generators: Generators, held_out: Data) -> None:
    """Refuses a cell that cannot be drawn, or not be compared with these pictures."""
    try:
        generator = generators.get(cell.settings)
        check_checkpoint(held_out, generator, f"checkpoint {cell.settings.checkpoint}")
        ev.check_images(generator, cell.settings)
    except UserError as error:
        raise UserError(f"row '{cell.name}': {error}") from None


def make_target(
    settings: SweepConfig, pictures: Any, extractor: FeatureExtractor, generator: Generator, world: ev.World
) -> Target:
    """What the cells are scored against: a `SmallSet`, or held-out pictures.

    Raises:
        UserError: too few images.
    """
    if settings.score == "kid":
        how = (settings.n, settings.plan_seed, settings.groups, world)
        return sweep.small_target(pictures, extractor, *how, generator.tokenizer, settings.engine.batch)
    held_out = pictures
    plan = SamplePlan(settings.n or 10_000, len(held_out.classes), settings.plan_seed)
    ref_n = min(settings.reference_n or len(held_out), len(held_out))
    ev.check_size(plan, ref_n, extractor, settings.groups, settings.allow_small)
    rest = (settings.reference_n, settings.reference_cache, settings.allow_small)
    return sweep.large_target(held_out, extractor, plan, settings.groups, world, *rest)


if __name__ == "__main__":
    configs.run_program(main)
