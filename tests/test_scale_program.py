"""`accelerate launch eval/fid.py`: killed in one process, gone on with in two, the uninterrupted number; and sweeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
WORDS = """--data.kind synthetic --data.image-size 16 --data.classes 3 --data.n 90 --data.n-held-out 200
    --extractor fd_debug --n 400 --groups 5 --engine.device cpu --engine.precision fp32 --engine.batch 8
    --chunk 16 --neighbours"""
ACCELERATE = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml")


@pytest.mark.slow
def test_a_killed_run_goes_on_in_two_processes(shapes_dir: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}

    def start(out: str, *launch: str) -> subprocess.Popen[bytes]:
        words = ["eval/fid.py", "--checkpoint", str(shapes_dir), *WORDS.split(), "--out", str(tmp_path / out)]
        return subprocess.Popen([sys.executable, *launch, *words], env=environment, cwd=ROOT)

    def metrics(out: str) -> dict[str, Any]:
        return json.loads((tmp_path / out / "generated/report.json").read_text())["metrics"]

    assert start("whole").wait(300) == 0
    killed, chunks = start("killed"), tmp_path / "killed/generated/chunks"
    while len(list(chunks.glob("chunk_*"))) < 3 and killed.poll() is None:
        time.sleep(0.05)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait(60) == -signal.SIGKILL and not (tmp_path / "killed/generated/report.json").exists()
    assert 3 <= len(list(chunks.glob("chunk_*"))) < 25
    assert start("killed", *ACCELERATE, "--main_process_port", "0").wait(300) == 0
    whole, again = metrics("whole"), metrics("killed")
    for name, score in whole.items():
        assert again[name]["value"] == pytest.approx(score["value"], rel=1e-9), name
        assert again[name]["se"] == pytest.approx(score["se"], rel=1e-9), name


@pytest.mark.slow
def test_a_sweep_of_two_processes_is_that_of_one(shapes_dir: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    found = []
    for out, launch in (("one", ()), ("two", (*ACCELERATE, "--main_process_port", "0"))):
        words = ["eval/report.py", "--checkpoint", str(shapes_dir), *WORDS.replace("--neighbours", "").split()]
        rows = ["--rows", "ar: sampler.kind=ar", "sjd: sampler.kind=sjd sampler.window=4,8", "--n", "70", "--no-wandb"]
        rest = ["--batches", "1", "--repeats", "1", "--out", str(tmp_path / out)]
        done = subprocess.run([sys.executable, *launch, *words, *rows, *rest], env=environment, cwd=ROOT, timeout=300)
        assert done.returncode == 0
        found.append(json.loads((tmp_path / out / "report.json").read_text())["cells"])
    for one, two in zip(*found, strict=True):
        assert two["nfe_per_image"] == one["nfe_per_image"] and len(two["speed"]) == 1
        assert two["same_images_as_baseline"] == one["same_images_as_baseline"]
        assert two["metrics"]["fd"]["value"] == pytest.approx(one["metrics"]["fd"]["value"], rel=1e-9)
