"""Fréchet distance of clips against the held-out split of a data set: FVD with a user's I3D file, or offline.

python eval/fvd.py --checkpoint runs/sprites_acdit --data.kind sprites --sampler.kind blockwise --n 2048
python eval/fvd.py ... --rows generated real recon last_frame shuffled     # with the rows that make a number readable
python eval/fvd.py ... --extractor fvd --weights i3d_torchscript.pt        # FVD as StyleGAN-V computes it
python eval/fvd.py ... --sampler.frames 64 --start 48                      # how clips have drifted by then
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from torch import Tensor

from visgen import clip_score as cs
from visgen import config as configs
from visgen import evaluate as ev
from visgen.checks import Natural, Positive, Range, Seed
from visgen.config import UserError, plugin
from visgen.files import write_text
from visgen.generate import Generator
from visgen.launch import Progress, claim, writable
from visgen.loading import load
from visgen.metrics.clips import ClipExtractor, FrameDifferences, I3DFeatures
from visgen.metrics.features import build_extractor
from visgen.metrics.protocol import SamplePlan
from visgen.metrics.report import Report, table
from visgen.run_files import Step
from visgen.sample import describe
from visgen.sampling import SamplingConfig
from visgen.scored_data import build_pictures, check_checkpoint, fit_size
from visgen.train.main import data_of

Row = Literal["generated", "real", "recon", "last_frame", "shuffled"]


@dataclass(frozen=True)
class FvdConfig(SamplingConfig):
    """Scores rows of clips under one protocol; writes OUT/<row>/report.{json,md} and OUT/table.md.

    Attributes:
        checkpoint: run directory or Hub id, for the rows generated and recon.
        step: which step of the run, or `best`; default the newest.
        data: the data set, default that of the run's config.yaml; its held-out split is the reference, its training
            split feeds the other rows.
        rows: generated (by the checkpoint), real (training clips), recon (those through the tokenizer), last_frame
            (of those, standing still), shuffled (their frames in random order).
        n: clips per row.
        reference_n: clips of the reference, every class by its share; default the whole held-out split.
        start: of generated clips, the first frame that is scored.
        plan_seed: seed of the sample plan, of the choice of real clips and of the shuffling.
        extractor: fvd (I3D, with --weights) or fd_clips (frame features and their differences in time).
        frames: frame extractor of fd_clips.
        weights: weight file of I3D, or of the frame extractor where it needs one.
        clips: clips per pass of I3D.
        groups: jackknife groups; 1 leaves the error out.
        allow_small: score although N does not exceed the feature width.
        out: directory of the reports.
    """

    checkpoint: str = ""
    step: Step = None
    data: Any = plugin("visgen.data", None)
    rows: Annotated[tuple[Row, ...], Range(1)] = ("generated",)
    n: Annotated[int, Range(2)] = 2048
    reference_n: Annotated[int, Range(2)] | None = None
    start: Natural = 0
    plan_seed: Seed = 0
    extractor: Literal["fd_clips", "fvd"] = "fd_clips"
    frames: str = "fd_efflite0"
    weights: Path | None = None
    clips: Positive = 8
    groups: Positive = 16
    allow_small: bool = False
    out: Path = Path("out/eval/fvd")


def main() -> None:
    settings = configs.load(FvdConfig, sys.argv[1:], prog="eval/fvd.py")
    needs = [r for r in settings.rows if r in ("generated", "recon")]
    if needs and not settings.checkpoint:
        raise UserError(f"--checkpoint is needed for the rows {', '.join(needs)}")
    world, extractor = ev.World.current(), build(settings)
    generator = load(settings.checkpoint, settings.step, settings.engine) if needs else None
    data = settings.data or data_of(settings.checkpoint)
    data = fit_size(data, generator.tokenizer, sys.argv[1:]) if generator else data
    held_out, asked = build_pictures(data, "held_out"), None
    plan = SamplePlan(settings.n, len(held_out.classes), settings.plan_seed)
    ref_n = min(settings.reference_n or len(held_out), len(held_out))
    if generator:
        if "generated" in settings.rows:
            generator.check_sampling(settings)
            cs.check_length(generator, settings, held_out.frames, settings.start)
        asked = check_checkpoint(held_out, generator, f"checkpoint {settings.checkpoint}")
    ev.check_size(plan, ref_n, extractor, settings.groups, settings.allow_small, "clips")
    out = writable(settings.out, "--out")
    claim(out)
    train = build_pictures(data, "train") if set(settings.rows) - {"generated"} else None
    with Progress("reference", world.rank == 0) as step:
        ref = cs.reference(held_out, extractor, ref_n, settings.plan_seed, settings.engine.batch, world, step)
    protocol = ev.protocol_of(extractor, ref, held_out, plan, settings.groups)  # type: ignore[arg-type]
    reports: dict[str, Report] = {}
    for row in settings.rows:
        begun = time.perf_counter()
        with Progress(row, world.rank == 0) as step:
            clips = make_rows(row, settings, generator, train, held_out.frames, plan, asked, world)
            scores, checks = ev.score(clips, ref, extractor, protocol, world, settings.allow_small, step)  # type: ignore[arg-type]
        seconds = time.perf_counter() - begun
        about = describe(settings, generator) if row == "generated" and generator else {}
        reports[row] = Report(
            protocol,
            scores,
            model={"ckpt": settings.checkpoint or row, **(generator.meta if generator and row in needs else {})},
            sampling={"row": row, "start": settings.start, **{k: v for k, v in about.items() if k != "model"}},
            checks=checks,
            speed={"img_per_s": settings.n / seconds, "device": str(extractor.device)},
            command=shlex.join(["python", *sys.argv]),
            duration_s=seconds,
        )
        if world.rank == 0:
            reports[row].write(out / row)
    if world.rank == 0:
        text = table(reports, list(next(iter(reports.values())).scores))
        write_text(out / "table.md", text)
        print(text)


def build(settings: FvdConfig) -> ClipExtractor:
    """The extractor of clips that the settings name."""
    device, _ = settings.engine.resolve()
    if settings.extractor == "fvd":
        return I3DFeatures(settings.weights, device, settings.clips)
    return FrameDifferences(build_extractor(settings.frames, weights=settings.weights, device=device))


def make_rows(
    row: Row,
    settings: FvdConfig,
    generator: Generator | None,
    train: Any,
    frames: int,
    plan: SamplePlan,
    asked: Tensor | None,
    world: ev.World,
) -> cs.Clips:
    """The clips of a row; `asked` [C] are the checkpoint's labels of the data's classes."""
    if row == "generated":
        assert generator is not None
        return cs.generated(generator, plan, settings, frames, settings.start, world, asked)
    chosen = cs.stratified(ev.labels_of(train), settings.n, settings.plan_seed)
    clips = cs.real(train, chosen, settings.engine.batch, world)
    if row == "recon":
        assert generator is not None
        return cs.round_trip(generator.tokenizer, clips)
    return {"real": lambda: clips, "last_frame": lambda: cs.last_frame(clips)}.get(
        row, lambda: cs.shuffled(clips, settings.plan_seed)
    )()


if __name__ == "__main__":
    configs.run_program(main)
