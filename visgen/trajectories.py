"""A teacher's pairs of noise and tokens, written once: what a one-step student learns (`objectives/dd1.py`).

    python -m visgen.trajectories --teacher assets/fashion32 --guidance.scale 1.1 --pairs 300000 --out data_cache/pairs

Tokens are those that training makes on the fly (`samplers/_teacher.make_pairs`). It can be killed at any time: shards
are written whole, and the same command goes on after the last one. Guidance and filters are the student's for good: set
them to its `objective.model.backbone.guidance` and `.warp`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from visgen.checkpoint import classes_of, read_metadata
from visgen.checks import Positive, Seed
from visgen.config import UserError, dump, load, run_program
from visgen.data import Split, pairs
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.launch import Progress, writable
from visgen.nn.mixture import STEPS
from visgen.run_files import WEIGHTS, find_step
from visgen.samplers._teacher import codes_of, make_pairs, read_teacher
from visgen.sampling import PRECISIONS, EngineConfig

FIRST_SEED = {"train": 1 << 40, "held_out": 1 << 41}  # far from the seeds that images are drawn with


@dataclass(frozen=True)
class Config:
    """Writes pairs.

    Attributes:
        teacher: run directory of the autoregressive model, with its tokenizer.
        out: folder of the set; the split becomes a sub-folder.
        pairs: how many.
        first_seed: pair i is of this seed + i; None: 2^40 of train, 2^41 of held_out.
        guidance, warp: of the teacher's probabilities.
        engine: where and how to compute; `engine.batch` pairs at once.
        shard: pairs per file.
    """

    teacher: Path | None = None
    out: Path = Path("data_cache/pairs")
    split: Split = "train"
    pairs: Positive = 100_000
    first_seed: Seed | None = None
    guidance: Guidance = field(default_factory=Guidance)
    warp: Warp = field(default_factory=Warp)
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(batch=256))
    shard: Positive = 8192


def main(argv: Sequence[str]) -> None:
    config = load(Config, argv, prog="python -m visgen.trajectories")
    folder = write(config)
    print(f"{folder}: {len(pairs.Pairs(pairs.Config(config.out), config.split))} pairs")


def write(config: Config) -> Path:
    """Writes, or completes, the set of `config` and returns its folder.

    Raises:
        UserError: a model that is no teacher, or a folder that holds pairs of other settings.
    """
    teacher = read_teacher(config.teacher, config.guidance, "teacher")
    classes = getattr(teacher.model.config.condition, "classes", None)
    if classes is None:
        raise UserError(f"teacher {config.teacher} is not conditioned on labels; its pairs are made while training")
    first = FIRST_SEED[config.split] if config.first_seed is None else config.first_seed
    if first + config.pairs > 1 << 63:
        raise UserError(f"first_seed {first} leaves no seeds for {config.pairs} pairs below 2^63; lower it")
    device, dtype = config.engine.resolve()
    weights = find_step(config.teacher or "") / WEIGHTS
    names = classes_of(read_metadata(weights), weights)
    index = pairs.Index(
        split=config.split,
        pairs=config.pairs,
        shard_pairs=config.shard,
        first_seed=first,
        classes=names if len(names) == classes else [str(i) for i in range(classes)],
        image_size=list(teacher.tokenizer.image_size),
        grid=list(teacher.model.grid),
        vocab=teacher.model.config.vocab,
        tokenizer=teacher.tokenizer_hash,
        teacher=teacher.hash,
        guidance=dump(config.guidance),
        warp=dump(config.warp),
        map_steps=STEPS,
        precision=next(name for name, kind in PRECISIONS.items() if kind == dtype),
    )
    folder = writable(config.out, "out") / config.split
    _agree(folder, index)
    pairs.write_index(folder, index)
    missing = [i for i in range(index.shard_count) if not _is_whole(folder, index, i)]
    engine = config.engine.make(teacher.model.to(device, dtype).eval(), config.guidance, config.warp)
    codes, done = codes_of(teacher.tokenizer.to(device)), 0
    with Progress("trajectories") as step:
        for number in missing:
            made = []
            for part in _batches(index.shard(number), config.engine.batch):
                made.append(_pairs(engine, codes, index, part))
                done += len(part)
                step(done, sum(len(index.shard(i)) for i in missing))
            pairs.write_shard(folder, index, number, torch.cat(made).numpy())
    return folder


def _pairs(engine: Engine, codes: Tensor, index: pairs.Index, part: range) -> Tensor:
    labels, seeds = index.labels(part).to(engine.device), index.seeds(part).to(engine.device)
    return make_pairs(engine, codes, {"label": labels}, seeds).cpu()


def _batches(part: range, size: int) -> list[range]:
    return [part[k : k + size] for k in range(0, len(part), size)]


def _is_whole(folder: Path, index: pairs.Index, number: int) -> bool:
    try:
        pairs.verify_shard(folder, index, number)
    except UserError:
        return False
    return True


def _agree(folder: Path, wanted: pairs.Index) -> None:
    """Refuses a folder that holds a set of other settings."""
    if not (folder / "index.json").is_file():
        return
    old, new = dataclasses.asdict(pairs.read_index(folder)), dataclasses.asdict(wanted)
    for name in old:
        if old[name] != new[name]:
            raise UserError(
                f"pairs {folder} were written with {name} {old[name]}, now it is {new[name]}; delete the folder or "
                "choose another --out"
            )


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
