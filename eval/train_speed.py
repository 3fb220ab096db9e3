"""How fast a config trains: steps of its own size on random data, without checkpoints, logs and reading.

python eval/train_speed.py --config configs/imagenet256/ar_l.yaml --batch 64
accelerate launch --config_file configs/accelerate/gpu8.yaml --num_processes 2 eval/train_speed.py \
    --config configs/imagenet256/ar_l.yaml --batch 128
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import dataclasses
import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from visgen import config as configs
from visgen.checks import Natural, Positive, Weight
from visgen.config import UserError
from visgen.files import write_text
from visgen.launch import writable
from visgen.metrics.report import environment
from visgen.train.bench import Measured, measure
from visgen.train.loop import make_accelerator
from visgen.train.main import TrainConfig
from visgen.train.seeds import BUILD, seed_process
from visgen.train.shards import sharding


@dataclass(frozen=True)
class TrainSpeedConfig:
    """Times training steps and writes OUT/train_speed.{json,md}.

    Attributes:
        config: the YAML of a training run; its data are not read.
        batch: images of a step, over all processes together; 0: the config's.
        accumulation: micro-batches of a step on each process; 0: the config's.
        precision: config: the config's.
        compile: config: as the config has it; none, blocks or whole (`loop.compiled`).
        recompute: keep no activation inside a block.
        reduce: config: as the config has it; fp32 or bf16 (`loop.reduce`).
        laps, steps: the median over so many laps of so many steps counts.
        peak_tflops: as `loop.peak_tflops`.
        out: directory of the report.
    """

    config: Path | None = None
    batch: Natural = 0
    accumulation: Natural = 0
    precision: Literal["config", "bf16", "tf32", "fp32"] = "config"
    compile: Literal["config", "none", "blocks", "whole"] = "config"
    recompute: bool = False
    reduce: Literal["config", "fp32", "bf16"] = "config"
    laps: Positive = 3
    steps: Positive = 10
    peak_tflops: Weight = 0.0
    out: Path = Path("out/eval/train_speed")


def main() -> None:
    settings = configs.load(TrainSpeedConfig, sys.argv[1:], prog="eval/train_speed.py")
    if settings.config is None:
        raise UserError("--config is not set; pass the YAML of a training run, such as configs/imagenet256/ar_l.yaml")
    train = configs.load(TrainConfig, [str(settings.config)], prog="eval/train_speed.py")
    loop = train.loop
    changed: dict[str, Any] = {
        "batch": settings.batch or loop.batch,
        "accumulation": settings.accumulation or loop.accumulation,
        "recompute": settings.recompute or loop.recompute,
        "peak_tflops": settings.peak_tflops or loop.peak_tflops,
    }
    if settings.precision != "config":
        changed["precision"] = settings.precision
    if settings.reduce != "config":
        changed["reduce"] = settings.reduce
    if settings.compile != "config":
        changed["compile"] = settings.compile != "none"
        changed["compiled"] = "whole" if settings.compile == "whole" else "blocks"
    loop = dataclasses.replace(loop, **changed).resolved()
    accelerator = make_accelerator(loop)
    out = writable(settings.out, "--out")
    seed_process(loop.seed, BUILD)
    objective = configs.build(train.objective)
    try:
        found = measure(objective, accelerator, loop, train.optim, train.ema, settings.laps, settings.steps)
    except torch.OutOfMemoryError:
        raise UserError(f"a batch of {loop.batch} does not fit the memory; lower --batch, or --recompute") from None
    if accelerator.is_main_process:
        facts = {
            "config": str(settings.config),
            "weights": "sharded" if sharding(accelerator) else "whole",
            "precision": loop.precision,
            "compiled": loop.compiled if loop.compile else "no",
            "recompute": loop.recompute,
            "reduce": loop.reduce,
            "command": shlex.join(["python", *sys.argv]),
            **environment(),
        }
        text = table(found)
        write_text(out / "train_speed.json", json.dumps({**facts, **asdict(found)}, indent=1) + "\n")
        head = f"{facts['config']}, {found.processes} x {facts['gpu'] or 'CPU'}, weights {facts['weights']}, "
        head += f"{loop.precision}, compiled: {facts['compiled']}, recompute: {loop.recompute}, torch {facts['torch']}"
        write_text(out / "train_speed.md", f"```\n{facts['command']}\n```\n\n{head}\n\n{text}\n")
        print(f"{head}\n\n{text}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def table(found: Measured) -> str:
    """Markdown."""
    cells = [
        f"{found.processes}",
        f"{found.batch}",
        f"{found.accumulation}",
        f"{1e3 * found.seconds:.1f}",
        f"{found.images_per_s:.1f}",
        "" if found.tokens_per_s is None else f"{found.tokens_per_s:,.0f}",
        "" if found.gflop is None else f"{found.gflop:.1f}",
        "" if found.mfu is None else f"{found.mfu:.1%}",
        "" if found.peak_bytes is None else f"{found.peak_bytes / 2**20:.0f}",
        f"{found.first:.1f}",
    ]
    head = "processes | batch | accumulation | ms/step | images/s | tokens/s | GFLOP/image | MFU | peak MiB | first s"
    return f"| {head} |\n|{'---|' * len(cells)}\n| {' | '.join(cells)} |"


if __name__ == "__main__":
    configs.run_program(main)
