"""How fast a model decodes, against the time in which its memory could be read; a student, which reads the whole
sequence at once, also against the rate of a matrix product.

python eval/speed.py --config configs/imagenet256/ar_l.yaml --batches 1 64 --guidance.scale 2
python eval/speed.py --checkpoint assets/fashion32 --batches 1 16
python eval/speed.py --config configs/imagenet256/dd1_l.yaml --sampler.kind one_step --batches 1 8 64
python eval/speed.py --config configs/imagenet256/mar_b.yaml --sampler.kind masked --guidance.scale 2.9
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import json
import shlex
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch

from visgen import config as configs
from visgen import speed
from visgen.checks import Positive, Range
from visgen.config import UserError, plugin
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.files import write_text
from visgen.launch import out_of_memory, writable
from visgen.loading import load
from visgen.metrics.report import environment
from visgen.model import Model
from visgen.sampling import EngineConfig
from visgen.train.main import TrainConfig


@dataclass(frozen=True)
class SpeedConfig:
    """Decodes batches of images, without their pixels, and writes OUT/speed.{json,md}.

    Attributes:
        checkpoint: run directory or Hub id of a class-conditional model.
        config: in its stead, the YAML of a training run: the model is built with random weights, which decode as fast.
        batches: batch sizes.
        images: images of a decode, as a multiple of the batch size; with more than 1, rows of a sampler that finishes
            them at different times go on with the next image, as in sample.py.
        repeats: decodes after the first one; their median counts.
        control: decode a model that has a control under a map; --no-control leaves it out, for comparison.
        profile: also write OUT/profile_BATCH.txt, the kernels by time.
        sampler, guidance, warp: how tokens are drawn.
        engine: kind, device, precision (its batch is not read).
        out: directory of the report.
    """

    checkpoint: str = ""
    config: Path | None = None
    batches: Annotated[tuple[Positive, ...], Range(1)] = (1, 64)
    images: Positive = 1
    repeats: Positive = 3
    control: bool = True
    profile: bool = False
    sampler: Any = plugin("visgen.samplers", "ar")
    guidance: Guidance = field(default_factory=Guidance)
    warp: Warp = field(default_factory=Warp)
    engine: EngineConfig = field(default_factory=EngineConfig)
    out: Path = Path("out/eval/speed")


def main() -> None:
    settings = configs.load(SpeedConfig, sys.argv[1:], prog="eval/speed.py")
    out = writable(settings.out, "--out")
    device, dtype = settings.engine.resolve()
    model, weights = build(settings)
    if not hasattr(model.config.condition, "classes"):
        raise UserError(
            "eval/speed.py decodes class-conditional models, this one is told something else; time it by sample.py"
        )
    copy = speed.bandwidth(device)
    whole = bool(configs.implementation(settings.sampler).whole)  # type: ignore[attr-defined]
    product = speed.matmul_rate(device, dtype) if whole else None
    rows = []
    for batch in settings.batches:
        given = (settings.sampler, settings.guidance, settings.warp)
        kernels: list[str] | None = [] if settings.profile else None
        options: dict[str, Any] = {"batches": settings.images, "control": settings.control, "product": product}
        try:
            rows.append(
                speed.measure(model, settings.engine, *given, batch, copy, settings.repeats, kernels, **options)
            )
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            raise UserError(f"a batch of {batch} does not fit the memory of {device}; lower --batches") from None
        print(speed.table(rows).splitlines()[-1], file=sys.stderr)
        if kernels:
            write_text(out / f"profile_{batch}.txt", kernels[0])
    facts = {
        "model": settings.checkpoint or str(settings.config),
        "weights": weights,
        "parameters": sum(p.numel() for p in model.parameters()),
        "engine": settings.engine.kind_on(device),
        "precision": str(dtype).removeprefix("torch."),
        "copy_bytes_per_s": copy,
        "matmul_flops_per_s": product,
        "command": shlex.join(["python", *sys.argv]),
        **environment(),
    }
    text = (
        f"{facts['model']} ({facts['parameters']:,} parameters, {weights} weights), {facts['engine']}, "
        f"{facts['precision']}, {facts['gpu'] or 'CPU'}, torch {facts['torch']}, copy {copy / 1e12:.2f} TB/s"
        + ("" if product is None else f", matrix product {product / 1e12:.4g} TFLOP/s")
        + f"\n\n{speed.table(rows)}\n"
        + "".join(f"\nbatch {row.batch}: {json.dumps(row.notes)}\n" for row in rows if row.notes)
    )
    write_text(out / "speed.json", json.dumps({**facts, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    write_text(out / "speed.md", f"```\n{facts['command']}\n```\n\n{text}")
    print(text)


def build(settings: SpeedConfig) -> tuple[Model, str]:
    """The model on its device, and whether its weights are "trained" or "random"."""
    if bool(settings.checkpoint) == (settings.config is not None):
        raise UserError("one of --checkpoint (a run directory) and --config (the YAML of a training run) is needed")
    device, dtype = settings.engine.resolve()
    if settings.checkpoint:
        return load(settings.checkpoint, engine=settings.engine).model, "trained"
    objective = configs.load(TrainConfig, [str(settings.config)], prog="eval/speed.py").objective
    if not hasattr(objective, "model"):
        raise UserError(
            f"--config {settings.config} trains no model that decodes; give one of configs/ar or imagenet256"
        )
    with torch.device(device):
        model = Model(objective.model)
    speed.randomize(model)
    return model.to(dtype).eval().requires_grad_(False), "random"


if __name__ == "__main__":
    configs.run_program(main)
