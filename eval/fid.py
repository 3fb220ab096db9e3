"""Fréchet distance and KID of images against the held-out split of a data set.

python eval/fid.py --checkpoint assets/fashion32 --data.kind fashion_mnist --n 10000 --out out/eval/fashion32
python eval/fid.py ... --rows generated real recon marginals     # with the rows that make a number readable
accelerate launch eval/fid.py --checkpoint runs/ar_l --data.kind folder --data.root IMAGENET --n 50000 \
    --extractor adm-tf1 --weights pt_inception-2015-12-05-6726825d.pth --reference VIRTUAL_imagenet256_labeled.npz
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from visgen import config as configs
from visgen import evaluate as ev
from visgen import scale
from visgen.checks import Positive, Range, Seed
from visgen.config import UserError, plugin
from visgen.data import Data
from visgen.files import write_text
from visgen.generate import Generator
from visgen.launch import Progress, claim, writable
from visgen.loading import load
from visgen.metrics.chunks import ChunkStore
from visgen.metrics.features import FeatureExtractor, build_extractor
from visgen.metrics.protocol import EvalProtocol, SamplePlan
from visgen.metrics.report import Report, table
from visgen.run_files import Step
from visgen.sample import describe
from visgen.sampling import SamplingConfig
from visgen.scale import CHUNK
from visgen.scored_data import build_pictures, check_checkpoint, fit_size
from visgen.tally import Bundle, Tally, load_bundle, protocol_of, require_reference
from visgen.train.main import data_of

Row = Literal["generated", "real", "recon", "marginals"]


@dataclass(frozen=True)
class FidConfig(SamplingConfig):
    """Scores rows of images under one protocol; writes OUT/<row>/report.{json,md} and OUT/table.md.

    Attributes:
        checkpoint: run directory or Hub id, for the rows generated, recon and marginals.
        step: which step of the run, or `best`; default the newest.
        data: the data set, default that of the run's config.yaml; its held-out split is the reference, its training
            split feeds the other rows. Classes are matched by name.
        rows: generated (by the checkpoint), real (training images), recon (training images through the tokenizer),
            marginals (tokens drawn from per-position histograms).
        n: images per row.
        reference_n: images of the reference; default the whole held-out split.
        labels: balanced: every class equally often; source, for classes of unequal size: as often as in the reference,
            which is the held-out split, or with --reference stands for the training split.
        plan_seed: seed of the sample plan (labels and per-image seeds).
        extractor, weights: feature network and, where it needs one, its weight file.
        extractor_batch: images per pass of the feature network; default by device.
        groups: jackknife groups; 1 leaves the error out.
        allow_small: score although N does not exceed the feature width.
        reference_cache: file that keeps the reference's features between runs.
        reference: in the held-out split's stead, a file of eval/reference.py, or an .npz of the ADM suite; with
            --extractor adm-tf1 the scores are FID, sFID and Inception Score.
        neighbours: precision and recall too.
        chunk: generated images of a chunk: what an interruption costs. The same command goes on where it was, with any
            number of processes.
        npz: write the generated images to OUT/generated/samples.npz, as the ADM suite reads them.
        wandb: mirror the reports to Weights & Biases (offline without a key).
        out: directory of the reports.
    """

    checkpoint: str = ""
    step: Step = None
    data: Any = plugin("visgen.data", None)
    rows: Annotated[tuple[Row, ...], Range(1)] = ("generated",)
    n: Annotated[int, Range(2)] = 10_000
    reference_n: Annotated[int, Range(2)] | None = None
    labels: Literal["balanced", "source"] = "balanced"
    plan_seed: Seed = 0
    extractor: str = "fd_efflite0"
    weights: Path | None = None
    extractor_batch: Positive | None = None
    groups: Positive = 25
    allow_small: bool = False
    reference_cache: Path | None = None
    reference: Path | None = None
    neighbours: bool = False
    chunk: Positive = CHUNK
    npz: bool = False
    wandb: bool = False
    out: Path = Path("out/eval/fid")


@dataclass
class Inputs:
    """What the rows are made of. `train` and `chosen` are there where a row wants them; `labels` are the checkpoint's
    of the data's classes."""

    extractor: FeatureExtractor
    held_out: Data
    plan: SamplePlan
    generator: Generator | None
    train: Data | None
    chosen: Sequence[int]
    labels: torch.Tensor


def main() -> None:
    settings = configs.load(FidConfig, sys.argv[1:], prog="eval/fid.py")
    world = ev.World.current()
    out = writable(settings.out, "--out")
    claim(out)
    inputs = prepare(settings)
    ref, protocol = reference_of(settings, inputs, world)
    reports: dict[str, Report] = {row: score(row, settings, inputs, ref, protocol, world) for row in settings.rows}
    if world.rank == 0:
        text = table(reports, list(next(iter(reports.values())).scores))
        write_text(out / "table.md", text)
        print(text)
        if settings.wandb:
            from visgen.train.mirror import mirror_reports

            mirror_reports(reports, out)


def prepare(settings: FidConfig) -> Inputs:
    """Loads what is asked for.

    Raises:
        UserError: whatever can be refused before the first image.
    """
    needs_checkpoint = [r for r in settings.rows if r != "real"]
    if needs_checkpoint and not settings.checkpoint:
        raise UserError(f"--checkpoint is needed for the rows {', '.join(needs_checkpoint)}")
    if settings.reference_cache:
        writable(settings.reference_cache.parent, "the folder of --reference-cache")
    device, _ = settings.engine.resolve()
    extractor = build_extractor(
        settings.extractor, weights=settings.weights, device=device, batch=settings.extractor_batch
    )
    generator = load(settings.checkpoint, settings.step, settings.engine) if settings.checkpoint else None
    data = settings.data or data_of(settings.checkpoint)
    data = fit_size(data, generator.tokenizer, sys.argv[1:]) if generator else data
    held_out = build_pictures(data, "held_out")
    ref_n = min(settings.reference_n or len(held_out), len(held_out))
    asked = settings.labels == "source" and settings.reference is not None  # what the reference was made of
    train = build_pictures(data, "train") if asked else None
    plan = plan_of(settings, held_out if train is None else train)
    n_ref = ref_n if settings.reference is None else 0  # a file tells its own, and is read below
    ev.check_size(plan, n_ref, extractor, settings.groups, settings.allow_small)
    labels = torch.arange(len(held_out.classes))
    if generator:
        labels = check_checkpoint(held_out, generator, f"checkpoint {settings.checkpoint}")
        if "generated" in settings.rows:
            ev.check_images(generator, settings)
        if "marginals" in settings.rows:
            ev.check_marginals(generator.tokenizer)
    if train is None and set(settings.rows) - {"generated"}:
        train = build_pictures(data, "train")
    chosen = ev.choose(train, plan) if train is not None and {"real", "recon"} & set(settings.rows) else []
    return Inputs(extractor, held_out, plan, generator, train, chosen, labels)


def reference_of(settings: FidConfig, inputs: Inputs, world: ev.World) -> tuple[Bundle, EvalProtocol]:
    """What the rows are compared with: a file's numbers, or those of the held-out split."""
    extractor, held_out, plan = inputs.extractor, inputs.held_out, inputs.plan
    with Progress("reference", world.rank == 0) as step:
        if settings.reference is not None:
            ref = load_bundle(settings.reference, extractor, world, on_step=step)
            require_reference(ref, held_out.image_size)
            return ref, protocol_of(extractor, ref, plan.n, plan.mode, settings.groups, held_out.image_size[0])
        split = ev.reference(held_out, extractor, world, settings.reference_n, settings.reference_cache, step)
        return Bundle.of(split), ev.protocol_of(extractor, split, held_out, plan, settings.groups)


def score(
    row: Row, settings: FidConfig, inputs: Inputs, ref: Bundle, protocol: EvalProtocol, world: ev.World
) -> Report:
    """Makes the images of a row and scores them; writes OUT/<row>/."""
    start, generator, plan = time.perf_counter(), inputs.generator, inputs.plan
    tally = Tally(inputs.extractor, ref, plan.n, settings.groups, world, settings.allow_small, settings.neighbours)
    about: dict[str, Any] = {}
    with Progress(row, world.rank == 0) as step:
        if row == "generated" and generator:
            checks = score_generated(generator, settings, inputs, tally, protocol, step)
            about = describe(settings, generator)
        else:
            checks = tally.take(make_rows(row, settings, inputs, world, step), inputs.extractor, step)
    scores = tally.scores()
    seconds = time.perf_counter() - start
    report = Report(
        protocol,
        scores,
        model={"ckpt": settings.checkpoint or row, **(generator.meta if generator and row != "real" else {})},
        sampling={"row": row, "plan": plan.hash, **{k: v for k, v in about.items() if k != "model"}},
        checks=checks,
        speed={"img_per_s": settings.n / seconds, "device": str(inputs.extractor.device)},
        command=shlex.join(["python", *sys.argv]),
        duration_s=seconds,
    )
    if world.rank == 0:
        report.write(settings.out / row)
    return report


def plan_of(settings: FidConfig, data: Data) -> SamplePlan:
    """The plan; where classes are as often as in a source, that is `data`."""
    classes = len(data.classes)
    if settings.labels == "balanced":
        return SamplePlan(settings.n, classes, settings.plan_seed)
    counts = tuple(torch.bincount(ev.labels_of(data), minlength=classes).tolist())
    return SamplePlan(settings.n, classes, settings.plan_seed, "source", counts)


def score_generated(
    generator: Generator,
    settings: FidConfig,
    inputs: Inputs,
    tally: Tally,
    protocol: EvalProtocol,
    on_step: Callable[[int, int], None],
) -> dict[str, float]:
    """Draws the plan in chunks that an interruption leaves in OUT/generated, and sums them up; the checks on them."""
    world, folder, plan, labels = tally.world, settings.out / "generated", inputs.plan, inputs.labels
    identity = scale.identity_of(generator, settings, plan, labels, inputs.extractor)
    identity |= {"protocol": protocol.hash, "npz": str(settings.npz)}
    store = ChunkStore(folder / "chunks", identity, plan.n, settings.chunk, world.rank)
    shown = plan.n if settings.npz else 0
    work = scale.Work(
        lambda part: scale.drawn(generator, plan, settings, part, labels), inputs.extractor, plan.n, shown
    )
    whole = scale.Whole(plan.n)
    for part, chunk in scale.fill(work, store, world, on_step):
        tally.update(scale.outputs(chunk), torch.arange(part.start, part.stop))
        whole.add(part, chunk)
    whole.reduce(world)
    if world.rank == 0:
        if settings.npz:
            scale.export_npz(store, folder / "samples.npz", generator.tokenizer.image_size)
        store.remove()
    return whole.audit.checks()


def make_rows(
    row: Row, settings: FidConfig, inputs: Inputs, world: ev.World, on_step: Callable[[int, int], None]
) -> ev.Rows:
    """The images of a row that is not generated; `on_step` is told of what goes before the first one."""
    batch, train = settings.engine.batch, inputs.train
    assert train is not None
    if row == "real":
        return ev.pictures(train, inputs.chosen, world)
    assert inputs.generator is not None
    tokenizer = inputs.generator.tokenizer
    if row == "recon":
        return ev.round_trip(tokenizer, ev.pictures(train, inputs.chosen, world, batch))
    return ev.marginals(tokenizer, train, inputs.plan, world, batch, on_step)


if __name__ == "__main__":
    configs.run_program(main)
