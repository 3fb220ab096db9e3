"""Data-reading processes end with the training that started them."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from visgen import launch
from visgen.data import Data
from visgen.train.order import MicroBatches, Order, micro_batches


class Large(Data):
    """Samples each of which fills a pipe."""

    def __init__(self, folder):
        self.folder = folder

    def __len__(self):
        return 64

    def get(self, index, rng=None):
        (self.folder / str(os.getpid())).touch()
        return {"tokens": torch.zeros(100_000), "label": 0}  # a batch of two is sent, not shared


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("asked", [True, False])
def test_readers_end_after_kill_9_of_the_training(tmp_path, monkeypatch, asked):
    """Each is blocked: it writes into a pipe that nobody empties. Without Linux's help they watch their parent."""
    monkeypatch.setattr(launch, "WATCH", 0.2)
    monkeypatch.setattr("visgen.train.order.cpus", lambda: 2)
    if not asked:
        monkeypatch.setattr(launch, "_die_with_parent", lambda: None)
    child = os.fork()
    if child == 0:
        keys = MicroBatches(Order(64, 2, 0), 0, 32, 0, 1, 1)
        source = micro_batches(Large(tmp_path), keys, 0, workers=2, pin=False)
        next(source)
        (tmp_path / "ready").touch()
        time.sleep(60)
        os._exit(0)
    until = time.monotonic() + 60
    while not (tmp_path / "ready").exists() and time.monotonic() < until:
        time.sleep(0.05)
    time.sleep(0.5)  # they read ahead until the pipe is full
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    readers = [int(path.name) for path in tmp_path.iterdir() if path.name != "ready"]
    while any(map(runs, readers)) and time.monotonic() < until:
        time.sleep(0.05)
    assert len(readers) == 2 and not any(map(runs, readers))
