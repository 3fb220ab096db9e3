"""A toy objective and toy data, found as plugins of `kind: toy`; as a program it is `train.py` that knows them."""

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState

from visgen.train import main as program

HERE = Path(__file__).parent
CLOCK = ("images_per_s", "tokens_per_s", "mfu", "data_wait")  # depend on the clock
WORDS = """--objective.kind toy --data.kind toy --log.no-wandb --loop.workers 0 --loop.precision fp32
    --loop.steps 6 --loop.batch 8 --loop.log-every 1 --loop.save-every 2 --loop.keep-last 0"""
FLAGS = tuple(WORDS.split())


@contextlib.contextmanager
def plugins() -> Iterator[None]:
    """Within it, `kind: toy` is an objective and a data source."""
    packages = [importlib.import_module(f"visgen.{name}") for name in ("objectives", "data")]
    for package in packages:
        package.__path__.append(str(HERE / "plugins" / package.__name__.rpartition(".")[2]))
    try:
        yield
    finally:
        for package in packages:
            package.__path__.pop()


def train(out: Path | str, *flags: str) -> Path:
    """One run in this process; accelerate keeps global state, which is dropped."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    program.train([*FLAGS, "--loop.out", str(out), *flags])
    return Path(out)


def metrics(run: Path, *drop: str) -> list[dict]:
    """The lines of `metrics.jsonl` without what depends on the clock."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in (*CLOCK, *drop)} for line in lines]


if __name__ == "__main__":
    with plugins():
        program.main([*FLAGS, *sys.argv[1:]])
