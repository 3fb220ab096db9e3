"""`eval/sweep.py`: another program for each checkpoint and value, once; its table, curves and refusals."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from programs import program

from visgen.config import UserError
from visgen.metrics.protocol import EvalProtocol, Score

ROOT = Path(__file__).parents[1]
FLAGS = ["--checkpoints", "runs/a", "runs/b", "--values", "5", "50"]


def sweep(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> Any:
    module = program("sweep")
    monkeypatch.setattr(sys, "argv", ["eval/sweep.py", "--out", str(out), *flags])
    module.main()
    return json.loads((out / "sweep.json").read_text())


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """In place of the programs: reports whose fd is 100 over the value, or of runs/b twice that; and what was run."""
    asked: list[list[str]] = []

    def run(command: list[str], **rest: Any) -> Any:
        asked.append(command[1:])
        flags = dict(zip(command[2::2], command[3::2], strict=True))
        out, value = Path(flags["--out"]), float(flags["--sampler.steps"])
        out = out if command[1].endswith("small.py") else out / "generated"
        out.mkdir(parents=True, exist_ok=True)
        fd = Score((2 if flags["--checkpoint"] == "runs/b" else 1) * 100 / value, se=0.5)
        n = 24 if value == 7 else 12
        report = {
            "protocol": EvalProtocol(n=n, groups=3).to_dict(),
            "metrics": {"fd": fd.to_dict(), "kid": Score(1 / value).to_dict()},
            "speed": {"img_per_s": 7.0},
            "command": shlex.join(["python", *command[1:]]),
        }
        (out / "report.json").write_text(json.dumps(report))
        return SimpleNamespace(returncode=3 if value == 13 else 0)

    monkeypatch.setattr(subprocess, "run", run)
    return asked


def test_every_cell_is_run_once(runs: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["--names", "1 block", "4 blocks"]
    found = sweep(monkeypatch, tmp_path, *FLAGS, *names, "--given=--seed 3")
    assert [r[2] for r in runs] == ["runs/a", "runs/a", "runs/b", "runs/b"]
    assert runs[0][0].endswith("eval/fid.py") and runs[1][3:7] == ["--sampler.steps", "50", "--seed", "3"]
    assert found["scores"]["4 blocks"]["50"]["fd"] == {"value": 4.0, "se": 0.5}
    assert found["img_per_s"]["1 block"] == {"5": 7.0, "50": 7.0}
    assert found["commands"]["1 block 5"].startswith("python ")
    text = (tmp_path / "sweep.md").read_text()
    assert "| fd: sampler.steps | 5 | 50 |" in text and "| 4 blocks | 40 ± 0.5 | 4 ± 0.5 |" in text
    assert "| kid: sampler.steps | 5 | 50 |" in text and (tmp_path / "sweep.png").stat().st_size > 5000
    sweep(monkeypatch, tmp_path, *FLAGS, *names, "--given=--seed 3", "--metrics", "kid")
    assert len(runs) == 4 and "fd: sampler" not in (tmp_path / "sweep.md").read_text(), "reports are kept"
    sweep(monkeypatch, tmp_path, *FLAGS, *names, "--given=--seed 4")
    assert len(runs) == 8, "those of another command are not"


def test_reports_of_small_stand_elsewhere(
    runs: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = sweep(monkeypatch, tmp_path, *FLAGS, "--program", "small")
    assert list(found["scores"]) == ["a", "b"] and (tmp_path / "a" / "sampler.steps_5" / "report.json").is_file()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--names", "one"], "2 checkpoints are called one; give each a name of its own"),
        (["--names", "one", "one"], "2 checkpoints are called one, one"),
        (["--values", "5", "many"], "--values many is no number"),
        (["--values"], "values is"),
        (["--metrics", "is"], "--metrics is: the reports have fd, kid"),
        (["--values", "5", "13"], r"eval/fid\.py ended with 3 for runs/a, --sampler\.steps 13"),
        (["--values", "5", "7"], r"cannot be compared: they differ in n \(12 and 24\)"),
    ],
)
def test_refused(
    runs: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str
) -> None:
    given = FLAGS[:3] if flags[0] == "--values" else FLAGS
    with pytest.raises(UserError, match=said):
        sweep(monkeypatch, tmp_path, *given, *flags)


def test_a_real_run(checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the program itself, over guidance."""
    data = "--data.kind synthetic --data.image-size 16 --data.classes 3 --data.n 30 --data.n-held-out 30"
    rest = "--extractor fd_debug --n 12 --groups 3 --allow-small --engine.device cpu"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = ["--flag", "guidance.scale", "--values", "2", f"--given={data} {rest}"]
    found = sweep(monkeypatch, tmp_path, "--checkpoints", str(checkpoint_dir), *flags)
    assert found["scores"][checkpoint_dir.name]["2"]["fd"]["value"] > 0
