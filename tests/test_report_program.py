"""`eval/report.py`: a sweep from rows to files, over an interruption, over processes; and what wandb reads of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from programs import program

from visgen import sweep, sweep_report
from visgen.config import UserError, run_program
from visgen.metrics.frechet import compare
from visgen.metrics.intervals import holm
from visgen.metrics.protocol import Score
from visgen.sweep import CellConfig, cells_of

ROOT = Path(__file__).parents[1]
DATA = "--data.kind synthetic --data.image-size 16 --data.classes 3 --data.n 90 --data.n-held-out 70"
SMALL = f"""{DATA} --extractor fd_debug --n 24 --allow-small --groups 6 --engine.device cpu --engine.batch 10
    --chunk 10 --shown 9"""
ROWS = ("ar: sampler.kind=ar", "gumbel: sampler.kind=sjd sampler.drafting=pure_gumbel sampler.window=4,8")


def argv(checkpoint: Path, out: Path, *flags: str) -> list[str]:
    given = ["--checkpoint", str(checkpoint), *SMALL.split(), "--repeats", "1", "--out", str(out)]
    return [*given, "--batches", "1", "2", "--rows", *ROWS, *flags]


@pytest.fixture
def report(shapes_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Runs the program on the tiny checkpoint; what its report.json holds."""

    def run(*flags: str, out: Path = tmp_path / "out") -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["eval/report.py", *argv(shapes_dir, out, "--no-wandb", *flags)])
        run_program(program("report").main)
        return json.loads((out / "report.json").read_text())

    return run


def test_a_row_with_axes_is_the_product_of_its_values() -> None:
    words = ("a: sampler.kind=sjd sampler.window=4,8 guidance.scale=1,2", "b: warp.top_k=5")
    cells = cells_of(words, ("step=1,2",), CellConfig(checkpoint="run"))
    assert len(cells) == 10 and cells[0].name == "a, step 1, window 4, guidance 1"
    first, last = cells[0].settings, cells[-1].settings
    assert (first.sampler.window, first.guidance.scale, first.step, first.checkpoint) == (4, 1.0, 1, "run")
    assert (last.warp.top_k, last.step) == (5, 2) and type(last.sampler).__module__.endswith(".ar")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a: sampler.kind"], "'sampler.kind' of row 'a: sampler.kind' is no setting; write name=value"),
        (["a: sampler.kind=sjd sampler.window=8,"], "'sampler.window=8,' of row"),
        (["a: sampler.kind=sjdd"], "unknown kind 'sjdd'"),
        (["a: sampler.window=8"], "row 'a: sampler.window=8': unknown option '--sampler.window'"),
        (["a: warp.top_k=-3"], "top_k"),
        (["a b: warp.top_k=1", "A, B: warp.top_k=2"], "two cells are called 'a_b'"),
        ([], "rows is empty"),
        (["foo"], "row 'foo' has no name; write 'NAME: name=value"),
        (["..: warp.top_k=1"], "row name '..' cannot be a file's name"),
        (["日本: warp.top_k=1"], "row name '日本' cannot be a file's name"),
        (["x" * 200 + ":"], "cannot be a file's name"),
        (["a: warp.top_k=1 warp.top_k=2"], "is told warp.top_k twice"),
    ],
)
def test_rows_that_say_nothing_are_refused(rows: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        cells_of(rows, (), CellConfig())
    assert message in str(error.value)


def test_one_report_of_all_cells(report: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    found, out = report(), tmp_path / "out"
    first, four, eight = found["cells"]
    assert [c["name"] for c in found["cells"]] == ["ar", "gumbel, window 4", "gumbel, window 8"]
    assert first["less_baseline"] is None and first["nfe_per_image"]["mean"] == 64
    for cell in (four, eight):  # the tokens of `ar`, in fewer evaluations
        assert cell["same_images_as_baseline"] == 1.0 and cell["nfe_per_image"]["mean"] < 64
        assert cell["less_baseline"]["difference"] == 0 and cell["metrics"] == first["metrics"]
    assert [lap["batch"] for lap in first["speed"]] == [1, 2] and first["speed"][0]["seconds"] > 0
    assert found["protocol"]["n"] == 24 and found["protocol"]["hash"]
    assert found["plots"] == ["pareto_nfe.png", "pareto_batch_1.png", "pareto_batch_2.png"]
    for name in (*found["plots"], "same_seeds.png", *(c["pictures"] for c in found["cells"])):
        assert Image.open(out / name).size > (50, 50)
    text = (out / "report.md").read_text()
    assert "| gumbel, window 8 | " in text and "![pareto_nfe](pareto_nfe.png)" in text and "Reproduce:" in text
    assert not list(out.glob("cells/*/chunks")), "chunks go when the cell is done"


def test_an_interrupted_sweep_goes_on(
    report: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = report("--no-timed", out=tmp_path / "whole")
    drawn, made = sweep.scale.drawn, []

    def counted(*given: Any) -> Any:
        made.append(given[3])
        if len(made) == 5:
            raise KeyboardInterrupt
        return drawn(*given)

    monkeypatch.setattr(sweep.scale, "drawn", counted)
    with pytest.raises(SystemExit):
        report("--no-timed")
    assert (tmp_path / "out/cells/ar/cell.json").is_file() and made[:3] == [range(10), range(10, 20), range(20, 24)]
    assert len(list((tmp_path / "out/cells/gumbel_window_4/chunks").glob("chunk_*"))) == 1
    again = report("--no-timed")
    assert made[5:] == [range(10, 20), range(20, 24), range(10), range(10, 20), range(20, 24)]
    assert [c["metrics"] for c in again["cells"]] == [c["metrics"] for c in whole["cells"]]
    report("--no-timed")
    assert len(made) == 10, "a finished sweep draws nothing"
    (line,) = [x for x in _refusal(report, "--no-timed", "--plan-seed", "1") if x.startswith("error: ")]
    assert "cells/ar holds a cell of plan" in line and "pass another --out" in line


def _refusal(report: Callable[..., dict[str, Any]], *flags: str) -> list[str]:
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stderr(said), pytest.raises(SystemExit):
        report(*flags)
    return said.getvalue().splitlines()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--rows", "a: guidance.scale=x"], "guidance.scale"),
        (["--n", "40", "--no-allow-small"], "n = 40 images is not above the 64 feature dimensions of fd_debug"),
        (["--score", "kid", "--n", "66"], "--n 66 must be a multiple of the 70 held-out base pictures"),
        (["--extractor", "adm-tf1"], "pt_inception-2015-12-05-6726825d.pth"),
        (["--rows", "ar:", "b: sampler.kind=masked"], "row 'b': sampler masked is not for this model"),
        (["--rows", "ar:", "b: sampler.kind=speculative"], "row 'b': sampler.draft is needed"),
        (["--rows", "ar:", "b: sampler.kind=speculative sampler.draft=nope"], "row 'b': sampler.draft: "),
        (["--rows", "ar:", f"b: checkpoint={ROOT / 'assets/fashion32'}"], "row 'b': the data's image_size is (16, 16)"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_any_image(
    report: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, flags: list[str], message: str
) -> None:
    monkeypatch.delenv("VISGEN_WEIGHTS", raising=False)
    monkeypatch.setattr(sweep, "measure", None)
    said = _refusal(report, *flags)
    assert message in said[-1] and not any("reference" in line for line in said)


def test_a_warning_stands_once_with_its_cells() -> None:
    singular, mean = "fd: the covariance is singular", "fd: {} of it is the mean term"
    cells = [
        {"name": "a", "warnings": [singular, mean.format("51%")]},
        {"name": "b", "warnings": [singular]},
        {"name": "c", "warnings": [singular, mean.format("62.5%")]},
    ]
    assert sweep_report._once(cells) == [
        "all cells: fd: the covariance is singular",
        "a, c: fd: 51% of it is the mean term (the numbers are of a)",
    ]


@pytest.mark.parametrize("damaged", ["cell.json", "images.safetensors"])
def test_a_damaged_cell_is_made_again(
    report: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    flags, made, real = ("--rows", "ar:", "--no-timed", "--batches", "1"), [], sweep.scale.drawn
    monkeypatch.setattr(sweep.scale, "drawn", lambda *given: (made.append(given[3]), real(*given))[1])
    first, path = report(*flags), tmp_path / "out/cells/ar" / damaged
    whole, count = path.read_bytes(), len(made)
    flipped = bytearray(whole)
    if damaged == "cell.json":
        at = whole.index(b'"value": ') + len(b'"value": ')
        flipped[at] = ord("7") if whole[at] != ord("7") else ord("8")
    else:
        flipped[-20] ^= 1
    for content in (b"{", bytes(flipped)):
        path.write_bytes(content)
        made.clear()
        again = report(*flags)
        assert [cell["metrics"] for cell in again["cells"]] == [cell["metrics"] for cell in first["cells"]]
        assert len(made) == count


def test_kid_by_base(report: Callable[..., dict[str, Any]]) -> None:
    found = report("--score", "kid", "--n", "70", "--no-timed", "--rows", ROWS[0])
    assert found["protocol"]["estimator"] == "kid-by-base-f64" and found["headline"] == "kid"
    assert set(found["marks"]) == {"tokenizer alone", "training pictures"}
    assert found["cells"][0]["metrics"]["kid"]["n"] == 70


def test_holm_adjusts_for_the_number_of_tests() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06]) and holm([]) == [] and holm([0.7]) == [0.7]
    with pytest.raises(UserError):
        compare(Score(1.0), Score(1.0))


# ------------------------------------------------------------------------------------------------- W&B


def test_the_offline_run_is_read_by_wandb(shapes_dir: Path, tmp_path: Path) -> None:
    """The record file of the offline run, read by wandb's own code: config, scores, table, pictures, artifact."""
    import wandb

    reader = Path(sys.executable).with_name("wandb")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "WANDB_MODE": "offline"}

    def ran(*words: Any) -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"env": environment, "cwd": ROOT, "capture_output": True, "text": True}
        return subprocess.run([str(w) for w in words], timeout=200, **options)

    if ran(reader, "leet", "inspect", "--help").returncode:
        pytest.skip(f"wandb {wandb.__version__} has no `wandb leet inspect`")
    out = tmp_path / "out"
    done = ran(sys.executable, "eval/report.py", *argv(shapes_dir, out), "--no-timed", "--rows", ROWS[0])
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"wandb sync {out}/wandb/offline-run-*" in done.stderr
    (run,) = (out / "wandb").glob("offline-run-*")
    read = ran(reader, "leet", "inspect", "--json", run)
    assert read.returncode == 0, read.stderr[-2000:]
    records = [json.loads(line) for line in read.stdout.splitlines()]
    report = json.loads((out / "report.json").read_text())
    of = {kind: [r[kind] for r in records if r["type"] == kind] for kind in ("run", "history", "artifact", "exit")}
    config = of["run"][0]["config"]["update"]
    assert (
        config["git_revision"] == report["env"]["git_sha"] and config["protocol"]["hash"] == report["protocol"]["hash"]
    )
    assert config["rows"] == [ROWS[0]] and of["exit"][0].get("exit_code", 0) == 0
    (logged,) = [h["item"] for h in of["history"]]
    key = f"eval/{report['protocol']['id']}/fd/ar"
    assert logged[key] == pytest.approx(report["cells"][0]["metrics"]["fd"]["value"])
    assert logged["cells.nrows"] == 1 and {"pictures/same_seeds._type", "pictures/grid_ar._type"} <= set(logged)
    (artifact,) = [a for a in of["artifact"] if a["type"] == "report"]
    files = {f["path"]: Path(f["local_path"]) for f in artifact["manifest"]["contents"]}
    assert {"report.json", "report.md", "pareto_nfe.png", "same_seeds.png"} <= set(files)
    assert all(path.is_relative_to(out) and path.is_file() for path in files.values()), "complete beside the report"


def test_a_report_without_wandb_is_complete(
    report: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    found = report("--no-timed", "--rows", ROWS[0], "--wandb")
    assert found["plots"] == [] and "wandb is not installed" in capsys.readouterr().err
