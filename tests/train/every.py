"""As a program: trains every YAML of a folder, one after the other, and notes the weights after every step."""

import hashlib
import os
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from visgen.train import loop as loops
from visgen.train import main as program
from visgen.train.shards import full, is_sharded


def run_all(folder: Path, out: Path) -> None:
    """`folder/*.yaml` -> `out/NAME`, a run directory, and `out/NAME.RANK`, a hash of all parameters for each step."""
    real = loops.train_step
    for path in sorted(folder.glob("*.yaml")):
        AcceleratorState._reset_state()
        GradientState._reset_state()
        notes = out / f"{path.stem}.{os.environ.get('RANK', '0')}"

        def noted(state, batches, step, notes=notes):
            real(state, batches, step)
            weights = [full(p).detach().numpy().tobytes() for net in state.nets.values() for p in net.parameters()]
            if any(is_sharded(net) for net in state.nets.values()):
                notes.with_suffix(".sharded").touch()
            with open(notes, "a") as file:
                file.write(f"{step} {hashlib.sha256(b''.join(weights)).hexdigest()}\n")

        loops.train_step = noted
        try:
            program.train([str(path), "--loop.out", str(out / path.stem)])
        finally:
            loops.train_step = real


if __name__ == "__main__":
    torch.set_num_threads(1)
    Accelerator.end_training = lambda self: None  # the processes go on together
    run_all(*map(Path, sys.argv[1:]))
