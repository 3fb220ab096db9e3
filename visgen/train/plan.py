"""A training on paper: memory, communication and hours of configs on many GPUs, by formula.

    python -m visgen.train.plan configs/imagenet256/ar_l.yaml [more YAMLs] [--mfu 0.4 --gpus 8 32 256]

Nothing is measured here: `mfu` and the two rates are assumptions, which stand in the table's head. P trained weights,
W GPUs:

    state of a GPU   20 P bytes: fp32 weight, gradient, two moments, average; sharded 20 P / W. Activations come on top.
    a step moves     8 P (W - 1) / W bytes out of each GPU, and as many into it: DDP's rings pass on 4 P bytes of
                     gradients twice; sharded, bf16 weights are gathered twice and fp32 gradients reduced once. Between
                     machines all GPUs of one send at the same time, each by a network card of its own.
    hours            images x operations of one (`throughput.operations`) / (W x peak x MFU)

Most of what a step moves is hidden behind the backward pass; where that takes longer than the step, the link decides.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from visgen import config as configs
from visgen.checks import Positive, Range, Scale
from visgen.config import UserError, run_program
from visgen.train.main import TrainConfig
from visgen.train.rehearsal import KEPT, TRAINED, parameters, rehearse
from visgen.train.throughput import operations

MOVED = 8  # bytes of a weight, out of each GPU, in a step


@dataclass(frozen=True)
class PlanConfig:
    """What is assumed.

    Attributes:
        gpus: numbers of GPUs.
        mfu: share of the peak that a training reaches; measure your own by `eval/train_speed.py`.
        peak_tflops: of a GPU, in 10^12 operations a second.
        node: GPUs of a machine.
        link, network: of each GPU, in 10^9 bytes a second in one direction, within a machine and between machines.
    """

    gpus: Annotated[tuple[Positive, ...], Range(1)] = (8, 32, 256)
    mfu: Annotated[float, Range(0, 1, "(]")] = 0.4
    peak_tflops: Scale = 989.0
    node: Positive = 8
    link: Scale = 450.0
    network: Scale = 50.0


def main(argv: Sequence[str]) -> None:
    """Prints the table.

    Raises:
        UserError: no YAML, or settings that do not fit.
    """
    files = [word for word in argv if word.endswith((".yaml", ".yml"))]
    if not files and not {"-h", "--help"} & set(argv):
        raise UserError("give the YAMLs of trainings, such as configs/imagenet256/ar_l.yaml")
    settings = configs.load(PlanConfig, [w for w in argv if w not in files], prog="python -m visgen.train.plan")
    print(table([Path(name) for name in files], settings))


def table(files: Sequence[Path], settings: PlanConfig) -> str:
    """Markdown, one line for each config."""
    head = ["config", "P, 10^6", "GFLOP/image", "images, 10^6", "state GB", f"sharded {settings.gpus[-1]}"]
    head += [f"{w} GPUs: hours, step ms (moves ms)" for w in settings.gpus]
    rows = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for path in files:
        rows.append(f"| {' | '.join(_row(path, settings))} |")
    return "\n".join(rows)


def _row(path: Path, settings: PlanConfig) -> list[str]:
    try:
        config = configs.load(TrainConfig, [str(path)], prog="python -m visgen.train.plan")
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    objective = rehearse(config.objective)
    weights, work, loop = sum(parameters(objective).values()), operations(objective), config.loop
    if work is None:
        raise UserError(f"{path}: there is no formula for its operations; leave it out")
    state = (TRAINED + KEPT) * weights
    cells = [path.stem, f"{weights / 1e6:.1f}", f"{work / 1e9:.1f}", f"{loop.steps * loop.batch / 1e6:.1f}"]
    cells += [f"{state / 1e9:.1f}", f"{state / settings.gpus[-1] / 1e9:.2f}"]
    for gpus in settings.gpus:
        if loop.batch % gpus:
            cells.append(f"batch {loop.batch} cannot be dealt out")
            continue
        step, moves = step_seconds(work, loop.batch, gpus, settings), move_seconds(weights, gpus, settings)
        cells.append(f"{_short(step * loop.steps / 3600)}, {_short(1e3 * step)} ({_short(1e3 * moves)})")
    return cells


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def step_seconds(work: float, batch: int, gpus: int, settings: PlanConfig) -> float:
    """Of a step of `batch` images of `work` operations each."""
    return work * batch / (gpus * settings.peak_tflops * 1e12 * settings.mfu)


def move_seconds(weights: int, gpus: int, settings: PlanConfig) -> float:
    """For what a step moves, at the slowest link in its way."""
    between = min(settings.link, settings.node * settings.network)
    return MOVED * weights * (gpus - 1) / gpus / (1e9 * (settings.link if gpus <= settings.node else between))


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
