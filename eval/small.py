"""A generator of a small data set against its held-out pictures: KID with errors, copies or not, likelihood.

python eval/small.py --checkpoint runs/emoji64_ar --guidance.scale 2 --out out/eval/emoji64
python eval/small.py --checkpoint DIR --step best --data.kind emoji --data.hflip    # where DIR has no config.yaml
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import dataclasses
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from visgen import config as configs
from visgen import evaluate as ev
from visgen import small_set as small
from visgen.checks import Positive, Range, Seed
from visgen.config import UserError, plugin
from visgen.generate import Generator
from visgen.launch import Progress, claim, writable
from visgen.loading import load
from visgen.metrics.features import FeatureExtractor, build_extractor
from visgen.metrics.images import ImageAudit
from visgen.metrics.neighbours import histograms, nearest, suspects
from visgen.metrics.plots import save_picture
from visgen.metrics.protocol import SamplePlan
from visgen.metrics.report import Report
from visgen.pictures import grid
from visgen.run_files import Step
from visgen.sample import describe
from visgen.sampling import SamplingConfig
from visgen.scored_data import check_checkpoint, fit_size
from visgen.small_set import SmallSet
from visgen.train.main import data_of


@dataclass(frozen=True)
class SmallConfig(SamplingConfig):
    """Scores a checkpoint on a small data set; writes OUT/report.{json,md}, neighbours.png, neighbours_held_out.png and
    distances.png. How to read them: docs/small_sets.md.

    Attributes:
        checkpoint: run directory or Hub id.
        step: which step of the run, or `best`; default the newest.
        data: the data set; default that of the run's config.yaml. Mirror images count as training images where
            data.hflip is on.
        n: images to generate, a multiple of the held-out base pictures; default ten for each.
        plan_seed: seed of the sample plan, and of what is chosen at random from the training images.
        extractor, weights: feature network and, where it needs one, its weight file.
        extractor_batch: images per pass of the feature network; default by device.
        groups: jackknife groups of base pictures.
        shown: images in neighbours.png.
        out: directory of the report.
    """

    checkpoint: str = ""
    step: Step = None
    data: Any = plugin("visgen.data", None)
    n: Positive | None = None
    plan_seed: Seed = 0
    extractor: str = "fd_efflite0"
    weights: Path | None = None
    extractor_batch: Positive | None = None
    groups: Annotated[int, Range(2)] = 25
    shown: Positive = 24
    out: Path = Path("out/eval/small")


def main() -> None:
    settings = configs.load(SmallConfig, sys.argv[1:], prog="eval/small.py")
    if not settings.checkpoint:
        raise UserError("--checkpoint is needed: a run directory, or a Hub id")
    world = ev.World.current()
    out = writable(settings.out, "--out")
    claim(out)
    device, _ = settings.engine.resolve()
    extractor = build_extractor(
        settings.extractor, weights=settings.weights, device=device, batch=settings.extractor_batch
    )
    generator = load(settings.checkpoint, settings.step, settings.engine)
    data = SmallSet(fit_size(settings.data or data_of(settings.checkpoint), generator.tokenizer, sys.argv[1:]))
    asked = check_checkpoint(data.held_out, generator, f"checkpoint {settings.checkpoint}")
    ev.check_images(generator, settings)
    plan = data.plan(settings.n, settings.plan_seed)
    start, m = time.perf_counter(), len(data.bases)
    pixels, drawn, audit = draw(settings, generator, asked[data.labels], data, plan, extractor, world)
    seconds = time.perf_counter() - start
    tokenizer, batch = generator.tokenizer, settings.engine.batch
    real = small.known(data, tokenizer, extractor, plan.n // m, settings.plan_seed, world, batch)
    by_base = drawn[plan.rows().label.argsort(stable=True)].view(m, -1, drawn.shape[1])  # [M, R, D]
    scores = small.kid_rows(by_base, real, data.halves(settings.plan_seed), settings.groups)
    counted = not generator.model.continuous  # a likelihood is that of codes
    scores |= small.likelihood(generator.model, tokenizer, data, asked, batch) if counted else {}
    near = {
        name: nearest(x, real.views, 3)
        for name, x in (("generated", drawn), ("copies", real.copies), ("held_out", real.recon))
    }
    distances = {name: distance[:, 0].contiguous() for name, (distance, _) in near.items()}
    scores |= small.newness(distances)
    if world.rank:
        return
    protocol = ev.protocol_of(extractor, real.held_out, data.held_out, plan, settings.groups)
    report = Report(
        dataclasses.replace(protocol, labels="source", estimator="kid-by-base-f64"),
        scores,
        model={"ckpt": settings.checkpoint, **generator.meta},
        sampling={"plan": plan.hash, **{k: v for k, v in describe(settings, generator).items() if k != "model"}},
        checks={**audit.checks(), "kid_limit": small.kid_limit(scores), "kid_passes": small.passes(scores)},
        speed={"img_per_s": plan.n / seconds, "device": str(device)},
        remarks=[
            small.verdict(scores),
            *([small.likelihood_table(scores)] if counted else []),
            small.quantile_table(distances),
            *(f"![{name}]({name}.png)" for name in ("neighbours", "neighbours_held_out", "distances")),
        ],
        command=shlex.join(["python", *sys.argv]),
        duration_s=time.perf_counter() - start,
    )
    report.write(out)
    held_out = data.held_out.get_many(data.bases)["pixels"][:, 0]
    shown = {"neighbours": (pixels, "generated"), "neighbours_held_out": (held_out, "held_out")}
    for name, (images, of) in shown.items():
        save_picture(sheet(images, *near[of], data, settings.shown), out / f"{name}.png")
    marks = [scores[name].terms["quantile"] for name in scores if name.startswith("generated_below")]
    save_picture(histograms(distances, marks), out / "distances.png")
    print(report.markdown())


def draw(
    settings: SmallConfig,
    generator: Generator,
    labels: Tensor,
    data: SmallSet,
    plan: SamplePlan,
    extractor: FeatureExtractor,
    world: ev.World,
) -> tuple[Tensor, Tensor, ImageAudit]:
    """Pixels [n, 3, H, W] uint8 and features [n, D] of the plan's images, over all processes, and their audit.

    Args:
        labels: [M], the checkpoint's, of the held-out bases.
    """
    pixels = torch.zeros(plan.n, 3, *data.held_out.image_size, dtype=torch.uint8)

    def rows() -> ev.Rows:
        for images, index in ev.generated(generator, plan, settings, world, labels):
            pixels[index] = images
            yield images, index

    with Progress("generated", world.rank == 0) as step:
        features, audit = ev.collect(rows(), plan.n, extractor, world, step)
    return world.sum(pixels), features, audit


def sheet(images: Tensor, distance: Tensor, index: Tensor, data: SmallSet, shown: int) -> Image.Image:
    """Each image beside its 3 nearest training images; left the nearest of all, right evenly spaced ones."""
    blocks = []
    for chosen in suspects(distance[:, 0], shown):
        if len(chosen):
            near = data.train.get_many(index[chosen].flatten().tolist())["pixels"][:, 0]
            blocks += [(grid(images[chosen], 1), 8), (grid(near, 3), 40)]  # and white to its right
    height = max(b.shape[0] for b, _ in blocks)
    padded = [np.pad(b, ((0, height - b.shape[0]), (0, gap), (0, 0)), constant_values=255) for b, gap in blocks]
    return Image.fromarray(np.concatenate(padded, 1))


if __name__ == "__main__":
    configs.run_program(main)
