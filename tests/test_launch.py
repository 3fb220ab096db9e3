"""What a program runs on."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from visgen import launch
from visgen.config import UserError
from visgen.launch import Progress, cpus, device_of, on_cpu, out_of_memory, writable


@pytest.mark.parametrize(
    ("gpu", "told", "flag", "expected"),
    [
        (True, False, None, False),
        (True, False, "false", False),
        (True, True, None, True),
        (True, False, "true", True),
        (False, False, None, True),
    ],
)
def test_the_cpu_is_used_when_told_or_for_want_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, told: bool, flag: str | None, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    if flag:
        monkeypatch.setenv("ACCELERATE_USE_CPU", flag)
    assert on_cpu(told) is expected


def test_a_folder_in_the_way_of_a_file_is_seen_at_once(tmp_path: Path) -> None:
    assert writable(tmp_path / "a", "--out", "grid.png", "table.md") == tmp_path / "a"
    (tmp_path / "a/grid.png").touch()  # of an earlier run
    (tmp_path / "a/table.md").mkdir()
    assert writable(tmp_path / "a", "--out", "grid.png") == tmp_path / "a"
    with pytest.raises(UserError, match=r"--out: .*/a/table\.md is a folder, where a file"):
        writable(tmp_path / "a", "--out", "grid.png", "table.md")
    with pytest.raises(UserError, match=r"--out .*/x\.MP4 is a file's name; give the directory"):
        writable(tmp_path / "x.MP4", "--out")


def test_cpus_are_those_that_this_process_may_use() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of more
        torch.utils.data.DataLoader([0], num_workers=cpus())
    assert cpus() >= 1


@pytest.mark.parametrize("name", ["meta", "xpu", "mps", "cuda", "cuda:99", "gpu", "0"])
def test_a_device_that_cannot_compute_is_refused_in_one_line(name: str) -> None:
    if name in ("xpu", "mps", "cuda") and getattr(torch, name).is_available():
        pytest.skip(f"this machine has {name}")
    with pytest.raises(UserError, match=f"engine.device '{name}'") as refused:
        device_of(name, "engine.device")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("begun", [False, True])
def test_what_fails_before_its_first_step_leaves_no_bar(capsys: pytest.CaptureFixture[str], begun: bool) -> None:
    with pytest.raises(UserError), Progress("sampling") as step:
        if begun:
            step(1, 2)
        raise UserError("no")
    assert ("sampling" in capsys.readouterr().err) is begun


def test_a_log_gets_a_line_now_and_then(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for every, lines in ((0.0, ["sampling 1/3", "sampling 2/3"]), (1e9, [])):
        monkeypatch.setattr("visgen.launch.EVERY", every)
        with Progress("sampling") as step:
            for done in (0, 1, 2, 3):
                step(done, 3)
        told = [line for line in capsys.readouterr().err.splitlines() if line.endswith(" left")]
        assert len(told) == len(lines) and all(a.startswith(b) for a, b in zip(told, lines, strict=True))


def test_a_name_is_no_markup(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("visgen.launch.EVERY", 0.0)
    with Progress("[/x] [red] :smile: \x1b[2J") as step:
        step(1, 2)
    assert r"[/x] [red] :smile: \x1b[2J 1/2" in capsys.readouterr().err


def test_a_machine_without_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as full:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory(full.value) and out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_directory_is_claimed_by_one_process_until_it_ends(tmp_path: Path) -> None:
    code = "import sys, pathlib, visgen.launch as launch; launch.claim(pathlib.Path(sys.argv[1])); "
    words = [sys.executable, "-c", code + "print('claimed', flush=True); input()"]
    env = {k: v for k, v in os.environ.items() if k != "RANK"}
    other = subprocess.Popen([*words, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
    assert other.stdout is not None and other.stdout.readline() == b"claimed\n"
    with pytest.raises(UserError, match=f"another evaluation is at work in {tmp_path}"):
        launch.claim(tmp_path)
    other.kill()
    other.wait()
    launch.claim(tmp_path)
    launch.claim(tmp_path)  # its own


def test_a_line_is_said_once_and_a_closed_stderr_ends_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        launch.say("this once")
    assert capsys.readouterr().err == "this once\n"
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    launch.say("unheard")
