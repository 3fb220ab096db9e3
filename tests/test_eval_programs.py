"""`eval/fid.py` and `eval/recon.py`: one small run, and one line for what cannot be scored, before any image is."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import program
from safetensors.torch import save_file

from visgen import evaluate as ev
from visgen.config import UserError, build, plugin_config, run_program
from visgen.metrics.protocol import SamplePlan

ROOT = Path(__file__).parents[1]
SMALL = """--data.kind synthetic --data.image-size 16 --data.classes 3 --data.n 90 --data.n-held-out 70
    --extractor fd_debug --n 66 --engine.device cpu"""


@pytest.fixture
def score(shapes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Runs a program on the tiny checkpoint; its output directory."""

    def run(name: str, *flags: str) -> Path:
        given = {"fid": "--checkpoint", "recon": "--tokenizer"}[name]
        out = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", [name, given, str(shapes_dir), *SMALL.split(), "--out", str(out), *flags])
        run_program(program(name).main)
        return out

    return run


@pytest.fixture
def refused(
    score: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The line with which a program refuses, before the reference is scored."""

    def run(name: str, *flags: str) -> str:
        monkeypatch.setattr(ev, "FeatureBank", None)
        with pytest.raises(SystemExit) as stop:
            score(name, *flags)
        said = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and [line for line in said if line.startswith("error: ")] == said[-1:]
        return said[-1].removeprefix("error: ")

    return run


def test_every_row_is_scored(score: Callable[..., Path], tmp_path: Path) -> None:
    cache = tmp_path / "kept" / "reference.safetensors"
    flags = ["--rows", "generated", "real", "recon", "marginals", "--reference-cache", str(cache)]
    out = score("fid", *flags)
    rows = {p.parent.name: json.loads(p.read_text()) for p in out.glob("*/report.json")}
    assert set(rows) == {"generated", "real", "recon", "marginals"} and [p.name for p in cache.parent.iterdir()] == [
        cache.name
    ]
    again = json.loads((score("fid", *flags) / "real" / "report.json").read_text())
    assert again["metrics"] == rows["real"]["metrics"], "from the cached reference"
    assert (score("recon") / "report.json").is_file()


def test_classes_may_be_as_often_as_in_the_reference(score: Callable[..., Path]) -> None:
    out = score("fid", "--labels", "source", "--rows", "generated", "recon")
    reports = [json.loads(p.read_text()) for p in sorted(out.glob("*/report.json"))]
    assert [r["protocol"]["labels"] for r in reports] == ["source"] * 2
    plan = SamplePlan(66, 3, 0, "source", (24, 23, 23))  # of the 70 held out
    assert [r["sampling"]["plan"] for r in reports] == [plan.hash] * 2


def test_the_largest_n_of_unequal_classes() -> None:
    data = build(plugin_config("visgen.data", "synthetic", n=90, classes=3), "train")
    with pytest.raises(
        UserError, match=r"class .* has 30 images, fewer than the 60 of it that --n 100 needs; lower --n to 50"
    ):
        ev.choose(data, SamplePlan(100, 3, 0, "source", (3, 1, 1)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--reference-n 0", "reference_n is 0; it must be at least 2"),
        ("--reference-n -5", "reference_n is -5; "),
        ("--rows", "rows is (); the number of its values must be at least 1"),
        ("--n 0", "n is 0; it must be at least 2"),
        ("--n 1", "n is 1; it must be at least 2"),
        ("--n 3 --groups 2 --allow-small", "leaving out one of 2 groups of 3 images leaves 1, a covariance needs 2"),
        ("--n 20 --extractor fd_efflite0", "n = 20 images is not above the 1280 feature dimensions of fd_efflite0"),
        ("--plan-seed -1", "plan_seed is -1; it must be within [0, "),
        (f"--plan-seed {2**63}", f"plan_seed is {2**63}; "),
        ("--groups 0", "groups is 0; "),
        ("--groups 67", "groups 67 exceeds the 66 images; pass --groups 66 or less"),
        ("--extractor-batch 0", "extractor_batch is 0; "),
        ("--extractor-batch -1", "extractor_batch is -1; "),
        ("--n 93 --rows real", "of the train split has 30 images, fewer than the 31 of each class that --n 93 needs; "),
        ("--n 93 --rows recon", "lower --n to 90 or less"),
        ("--data.classes 4", "has no class 'ring', which the data have"),
    ],
)
def test_fid_refuses_before_long_work(refused: Callable[..., str], flags: str, message: str) -> None:
    assert message in refused("fid", *flags.split())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--groups 67", "groups 67 exceeds the 66 images"),
        ("--extractor-batch 0", "extractor_batch is 0; "),
        ("--n 1", "n is 1; it must be at least 2"),
        (
            "--n 72",
            "of the held_out split has 23 images, fewer than the 24 of each class that --n 72 needs; lower --n to 69",
        ),
    ],
)
def test_recon_refuses_before_long_work(refused: Callable[..., str], flags: str, message: str) -> None:
    assert message in refused("recon", *flags.split())


@pytest.mark.parametrize("name", ["fid", "recon"])
def test_cached_codes_are_no_pictures(
    name: str,
    shapes_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--checkpoint" if name == "fid" else "--tokenizer", str(shapes_dir), "--data.kind", "codes"]
    monkeypatch.setattr(sys, "argv", [name, *flags, "--extractor", "fd_debug", "--out", str(tmp_path)])
    with pytest.raises(SystemExit):
        run_program(program(name).main)
    assert "data.kind codes (data_cache/codes) gives tokens, pictures are needed" in capsys.readouterr().err


def test_a_model_without_a_null_class_is_not_guided(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from visgen.generate import Generator

    def cannot(self: Any, guidance: Any, controlled: bool = False) -> None:
        raise UserError(f"no guidance of {guidance.scale}")

    monkeypatch.setattr(Generator, "check_guidance", cannot)
    assert refused("fid", "--guidance.scale", "2") == "no guidance of 2.0"


@pytest.mark.parametrize("damage", ["empty", "truncated", "text", "nothing inside", "folder"])
def test_a_damaged_reference_cache(
    score: Callable[..., Path], refused: Callable[..., str], tmp_path: Path, damage: str
) -> None:
    cache = tmp_path / "reference.safetensors"
    score("fid", "--rows", "real", "--reference-cache", str(cache))
    whole = cache.read_bytes()
    if damage == "nothing inside":
        save_file({"other": torch.zeros(1)}, cache)
    elif damage == "folder":
        cache.unlink()
        cache.mkdir()
    else:
        cache.write_bytes({"empty": b"", "truncated": whole[:-40], "text": b"no reference"}[damage])
    message = refused("fid", "--rows", "real", "--reference-cache", str(cache))
    assert str(cache) in message and "delete the file" in message


def test_a_kill_while_the_cache_is_written_leaves_none(
    score: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("visgen.tensors.save_file", killed)
    with pytest.raises(SystemExit):
        score("fid", "--rows", "real", "--reference-cache", str(tmp_path / "reference.safetensors"))
    assert not (tmp_path / "reference.safetensors").exists()


def test_the_largest_n_is_that_of_all_classes() -> None:
    data = build(plugin_config("visgen.data", "synthetic", n=90, image_size=16, classes=3), "train")
    data.labels = torch.tensor([0] * 40 + [1] * 3 + [2] * 7)
    with pytest.raises(UserError, match=rf"class {data.classes[1]} .* has 3 images.*lower --n to 9 or less"):
        ev.choose(data, SamplePlan(60, 3))
    chosen = ev.choose(data, SamplePlan(9, 3))
    assert data.labels[chosen].tolist() == SamplePlan(9, 3).rows().label.tolist() and len(set(chosen)) == 9
    data.labels = torch.tensor([0, 1])
    with pytest.raises(UserError, match=rf"class {data.classes[2]} .* has 0 images.*give it images, or leave it out"):
        ev.choose(data, SamplePlan(6, 3))
