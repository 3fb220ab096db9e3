"""How faithfully a tokenizer returns held-out images: PSNR, SSIM, perceptual and Fréchet distance, code usage.

python eval/recon.py --tokenizer assets/fashion32 --data.kind fashion_mnist --n 10000 --out out/eval/recon
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from visgen import config as configs
from visgen import evaluate as ev
from visgen.checkpoint import load_tokenizer
from visgen.checks import Positive, Range
from visgen.config import UserError, plugin
from visgen.launch import Progress, claim, writable
from visgen.metrics.features import build_extractor
from visgen.metrics.protocol import SamplePlan
from visgen.metrics.recon import CodeUsage, ReconMeter
from visgen.metrics.report import Report, table
from visgen.sampling import EngineConfig
from visgen.scored_data import build_pictures, check_match, fit_size
from visgen.train.main import data_of


@dataclass(frozen=True)
class ReconConfig:
    """Scores a tokenizer on the held-out split; writes OUT/report.{json,md}.

    Attributes:
        tokenizer: run directory or safetensors file.
        data: the data set; default that of the run's config.yaml.
        n: images; the plan takes them class-balanced.
        perceptual: converted VGG weights (`python -m visgen.convert hed`) for the perceptual distance; None leaves it
            out.
        extractor, weights, extractor_batch, groups, allow_small: of the Fréchet distance between the reconstructions
            and the held-out split; see eval/fid.py.
        engine: device and batch; the tokenizer runs in fp32.
        out: directory of the report.
    """

    tokenizer: Path | None = None
    data: Any = plugin("visgen.data", None)
    n: Annotated[int, Range(2)] = 10_000
    perceptual: Path | None = None
    extractor: str = "fd_efflite0"
    weights: Path | None = None
    extractor_batch: Positive | None = None
    groups: Positive = 25
    allow_small: bool = False
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(batch=256))
    out: Path = Path("out/eval/recon")


def main() -> None:
    settings = configs.load(ReconConfig, sys.argv[1:], prog="eval/recon.py")
    if settings.tokenizer is None:
        raise UserError("--tokenizer is needed: a tokenizer's run directory or safetensors file")
    world = ev.World.current()
    out = writable(settings.out, "--out")
    claim(out)
    device, _ = settings.engine.resolve()
    extractor = build_extractor(
        settings.extractor, weights=settings.weights, device=device, batch=settings.extractor_batch
    )
    tokenizer = load_tokenizer(settings.tokenizer).to(device)
    wanted = fit_size(settings.data or data_of(str(settings.tokenizer)), tokenizer, sys.argv[1:])
    data = build_pictures(wanted, "held_out")
    check_match(data, tokenizer)
    plan = SamplePlan(settings.n, len(data.classes))
    ev.check_size(plan, len(data), extractor, settings.groups, settings.allow_small)
    chosen = ev.choose(data, plan)
    perceptual = perceptual_distance(settings.perceptual, device)
    meter = ReconMeter(perceptual, "vgg_hed", llamagen_ssim=True)
    usage = CodeUsage(tokenizer.vocab) if tokenizer.vocab else None
    start = time.perf_counter()
    with Progress("reference", world.rank == 0) as step:
        ref = ev.reference(data, extractor, world, on_step=step)

    def rows() -> ev.Rows:
        for pictures, index in ev.pictures(data, chosen, world, settings.engine.batch):
            pixels = pictures[:, None]  # [B, T, 3, H, W]
            tokens, back = ev.reconstruct(tokenizer, pixels)
            meter.update(pixels.to(device), back)
            if usage is not None:
                usage.update(tokens)
            yield back[:, 0], index

    protocol = ev.protocol_of(extractor, ref, data, plan, settings.groups)
    with Progress("reconstructions", world.rank == 0) as step:
        scores, checks = ev.score(rows(), ref, extractor, protocol, world, settings.allow_small, step)
    meter.reduce(world.sum)
    scores |= meter.scores()
    if usage is not None:
        usage.reduce(world.sum)
        scores |= usage.scores()
    report = Report(
        protocol,
        scores,
        model={"ckpt": str(settings.tokenizer), **ev.describe_tokenizer(tokenizer)},
        checks=checks,
        command=shlex.join(["python", *sys.argv]),
        duration_s=time.perf_counter() - start,
    )
    if world.rank == 0:
        report.write(out)
        print(table({str(settings.tokenizer): report}, list(scores)))


def perceptual_distance(path: Path | None, device: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """Distance per image by the perceptual network of the `vq` objective."""
    if path is None:
        return None
    from visgen.nn.perceptual import load_perceptual

    return load_perceptual(path).to(device)


if __name__ == "__main__":
    configs.run_program(main)
