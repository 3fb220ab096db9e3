"""How well what is drawn follows its control: Canny F1, SSIM of edges, depth RMSE or mIoU, with KID and FD beside them.

python eval/control.py --checkpoint runs/emoji64_canny --data.kind emoji --guidance.scale 2 --out out/eval/emoji64_canny
python eval/control.py --checkpoint runs/controlar_canny --data.kind captions --data.held-out-file val.jsonl \
    --data.image-size 512 --guidance.scale 4 --warp.top-k 2000      # of texts: the pictures' captions
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from visgen import config as configs
from visgen import control_set as cs
from visgen import evaluate as ev
from visgen.checks import Positive, Range, Seed
from visgen.config import UserError, plugin
from visgen.files import write_text
from visgen.generate import Generator
from visgen.hints import HintConfig, choose
from visgen.launch import Progress, claim, writable
from visgen.loading import load
from visgen.metrics.features import FeatureExtractor, build_extractor
from visgen.metrics.frechet import Moments, frechet_distance
from visgen.metrics.kid import kid
from visgen.metrics.plots import save_picture
from visgen.metrics.protocol import SamplePlan, Score
from visgen.metrics.report import Report, table
from visgen.nn.control import Strength
from visgen.pictures import grid
from visgen.run_files import Step
from visgen.sample import describe
from visgen.sampling import SamplingConfig
from visgen.scored_data import build_pictures, fit_size
from visgen.train.main import data_of


@dataclass(frozen=True)
class ControlEvalConfig(SamplingConfig):
    """Scores a model under the maps of held-out pictures; writes OUT/<row>/report.{json,md}, table.md and grid.png.

    Attributes:
        checkpoint: run directory or Hub id of a model with control.
        base: of a checkpoint that holds a control alone, the run with its frozen weights; default: where it was.
        step: which step of the run, or `best`; default the newest.
        data: the data set, default that of the run's config.yaml; its held-out split gives pictures, labels and maps.
        kind: which control, of a model of several; default its first.
        network, network_weights: what the extractor needs: see `sample.py --control.network` and `--control.weights`.
        n: held-out base pictures, the first ones; default all, at most 1,000.
        repeats: images drawn for each.
        strength: of the control.
        plan_seed: seed of the images.
        extractor, weights: feature network of KID and FD and, where it needs one, its weight file.
        extractor_batch: images per pass of the feature network; default by device.
        groups: jackknife groups.
        out: directory of the reports.
    """

    checkpoint: str = ""
    base: str = ""
    step: Step = None
    data: Any = plugin("visgen.data", None)
    kind: str | None = None
    network: str = ""
    network_weights: Path | None = None
    n: Annotated[int, Range(4)] | None = None
    repeats: Positive = 4
    strength: Strength = 1.0
    plan_seed: Seed = 0
    extractor: str = "fd_efflite0"
    weights: Path | None = None
    extractor_batch: Positive | None = None
    groups: Annotated[int, Range(2)] = 25
    out: Path = Path("out/eval/control")


def main() -> None:
    settings = configs.load(ControlEvalConfig, sys.argv[1:], prog="eval/control.py")
    if not settings.checkpoint:
        raise UserError("--checkpoint is needed: a run directory of a model that was trained under a control")
    out, start = writable(settings.out, "--out", "grid.png", "table.md"), time.perf_counter()
    claim(out)
    device, _ = settings.engine.resolve()
    batch = settings.engine.batch
    extractor = build_extractor(
        settings.extractor, weights=settings.weights, device=device, batch=settings.extractor_batch
    )
    generator = load(settings.checkpoint, settings.step, settings.engine, settings.base or None)
    generator.check_guidance(settings.guidance, controlled=True)
    asked = HintConfig(settings.kind, (Path(),), network=settings.network, weights=settings.network_weights)
    if generator.model.controls is None:
        raise UserError(f"checkpoint {settings.checkpoint} was trained without control, so there is nothing to score")
    try:
        control = choose(asked, generator.model.controls, f"checkpoint {settings.checkpoint}")
    except UserError as error:
        own = "here the options are --kind, --network and --network-weights, and maps are made of the pictures"
        raise UserError(f"{error} ({own})") from None
    data = fit_size(settings.data or data_of(settings.checkpoint), generator.tokenizer, sys.argv[1:])
    held_out = build_pictures(data, "held_out")
    labels = cs.check_asked(generator, held_out, f"checkpoint {settings.checkpoint}")
    of = cs.collect(held_out, control, settings.n or 1000, device, batch, labels)
    rows, seconds = images_of(generator, of, settings)
    ref = ev.reference(held_out, extractor, chosen=cs.bases(held_out)[: len(of.labels)])
    plan = SamplePlan(len(of.labels) * settings.repeats, len(of.labels), settings.plan_seed)
    protocol = ev.protocol_of(extractor, ref, held_out, plan, settings.groups)
    scores = {name: scored(name, images, of, settings, device) for name, images in rows.items()}
    for name, images in rows.items():
        looks = quality(images, settings, extractor, ref) if name != "shuffled" else dict(scores["generated"])
        scores[name] = {**looks, **scores[name]}
    about = describe(settings, generator)
    told = {"kind": of.kind, "strength": settings.strength, "maps": "recomputed", "extractor": repr(control.config)}
    reports: dict[str, Report] = {}
    for name in scores:
        reports[name] = Report(
            protocol,
            scores[name],
            model={"ckpt": settings.checkpoint if name in ("generated", "uncontrolled") else name, **generator.meta},
            sampling={
                "row": name,
                "plan": plan.hash,
                "control": told,
                **{k: v for k, v in about.items() if k != "model"},
            },
            speed={"img_per_s": len(rows["generated"].flatten(0, 1)) / seconds, "device": str(device)},
            remarks=[cs.verdict(scores, of.kind)] if name == "generated" else [],
            command=shlex.join(["python", *sys.argv]),
            duration_s=time.perf_counter() - start,
        )
        reports[name].write(out / name)
    write_grid(of, rows, out / "grid.png")
    text = table(reports, list(scores["generated"])) + f"\n{cs.verdict(scores, of.kind)}\n"
    write_text(out / "table.md", text)
    print(text)


def images_of(generator: Generator, of: cs.ControlSet, settings: ControlEvalConfig) -> tuple[dict[str, Tensor], float]:
    """The images of every row uint8 [M, R, 3, H, W], and the seconds that the generated ones took."""
    rows, start = {}, time.perf_counter()
    given = (settings.repeats, settings.plan_seed, settings.strength)
    with Progress("generated") as step:
        rows["generated"] = cs.drawn(generator, of, settings, *given, on_step=step)
    seconds = time.perf_counter() - start
    rows["shuffled"] = rows["generated"]
    rows["upper_bound"] = cs.upper_bound(generator.tokenizer, of, settings.engine.batch)
    if not generator.needs_map and settings.guidance.control is None:
        with Progress("uncontrolled") as step:
            rows["uncontrolled"] = cs.drawn(generator, of, settings, *given, controlled=False, on_step=step)
    return rows, seconds


def scored(
    name: str,
    images: Tensor,
    of: cs.ControlSet,
    settings: ControlEvalConfig,
    device: torch.device,
) -> dict[str, Score]:
    """The control metric of a row."""
    wanted = of.others(settings.plan_seed) if name == "shuffled" else torch.arange(len(of.labels))
    return cs.compare(of, images, wanted, device, settings.engine.batch).scores(of.kind)


def quality(
    images: Tensor, settings: ControlEvalConfig, extractor: FeatureExtractor, ref: ev.Reference
) -> dict[str, Score]:
    """KID of a row against the held-out pictures; and FD where these are more than its features are wide."""
    scores, flat = {}, images.flatten(0, 1)
    rows = ((flat[i : i + 256], torch.arange(i, min(i + 256, len(flat)))) for i in range(0, len(flat), 256))
    features, _ = ev.collect(rows, len(flat), extractor)
    scores["kid"] = kid(features.unflatten(0, images.shape[:2]), ref.features, groups=settings.groups)
    if ref.n > extractor.dims["pool"]:
        moments = Moments(extractor.dims["pool"], len(flat), settings.groups, ref.stats.mean)
        moments.update(features, torch.arange(len(flat)))
        scores["fd"] = frechet_distance(moments, ref.stats, extractor=extractor.id)
    return scores


def write_grid(of: cs.ControlSet, rows: dict[str, Tensor], path: Path, shown: int = 12) -> None:
    """A row for each of the first pictures: picture, map, map of the first image, generated images."""
    from PIL import Image

    first = rows["generated"][:shown]
    maps = [
        cs.to_uint8(m) for m in (of.maps[:shown], cs.extracted(of.control, first[:, 0], torch.device("cpu"), shown))
    ]
    columns = torch.cat([of.pixels[:shown, None], maps[0][:, None], maps[1][:, None], first], 1)
    picture = Image.fromarray(grid(columns.flatten(0, 1), columns.shape[1]))
    save_picture(picture, path)


if __name__ == "__main__":
    configs.run_program(main)
