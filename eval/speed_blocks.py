"""How fast a model of blocks (ACDiT) decodes or trains, as a share of the rate of a matrix product on the same device.

python eval/speed_blocks.py --config configs/imagenet256/acdit_xl.yaml --batches 64 --guidance.scale 1.5
python eval/speed_blocks.py --config configs/acdit/ucf101.yaml --measure cache --batches 1 4 --sampler.frames 64 \\
    --guidance.scale 2.5
python eval/speed_blocks.py --config configs/acdit/ucf101_l.yaml --measure training --batches 4 --compile
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import json
import shlex
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from visgen import config as configs
from visgen import speed, speed_blocks
from visgen.checks import Positive, Range
from visgen.config import UserError, plugin
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.files import write_text
from visgen.launch import writable
from visgen.metrics.report import environment
from visgen.model import Model
from visgen.sampling import EngineConfig
from visgen.train.main import TrainConfig


@dataclass(frozen=True)
class SpeedBlocksConfig:
    """Times a model of random weights, whose decodes take as long as those of a trained one, and writes
    OUT/speed_blocks.{json,md}.

    Attributes:
        config: YAML of a training run of objective acdit.
        measure: decode: as sample.py does. cache: that, by the engine asked for and by the eager one, and the same
            without a cache, which is eager. training: a step by FlexAttention, which has no backward pass on a CPU, and
            by a dense mask.
        batches: batch sizes.
        repeats: after the first one; their median counts.
        compile: compile the blocks of the net that is trained, as `loop.compile` does; `engine.compile` does so for a
            decode.
        sampler, guidance: how blocks are drawn.
        engine: kind, device, precision (its batch is not read); training is under autocast to that precision.
        out: directory of the report.
    """

    config: Path | None = None
    measure: Literal["decode", "cache", "training"] = "decode"
    batches: Annotated[tuple[Positive, ...], Range(1)] = (1, 64)
    repeats: Positive = 3
    compile: bool = False
    sampler: Any = plugin("visgen.samplers", "blockwise")
    guidance: Guidance = field(default_factory=Guidance)
    engine: EngineConfig = field(default_factory=EngineConfig)
    out: Path = Path("out/eval/speed_blocks")


def main() -> None:
    settings = configs.load(SpeedBlocksConfig, sys.argv[1:], prog="eval/speed_blocks.py")
    objective = asked(settings)
    out = writable(settings.out, "--out")
    device, dtype = settings.engine.resolve()
    rate = speed.matmul_rate(device, dtype)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Model(objective.model).parameters())
    facts = {
        "config": str(settings.config),
        "measure": settings.measure,
        "parameters": parameters,
        "engine": "training" if settings.measure == "training" else settings.engine.kind_on(device),
        "precision": str(dtype).removeprefix("torch."),
        "matmul_flops_per_s": rate,
        "command": shlex.join(["python", *sys.argv]),
        **environment(),
    }
    rows, differences = measured(settings, objective, rate)
    text = (
        f"{facts['config']} ({parameters:,} parameters, random weights), {facts['engine']}, {facts['precision']}, "
        f"{facts['gpu'] or 'CPU'}, torch {facts['torch']}, matrix product {rate / 1e12:.4g} TFLOP/s\n\n"
        f"{speed_blocks.table(rows)}\n"
        + "".join(f"\nbatch {batch}: the ways differ by {value:.1e}\n" for batch, value in differences.items())
    )
    found = {**facts, "differences": differences, "rows": [asdict(row) for row in rows]}
    write_text(out / "speed_blocks.json", json.dumps(found, indent=1) + "\n")
    write_text(out / "speed_blocks.md", f"```\n{facts['command']}\n```\n\n{text}")
    print(text)


def asked(settings: SpeedBlocksConfig) -> Any:
    """The objective of the config.

    Raises:
        UserError: none, of another kind, or a sampler that does not fit.
    """
    if settings.config is None:
        raise UserError(
            "--config is missing; give the YAML of a run of objective acdit, such as configs/imagenet256/acdit_xl.yaml"
        )
    objective = configs.load(TrainConfig, [str(settings.config)], prog="eval/speed_blocks.py").objective
    if configs.kind_of(objective) != "acdit":
        raise UserError(
            f"--config {settings.config} trains objective {configs.kind_of(objective)}, this program times acdit; "
            "eval/speed.py times the others"
        )
    if configs.kind_of(settings.sampler) != "blockwise":
        raise UserError(f"--sampler.kind {configs.kind_of(settings.sampler)} draws no blocks; leave it out")
    if settings.measure == "cache" and settings.engine.compile:
        raise UserError("--measure cache compares ways that are not compiled; leave out --engine.compile")
    if settings.measure == "training" and settings.engine.kind == "captured":
        raise UserError("--measure training runs eagerly; leave out --engine.kind captured")
    return objective


def engines_of(settings: SpeedBlocksConfig, model: Model) -> list[Any]:
    """What decodes, one after another."""
    made = [settings.engine.make(model, settings.guidance)]
    if settings.measure == "cache":
        if type(made[0]) is not Engine:
            made.append(Engine(model, settings.guidance))
        made.append(speed_blocks.Uncached(model, settings.guidance))
    return made


def measured(settings: SpeedBlocksConfig, objective: Any, rate: float) -> tuple[list[Any], dict[int, float]]:
    """Rows of the table, and by how much the results of the ways differ, relative to the largest value."""
    device, dtype = settings.engine.resolve()
    rows: list[Any] = []
    differences: dict[int, float] = {}
    model = None if settings.measure == "training" else build(objective, device, dtype)
    for batch in settings.batches:
        try:
            if model is None:
                ways = ("flex", "dense") if device.type == "cuda" else ("dense",)
                for way in ways:
                    given: Any = (objective, way, batch, rate, device, dtype, settings.repeats, settings.compile)
                    rows.append(speed_blocks.training(*given))
                if len(ways) == 2:
                    differences[batch] = abs(rows[-1].loss - rows[-2].loss) / abs(rows[-1].loss)
                continue
            drawn = []
            engines = engines_of(settings, model)
            while engines:  # one at a time: a cache of long clips is large
                row, tokens = speed_blocks.decode(engines.pop(0), settings.sampler, batch, rate, settings.repeats)
                rows.append(row)
                drawn.append(tokens)
            if len(drawn) > 1:
                last = drawn.pop()
                differences[batch] = max(float((x - last).abs().max() / last.abs().max()) for x in drawn)
        except torch.OutOfMemoryError:
            raise UserError(f"a batch of {batch} does not fit the memory of {device}; lower --batches") from None
        print(speed_blocks.table(rows).splitlines()[-1], file=sys.stderr)
    return rows, differences


def build(objective: Any, device: torch.device, dtype: torch.dtype) -> Model:
    """The model with random weights."""
    with torch.device(device):
        model = Model(objective.model)
    speed.randomize(model)
    return model.to(dtype).eval().requires_grad_(False)


if __name__ == "__main__":
    configs.run_program(main)
