"""`eval/small.py`: one report against the slow way, pictures, two processes, and one-line errors."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

import visgen
from visgen.config import dump, load
from visgen.data.synthetic import Config, Synthetic
from visgen.metrics.features import build_extractor
from visgen.metrics.kid import kid
from visgen.metrics.protocol import SamplePlan
from visgen.metrics.report import Report
from visgen.small_set import SmallSet
from visgen.train.main import TrainConfig

ROOT = Path(__file__).parents[1]
DATA = {"kind": "synthetic", "image_size": 16, "classes": 3, "n": 90, "n_held_out": 30}
CONFIG = Config(**{k: v for k, v in DATA.items() if k != "kind"})  # type: ignore[arg-type]
FLAGS = ("--extractor", "fd_debug", "--engine.device", "cpu", "--n", "60", "--shown", "6", "--plan-seed", "5")
PICTURES = {"neighbours.png", "neighbours_held_out.png", "distances.png"}


@pytest.fixture(scope="module")
def run_dir(shapes_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint as a run on synthetic data, which its config.yaml names."""
    copy = shutil.copytree(shapes_dir, tmp_path_factory.mktemp("small") / "run")
    config = load(TrainConfig, values={"data": DATA})
    (copy / "config.yaml").write_text(yaml.safe_dump(dump(config)))
    return copy


@pytest.fixture(scope="module")
def run_on_codes(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = shutil.copytree(run_dir, tmp_path_factory.mktemp("codes") / "run")
    (copy / "config.yaml").write_text(yaml.safe_dump(dump(load(TrainConfig, values={"data": "codes"}))))
    return copy


def program(*argv: object) -> None:
    before, sys.argv = sys.argv, ["eval/small.py", *map(str, argv)]
    try:
        runpy.run_path(str(ROOT / "eval" / "small.py"), run_name="__main__")
    finally:
        sys.argv = before


@pytest.fixture(scope="module")
def out(run_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "small"
    program("--checkpoint", run_dir, *FLAGS, "--guidance.scale", "1.5", "--out", folder)
    return folder


def test_the_report_is_what_the_slow_way_gives(out: Path, run_dir: Path) -> None:
    report = Report.load(out)
    held_out = Synthetic(CONFIG, "held_out")
    rows = SamplePlan(60, 30, seed=5).rows()
    generator = visgen.load(run_dir, device="cpu")
    drawn = generator.sample(held_out.labels[rows.label].tolist(), rows.seed.tolist(), guidance=1.5).pixels
    extractor = build_extractor("fd_debug")
    real = extractor(held_out.get_many(range(30))["pixels"][:, 0])["pool"]
    features = torch.stack([extractor(drawn[rows.label == j])["pool"] for j in range(30)])  # [M, R, D]
    assert report.scores["kid_generated"].value == pytest.approx(kid(features, real).value, rel=1e-4)
    sizes = {row: (report.scores[f"kid_{row}"].n, report.scores[f"kid_{row}"].n_ref) for row in ("generated", "train")}
    assert sizes == {"generated": (60, 30), "train": (60, 30)}, "90 training images would allow three for each"
    assert (report.scores["kid_recon"].n, report.scores["kid_real"].n, report.scores["nats_train"].n) == (30, 15, 90)
    assert report.scores["copies_closer"].value > 0.99, "synthetic images are not augmented, so copies are exact"
    assert report.checks["kid_passes"] is (report.scores["kid_generated"].value <= report.checks["kid_limit"])


def test_the_report_says_under_which_protocol(out: Path) -> None:
    report = Report.load(out)
    wanted = {"reference": "synthetic/held_out", "reference_n": 30, "n": 60, "labels": "source", "groups": 25}
    assert {k: v for k, v in report.protocol.to_dict().items() if k in wanted} == wanted
    assert report.sampling["plan"] == SamplePlan(60, 30, 5).hash and report.sampling["guidance"]["scale"] == 1.5
    page = (out / "report.md").read_text()
    assert report.protocol.hash in page and "--plan-seed 5" in page and page.count("±") > 10
    words = "PASS" if report.checks["kid_passes"] else "FAIL"
    assert f"**{words}**" in page and all(f"]({name})" in page for name in PICTURES)
    assert {p.name for p in out.iterdir() if p.name[0] != "."} == {"report.json", "report.md", *PICTURES}


def test_each_picture_stands_beside_its_nearest_training_images(out: Path) -> None:
    """The upper left picture of neighbours_held_out.png is a held-out one; enlarged 8 times, padded by 16 px."""
    sheet = np.array(Image.open(out / "neighbours_held_out.png"))
    data = SmallSet(CONFIG)
    tile = lambda x: sheet[16 : 16 + 128 : 8, x : x + 128 : 8].transpose(2, 0, 1)  # noqa: E731
    held_out, train = (d.get_many(range(len(d)))["pixels"][:, 0].numpy() for d in (data.held_out, data.train))
    assert (held_out == tile(16)).all((1, 2, 3)).sum() == 1
    near = [16 + 128 + 16 + 8 + 16 + i * 144 for i in range(3)]
    assert [int((train == tile(x)).all((1, 2, 3)).sum()) for x in near] == [1, 1, 1]
    assert sheet.shape[0] == 3 * 144 + 16, "6 are shown in two columns"


def test_the_data_may_be_named_and_a_step_chosen(run_dir: Path, tmp_path: Path) -> None:
    words = ("--data.kind", "synthetic", "--data.image-size", "16", "--data.classes", "3", "--data.n", "30")
    program("--checkpoint", run_dir / "step_0000005", *FLAGS, *words, "--data.n-held-out", "30", "--out", tmp_path)
    report = Report.load(tmp_path)
    assert report.model["step"] == 5 and report.scores["kid_train"].n == 30


@pytest.mark.slow
def test_two_processes_write_the_report_of_one(out: Path, run_dir: Path, tmp_path: Path) -> None:
    words = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml")
    flags = ("--checkpoint", run_dir, *FLAGS, "--guidance.scale", "1.5", "--out", tmp_path)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *words, "--main_process_port", "0", "eval/small.py", *map(str, flags)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = Report.load(out), Report.load(tmp_path)
    assert one.protocol == two.protocol and one.scores.keys() == two.scores.keys()
    for name, score in one.scores.items():
        assert two.scores[name].value == pytest.approx(score.value, rel=1e-4, abs=1e-6), name
    for name in PICTURES:
        assert np.array_equal(np.array(Image.open(out / name)), np.array(Image.open(tmp_path / name))), name


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--checkpoint is needed"),
        (["--checkpoint", "RUN", "--n", "61"], "--n 61 must be a multiple of the 30 held-out base pictures"),
        (["--checkpoint", "RUN", "--groups", "1"], "groups is 1; it must be at least 2"),
        (["--checkpoint", "RUN", "--shown", "0"], "shown is 0; it must be at least 1"),
        (["--checkpoint", "RUN", "--extractor-batch", "0"], "extractor_batch is 0; it must be at least 1"),
        (["--checkpoint", "RUN", "--plan-seed", "-1"], "plan_seed is -1; "),
        (["--checkpoint", "RUN", "--step", "best"], "knows no best step"),
        (["--checkpoint", "BARE"], "there is no config.yaml in"),
        (["--checkpoint", "CODES"], "data.kind codes (data_cache/codes) gives tokens, pictures are needed"),
        (
            ["--checkpoint", "RUN", "--data.kind", "synthetic", "--data.image-size", "32"],
            "the data's image_size is (32, 32)",
        ),
        (["--checkpoint", "RUN", "--extractor", "fd_inception"], "extractor 'fd_inception' is unknown"),
    ],
)
def test_errors_are_one_line_before_any_work(
    argv: list[str],
    words: str,
    run_dir: Path,
    run_on_codes: Path,
    shapes_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"RUN": str(run_dir), "BARE": str(shapes_dir), "CODES": str(run_on_codes)}
    first = [] if "--extractor" in argv else ["--extractor", "fd_debug"]
    with pytest.raises(SystemExit) as found:
        program(*first, "--engine.device", "cpu", "--out", tmp_path, *(names.get(word, word) for word in argv))
    said = capsys.readouterr().err
    assert found.value.code == 2 and [line for line in said.splitlines() if "error" in line] == said.splitlines()[-1:]
    assert words in said.splitlines()[-1] and not list(tmp_path.glob("[!.]*"))


def test_the_report_is_plain_json(out: Path) -> None:
    data = json.loads((out / "report.json").read_text())
    assert data["metrics"]["nats_held_out"]["terms"].keys() == {"bits"}
    assert len(data["metrics"]["kid_generated"]["leave_out"]) == 15, "groups hold two of the 30 bases or more"
