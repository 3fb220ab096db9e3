"""eval/reading.py: what it reads, counts and refuses."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from visgen.config import build, plugin_config

ROOT = Path(__file__).parents[1]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *flags: str) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["eval/reading.py", "--out", str(out), *flags])
    runpy.run_path(str(ROOT / "eval" / "reading.py"), run_name="__main__")
    return json.loads((out / "reading.json").read_text())


def test_made_photographs_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--photos", "24", "--batch", "8", "--samples", "20")
    found = run(monkeypatch, tmp_path, *flags, "--workers", "2")
    files = sorted((tmp_path / "photos").rglob("*.jpg"))
    with Image.open(files[0]) as photo:
        assert photo.size == (500, 375) and len(files) == 24
    assert 90e3 < found["bytes_a_file"] < 125e3
    assert found["samples"] == 24, "whole batches, without the first of each worker"
    assert found["samples_per_s"] == pytest.approx(24 / found["seconds"]) and 0 < found["size"] <= 24
    text = (tmp_path / "reading.md").read_text()
    assert found["command"] in text and "samples/s by" in text
    stamps = [file.stat().st_mtime_ns for file in files]
    files[3].unlink()
    run(monkeypatch, tmp_path, *flags, "--workers", "0")
    assert [f.stat().st_mtime_ns for f in files[:3] + files[4:]] == stamps[:3] + stamps[4:] and files[3].is_file()


def test_made_codes_are_read_and_may_be_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(monkeypatch, tmp_path, "--codes", "20", "--batch", "8", "--workers", "0")
    assert (found["size"], found["samples"]) == (20, 80)
    data = build(plugin_config("visgen.data", "codes", root=tmp_path / "random_codes"), "train")
    assert (len(data), data.grid, data.vocab, data.view_count, len(data.classes)) == (20, (1, 16, 16), 16384, 20, 1000)
    assert int(data.get(3)["tokens"].max()) > 8000


def test_any_data_set_is_read_as_often_as_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--data.kind", "synthetic", "--data.n", "12", "--batch", "6", "--workers", "0")
    found = run(monkeypatch, tmp_path, *flags)
    assert (found["samples"], found["workers"], found["bytes_a_file"]) == (48, 0, None)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data.kind", "synthetic", "--data.n", "12"), "fewer than --batch"),
        (("--data.root", "nowhere"), "nowhere"),
        (("--batch", "0"), "batch"),
        (("--photos", "9", "--codes", "9"), "--photos and --codes are one data set each"),
    ],
)
def test_refused(
    flags: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, tmp_path, *flags)
    assert stop.value.code and words in capsys.readouterr().err
