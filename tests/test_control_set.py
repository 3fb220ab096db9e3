"""Scoring under a control: rows that mean what they say, and `eval/control.py` from a checkpoint to its reports."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from programs import program
from torch import Tensor

from visgen import control_set as cs
from visgen.config import UserError, build, plugin_config, run_program
from visgen.data import captions
from visgen.generate import Generator
from visgen.metrics.protocol import Score
from visgen.sampling import EngineConfig, SamplingConfig

CPU = torch.device("cpu")
SMALL = """--data.kind synthetic --data.image-size 16 --data.classes 3 --data.n 30 --data.n-held-out 14
    --extractor fd_debug --groups 5 --engine.device cpu --engine.batch 5 --repeats 2"""


def a_set(kind: str = "canny", size: int = 32, n: int = 9, **values: Any) -> cs.ControlSet:
    data = build(plugin_config("visgen.data", "synthetic", image_size=size, n_held_out=n), "held_out")
    control = build(plugin_config("visgen.controls", kind, **values))
    return cs.collect(data, control, None, CPU, 4, torch.arange(4))


def test_pictures_follow_their_own_maps_and_not_those_of_others() -> None:
    of = a_set()
    own, others = torch.arange(9), of.others(0)
    assert sorted(others.tolist()) == own.tolist() and (others != own).all()
    for polarity in ("light_on_dark", "dark_on_light"):
        again = a_set(polarity=polarity)
        same = cs.compare(again, again.pixels[:, None], own, CPU, 4).scores("canny")
        assert same["canny_f1"].value == same["canny_f1_tol1"].value == same["canny_f1_pooled"].value == 1
        shuffled = cs.compare(again, again.pixels[:, None], others, CPU, 4).scores("canny")
        assert 0 < shuffled["canny_f1"].value < 0.5 and shuffled["canny_f1"].se > 0  # type: ignore[operator]
        assert shuffled["canny_f1_tol1"].value > shuffled["canny_f1"].value


def test_errors_are_over_pictures_not_over_their_images() -> None:
    of = a_set()
    images = of.pixels[:, None].expand(-1, 5, -1, -1, -1).contiguous()
    single = cs.compare(of, images[:, :1], of.others(0), CPU, 4).scores("canny")["canny_f1"]
    many = cs.compare(of, images, of.others(0), CPU, 4).scores("canny")["canny_f1"]
    assert math.isclose(many.value, single.value) and math.isclose(many.se or 0, single.se or 1) and many.n == 45


class Blur:
    """An extractor of soft grey maps."""

    def __init__(self, config: Any) -> None:
        self.config = config

    def extract(self, pixels: Tensor) -> Tensor:
        return pixels.mean(2, keepdim=True).expand_as(pixels)

    def labels(self, pixels: Tensor) -> Tensor:
        return (pixels.mean(2) > 0).long() + 2 * (pixels[:, :, 0] > 0.3)


@pytest.mark.parametrize(
    ("kind", "size", "names", "best"),
    [
        ("softedge", 32, {"ssim"}, 1),
        ("lineart", 176, {"ssim", "ms_ssim"}, 1),
        ("depth", 32, {"rmse", "rmse_affine"}, 0),
        ("seg", 32, {"miou"}, 1),
    ],
)
def test_each_kind_has_its_metrics(kind: str, size: int, names: set[str], best: float) -> None:
    of = a_set(size=size, n=4)
    blur = Blur(plugin_config("visgen.controls", kind))
    of = cs.ControlSet(of.pixels, of.labels, cs.extracted(blur, of.pixels, CPU, 4), blur)  # type: ignore[arg-type]
    same = cs.compare(of, of.pixels[:, None], torch.arange(4), CPU, 4).scores(kind)
    other = cs.compare(of, of.pixels[:, None], of.others(0), CPU, 4).scores(kind)
    assert set(same) == {f"{kind}_{name}" for name in names} and f"{kind}_{cs.MAIN[kind]}" in same
    for name in same:
        assert math.isclose(same[name].value, best, abs_tol=1e-6) and abs(other[name].value - best) > 0.05


def test_every_image_is_asked_for_by_the_map_of_its_picture() -> None:
    of, asked = a_set(), []

    class Fake:
        def refills(self, sampler: object) -> bool:
            return False

        def sample(self, labels: Any, seeds: Any, *rules: Any, control: Any, **more: Any) -> Any:
            asked.append((labels, seeds, control))
            return SimpleNamespace(pixels=torch.zeros(len(labels), 3, 32, 32, dtype=torch.uint8))

    settings = SamplingConfig(engine=EngineConfig(device="cpu", batch=4))
    images = cs.drawn(Fake(), of, settings, 3, seed=1, strength=0.5)  # type: ignore[arg-type]
    assert images.shape == (9, 3, 3, 32, 32)
    labels = [label for part in asked for label in part[0]]
    assert labels == of.labels.repeat_interleave(3).tolist()
    maps = torch.cat([part[2][0].map[:, 0] for part in asked])
    assert torch.equal(maps, of.maps.repeat_interleave(3, 0)) and asked[0][2][0].strength == 0.5
    seeds = [seed for part in asked for seed in part[1]]
    assert len(set(seeds)) == 27
    asked.clear()
    cs.drawn(Fake(), of, settings, 3, seed=1, controlled=False)  # type: ignore[arg-type]
    assert all(part[2] is None for part in asked)
    assert [seed for part in asked for seed in part[1]] == seeds, "the uncontrolled model is paired with the other"


def test_the_verdict_says_how_far_and_at_what_cost() -> None:
    def row(f1: float, kid: float) -> dict[str, Score]:
        return {"canny_f1": Score(f1), "kid": Score(kid, se=0.003)}

    scores = {"shuffled": row(0.2, 0.0), "upper_bound": row(0.8, 0.0), "generated": row(0.5, 0.02)}
    assert cs.verdict(scores, "canny").startswith(
        "canny_f1: 0.5000, 50% of the way from shuffled (0.2000) to the upper"
    )
    told = cs.verdict({**scores, "uncontrolled": row(0.2, 0.01)}, "canny")
    assert told.endswith("KID +0.01000 against the uncontrolled model, +2.4 errors")


def test_too_few_pictures() -> None:
    with pytest.raises(UserError, match="3 base pictures are too few"):
        a_set(n=3)


# ------------------------------------------------------------------------------------------------------ program


def run(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, out: Path, *flags: str) -> Path:
    argv = ["control", "--checkpoint", str(checkpoint), *SMALL.split(), "--out", str(out), *flags]
    monkeypatch.setattr(sys, "argv", argv)
    run_program(program("control").main)
    return out


def test_the_program(make_control_run: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = make_control_run(tmp_path / "run")
    out = run(monkeypatch, checkpoint, tmp_path / "out", "--guidance.scale", "2")
    rows = {p.parent.name: json.loads(p.read_text()) for p in out.glob("*/report.json")}
    assert set(rows) == {"generated", "shuffled", "upper_bound", "uncontrolled"}
    for report in rows.values():
        assert {"canny_f1", "canny_f1_tol1", "canny_f1_pooled", "kid"} <= set(report["metrics"])
        assert (
            report["sampling"]["control"]["kind"] == "canny" and "low=100" in report["sampling"]["control"]["extractor"]
        )
    assert rows["shuffled"]["metrics"]["kid"] == rows["generated"]["metrics"]["kid"]
    assert rows["uncontrolled"]["metrics"]["kid"] != rows["generated"]["metrics"]["kid"]
    assert "of the way from shuffled" in (out / "table.md").read_text()
    with Image.open(out / "grid.png") as picture:
        assert picture.height > 2 * picture.width  # 12 pictures; itself, its map, the map of its first image, 2 images
    again = run(monkeypatch, checkpoint, tmp_path / "again", "--guidance.scale", "2", "--engine.batch", "16")
    found = json.loads((again / "generated" / "report.json").read_text())
    assert found["metrics"]["canny_f1"] == rows["generated"]["metrics"]["canny_f1"], "at any batch"


def test_a_model_of_texts_is_asked_by_the_captions(
    make_control_run: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [f"caption {i}" for i in range(8)]
    for i in range(8):
        Image.new("RGB", (16, 16), (30 * i, 255 - 20 * i, 90)).save(tmp_path / f"{i}.png")
    lines = tmp_path / "captions.jsonl"
    lines.write_text("\n".join(json.dumps({"image": f"{i}.png", "text": t}) for i, t in enumerate(words)))
    given = {"encoder": "none", "clean": False, "tokens": 4, "channels": 3}
    captions.write_index(tmp_path / "text", captions.Index(**given))  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    captions.write_shard(
        tmp_path / "text", 0, words, [rng.normal(size=(1 + i % 4, 3)).astype(np.float16) for i in range(8)]
    )
    checkpoint = make_control_run(tmp_path / "run", condition={"kind": "text", **given})
    asked: list[Any] = []
    sample = Generator.sample

    def watched(self: Generator, labels: Any, seeds: Any, *rest: Any, **more: Any) -> Any:
        asked.append((labels, more["prompts"].text.clone()))
        return sample(self, labels, seeds, *rest, **more)

    monkeypatch.setattr(Generator, "sample", watched)
    data = ["--data.file", str(lines), "--data.held-out-file", str(lines), "--data.features", str(tmp_path / "text")]
    flags = "--data.image-size 16 --extractor fd_debug --groups 4 --engine.device cpu --engine.batch 5 --repeats 2"
    argv = ["control", "--checkpoint", str(checkpoint), "--data.kind", "captions", *data, *flags.split()]
    monkeypatch.setattr(sys, "argv", [*argv, "--out", str(tmp_path / "out")])
    run_program(program("control").main)
    report = json.loads((tmp_path / "out" / "generated" / "report.json").read_text())
    assert {"canny_f1", "kid"} <= set(report["metrics"])
    held_out = build(
        plugin_config(
            "visgen.data", "captions", file=lines, held_out_file=lines, image_size=16, features=tmp_path / "text"
        ),
        "held_out",
    )
    texts = torch.cat([text for _, text in asked])[:16]
    assert all(labels is None for labels, _ in asked)
    assert torch.equal(texts, held_out.get_many(range(8))["text"].float().repeat_interleave(2, 0))
    monkeypatch.setattr(
        sys, "argv", ["control", "--checkpoint", str(checkpoint), *SMALL.split(), "--out", str(tmp_path / "other")]
    )
    with pytest.raises(SystemExit):
        run_program(program("control").main)
    assert "data.kind 'synthetic' gives no features of any" in capsys.readouterr().err


def test_what_cannot_be_scored_is_refused(
    make_control_run: Callable[..., Path],
    checkpoint_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    controlled, depth = make_control_run(tmp_path / "run"), make_control_run(tmp_path / "depth", "depth")
    for checkpoint, flags, message in (
        (checkpoint_dir, (), "was trained without control, so there is nothing to score"),
        (controlled, ("--kind", "depth"), "was trained for control canny, not for depth"),
        (controlled, ("--kind", "depth"), "here the options are --kind, --network"),
        (controlled, ("--strength", "1e9"), "strength is 1000000000.0; it must be within [0, 1000]"),
        (controlled, ("--n", "3"), "n is 3; it must be at least 4"),
        (controlled, ("--data.classes", "4"), "has no class 'ring', which the data have"),
        (depth, (), "control depth needs a depth network to read an image"),
    ):
        with pytest.raises(SystemExit) as stop:
            run(monkeypatch, checkpoint, tmp_path / "out", *flags)
        said = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and message in said[-1] and said[-1].startswith("error: ")
