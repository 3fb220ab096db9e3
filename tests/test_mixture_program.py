"""`eval/mixture.py`: both ways of summing agree, and both turns of a training step are taken."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from programs import program

from visgen.config import run_program

ROOT = Path(__file__).parents[1]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str, device: str = "auto") -> None:
    """On a GPU where there is one: elsewhere Triton interprets its kernels."""
    monkeypatch.setattr(sys, "argv", ["mixture.py", "--engine.device", device, "--out", str(out), *flags])
    run_program(program("mixture").main)


def test_a_small_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    config = str(ROOT / "configs/debug/dd2.yaml")
    run(monkeypatch, tmp_path, "--config", config, "--batch", "1", "--repeats", "1")
    found = json.loads((tmp_path / "mixture.json").read_text())
    assert found["sums"]["tokens"] == 64 and found["sums"]["vocab"] == 256
    assert all(found["sums"][way]["largest_error"] < 1e-4 for way in ("fused", "chunks"))
    assert set(found["step"]) == {"critic", "student"} and all(row["seconds"] > 0 for row in found["step"].values())
    assert "| ratio |" in (tmp_path / "mixture.md").read_text()


def test_another_objective_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, "--config", str(ROOT / "configs/debug/vq.yaml"))
    assert "trains vq; give one of objective dd2" in capsys.readouterr().err


def test_without_a_gpu_it_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(SystemExit):
        run(monkeypatch, tmp_path, device="cpu")
    told = capsys.readouterr().err
    assert "needs a CUDA GPU, not cpu" in told and told.count("\n") == 1
