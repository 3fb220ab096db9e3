"""Data and a checkpoint: the size that is taken, classes that are matched by name, in every program that scores."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from programs import program

import visgen
from visgen import scale
from visgen.config import UserError, build, plugin_config, run_program
from visgen.data.synthetic import Config, Synthetic
from visgen.generate import Generator
from visgen.metrics.features import build_extractor
from visgen.metrics.protocol import SamplePlan
from visgen.sampling import SamplingConfig
from visgen.scored_data import build_pictures, check_checkpoint, check_match, fit_size
from visgen.tokenizers import Tokenizer

SMALL = ["--extractor", "fd_debug", "--engine.device", "cpu", "--groups", "4"]
PROGRAMS = {
    "fid": "--n 20 --allow-small",
    "fid source": "--n 20 --allow-small --labels source",
    "small": "--n 24",
    "control": "--repeats 1",
    "report": "--score kid --n 24 --no-timed --no-wandb",
    "report fd": "--score fd --n 20 --allow-small --no-timed --no-wandb",
}


def write_folder(root: Path, names: Sequence[str], size: int = 16, count: int = 12) -> Path:
    """Pictures of the synthetic shapes, a class a folder; those of names that are no shape are noise."""
    shapes = Synthetic(Config(image_size=size, classes=3, n=60, n_held_out=60), "train")
    for split in ("train", "held_out"):
        for name in names:
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                pixels = shapes.get(3 * i + (split == "train"))["pixels"][0].permute(1, 2, 0).numpy()
                Image.fromarray(pixels).resize((size, size)).save(folder / f"{i}.png")
    return root


def argv(name: str, checkpoint: Path, root: Path, out: Path, *more: str) -> list[str]:
    given = ["--checkpoint", str(checkpoint), "--data.kind", "folder", "--data.root", str(root), "--out", str(out)]
    return [f"eval/{name.split()[0]}.py", *given, *SMALL, *PROGRAMS[name].split(), *more]


@pytest.fixture
def score(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[int]]:
    """Runs a program; the labels that it asks the generator for, in their order."""
    asked: list[int] = []
    real = Generator.sample

    def sample(self: Generator, labels: Any = None, *given: Any, **more: Any) -> Any:
        asked.extend(labels)
        return real(self, labels, *given, **more)

    monkeypatch.setattr(Generator, "sample", sample)

    def run(name: str, checkpoint: Path, root: Path, *more: str) -> list[int]:
        asked.clear()
        monkeypatch.setattr(sys, "argv", argv(name, checkpoint, root, tmp_path / "out", *more))
        run_program(program(name.split()[0]).main)
        return list(asked)

    return run


@pytest.fixture(scope="module")
def runs(
    shapes_dir: Path, make_control_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    controlled = make_control_run(tmp_path_factory.mktemp("controlled") / "run")
    return {name: controlled if name == "control" else shapes_dir for name in PROGRAMS}


@pytest.mark.parametrize("name", PROGRAMS)
def test_images_are_asked_for_by_the_name_of_the_class(
    name: str, runs: dict[str, Path], score: Callable[..., list[int]], tmp_path: Path
) -> None:
    """`square` and `triangle` are 0 and 1 of the folder, 1 and 2 of the checkpoint's disc, square, triangle."""
    asked = score(name, runs[name], write_folder(tmp_path / "data", ["square", "triangle"]))
    assert set(asked) == {1, 2} and min(asked.count(1), asked.count(2)) >= 9


@pytest.mark.parametrize("name", PROGRAMS)
def test_another_class_is_refused_in_one_line(
    name: str,
    runs: dict[str, Path],
    score: Callable[..., list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        score(name, runs[name], write_folder(tmp_path / "data", ["disc", "cat", "triangle"]))
    said = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and said.startswith("error: ") and str(runs[name]) in said
    assert "'cat'" in said and "'disc'" in said


def test_names_are_mapped_or_numbers_where_there_are_none(shapes_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = visgen.load(str(shapes_dir), device="cpu")
    data = Synthetic(Config(image_size=16, classes=3), "held_out")
    assert check_checkpoint(data, generator).tolist() == [0, 1, 2]
    data.classes = ["triangle", "disc"]
    assert check_checkpoint(data, generator).tolist() == [2, 0]
    generator.classes = []
    with pytest.raises(UserError, match="2 classes, the checkpoint 3 without names"):
        check_checkpoint(data, generator)
    data.classes = ["a", "b", "c"]
    assert check_checkpoint(data, generator, "checkpoint unnamed").tolist() == [0, 1, 2]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "checkpoint unnamed" in said[0] and "by number" in said[0] and "'a'" in said[0]
    assert check_match(data, generator.tokenizer).tolist() == [0, 1, 2], "a tokenizer has no classes"


def test_the_size_is_the_checkpoints_unless_the_user_says_one(tmp_path: Path, capsys: Any) -> None:
    tokenizer: Tokenizer = argparse.Namespace(image_size=(64, 64))  # type: ignore[assignment]
    folder = plugin_config("visgen.data", "folder")
    assert fit_size(folder, tokenizer, ["--data.kind", "folder"]).image_size == 64
    assert "64" in capsys.readouterr().err
    for said in (["--data.image-size", "256"], ["--data.image_size=256"]):
        assert fit_size(folder, tokenizer, said) is folder
    (tmp_path / "a.yaml").write_text("data: {kind: folder, image_size: 256}")
    assert fit_size(folder, tokenizer, [str(tmp_path / "a.yaml"), "--n", "3"]) is folder
    emoji = plugin_config("visgen.data", "emoji")
    assert fit_size(emoji, tokenizer, []) is emoji, "it has a size of its own"
    assert not capsys.readouterr().err


def test_real_pictures_have_the_size_of_a_checkpoint_that_is_given(
    score: Callable[..., list[int]], shapes_dir: Path, tmp_path: Path
) -> None:
    root = write_folder(tmp_path / "data", ["disc", "square"], size=24)
    assert score("fid", shapes_dir, root, "--rows", "real") == []
    assert json.loads((tmp_path / "out/real/report.json").read_text())["protocol"]["size"] == 16


@pytest.mark.parametrize("kind", ["codes", "pairs"])
def test_caches_of_tokens_are_no_pictures(kind: str) -> None:
    with pytest.raises(UserError, match=f"data.kind {kind} .* gives tokens, pictures are needed"):
        build_pictures(plugin_config("visgen.data", kind), "held_out")


def test_an_identity_names_all_that_images_depend_on(shapes_dir: Path, checkpoint_dir: Path, tmp_path: Path) -> None:
    generator, labels = visgen.load(str(shapes_dir), device="cpu"), torch.arange(3)
    settings, plan, extractor = SamplingConfig(), SamplePlan(9, 3), build_extractor("fd_debug")

    def identity(by: Any = settings, asked: Any = labels) -> dict[str, str]:
        return scale.identity_of(generator, by, plan, asked, extractor)

    def changed(other: dict[str, str]) -> list[str]:
        return [key for key, value in first.items() if other[key] != value]

    first = identity()
    assert identity() == first and changed(identity(asked=labels.flip(0))) == ["labels"]
    weight = next(generator.tokenizer.decoder.parameters())
    weight.data.flatten()[0] += 1  # which the tokenizer's hash leaves out, for codes do not depend on it
    assert changed(identity()) == ["checkpoint"]
    weight.data.flatten()[0] -= 1
    draft = plugin_config("visgen.samplers", "speculative", draft=tmp_path / "draft.safetensors")
    names = []
    for content in (b"one", b"two"):
        draft.draft.write_bytes(content)
        names.append(identity(SamplingConfig(sampler=draft))["helpers"])
    assert names[0] != names[1]


def test_the_data_of_a_run_are_named(shapes_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from visgen.train.main import data_of

    assert build(data_of("assets/emoji64"), "held_out").classes[0] == "Smileys & Emotion"
    assert "data: emoji, from assets/emoji64/config.yaml" in capsys.readouterr().err
    with pytest.raises(UserError, match="no config"):
        data_of(str(shapes_dir))
