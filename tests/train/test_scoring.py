"""Distances during training: the values are those of the saved average, and training does not notice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from test_processes import launch
from toy import CLOCK

import visgen
from visgen import evaluate as ev
from visgen.config import UserError, build, plugin_config
from visgen.generate import Generator
from visgen.metrics.features import build_extractor
from visgen.metrics.protocol import SamplePlan
from visgen.sampling import SamplingConfig
from visgen.tally import Bundle, Tally
from visgen.train import scoring
from visgen.train.main import train

DATA = "--data.kind synthetic --data.image-size 16 --data.classes 3 --data.n 24 --data.n-held-out 20"
TINY = f"""--objective.kind next_token --objective.model.grid 1 8 8 --objective.model.vocab 16 {DATA}
    --objective.model.backbone.layers 1 --objective.model.backbone.heads 2 --objective.model.backbone.width 16
    --objective.model.backbone.mlp-multiple-of 16 --objective.model.condition.classes 3 --log.no-wandb
    --loop.steps 3 --loop.batch 8 --loop.precision fp32 --loop.workers 0 --loop.preview-every 0 --loop.save-every 3
    --ema.decay 0.5 --optim.lr 1e-2 --optim.warmup 0"""
SCORE = "--score.every 2 --score.n 12 --score.extractor fd_debug --score.allow-small --score.batch 5"


@pytest.fixture
def words(checkpoint_dir: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def make(name: str, *flags: str) -> list[str]:
        where = ["--objective.tokenizer", str(checkpoint_dir), "--loop.out", str(tmp_path / name)]
        return [*TINY.split(), *where, *flags]

    return make


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_training_does_not_notice(words: Callable[..., list[str]], tmp_path: Path) -> None:
    train(words("plain"))
    train(words("scored", *SCORE.split()))
    a, b = (load_file(tmp_path / name / "step_0000003/model.safetensors") for name in ("plain", "scored"))
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)
    scored = [line for line in lines(tmp_path / "scored") if any(k.startswith("eval/") for k in line)]
    assert [line["step"] for line in scored] == [2, 3], "every second step, and the last"
    keys = {"eval/fd_debug-synthetic/held_out-12/fd", "eval/fd_debug-synthetic/held_out-12/kid"}
    assert keys <= set(scored[0]) and scored[0] != scored[1]
    rest = [line for line in lines(tmp_path / "scored") if line not in scored]
    drop = lambda x: {k: v for k, v in x.items() if k not in CLOCK}  # noqa: E731
    assert [drop(x) for x in rest] == [drop(x) for x in lines(tmp_path / "plain")]


def test_the_values_are_those_of_the_saved_average(words: Callable[..., list[str]], tmp_path: Path) -> None:
    train(words("run", *SCORE.split(), "--score.guidance.scale", "1.5", "--score.groups", "3"))
    found = lines(tmp_path / "run")[-1] | lines(tmp_path / "run")[-2]
    generator = visgen.load(str(tmp_path / "run"), device="cpu")
    extractor = build_extractor("fd_debug")
    data = build(plugin_config("visgen.data", "synthetic", image_size=16, classes=3, n=24, n_held_out=20), "held_out")
    settings = SamplingConfig(guidance=visgen.decode.guidance.Guidance(1.5))
    tally = Tally(extractor, Bundle.of(ev.reference(data, extractor)), 12, 3, ev.World(), True, neighbours=False)
    tally.take(ev.generated(generator, SamplePlan(12, 3, 0), settings), extractor)
    for name, score in tally.scores().items():
        key = f"eval/fd_debug-synthetic/held_out-12/{name}"
        assert found[key] == pytest.approx(score.value, rel=1e-6)
        assert found[f"{key}_se"] == pytest.approx(score.se, rel=1e-6)


def test_random_numbers_come_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    made = scoring.Scoring(scoring.ScoreConfig(every=1), None)
    made.extractor, made.precision, made.tokenizer = build_extractor("fd_debug"), "fp32", None

    def broken(x: Any) -> Any:
        torch.rand(5)
        raise RuntimeError("no memory")

    torch.manual_seed(3)
    monkeypatch.setattr(scoring, "copy", SimpleNamespace(deepcopy=broken))
    with pytest.raises(RuntimeError, match="no memory"):
        made.measure(torch.nn.Identity())
    drawn = torch.rand(4)
    assert torch.equal(drawn, torch.rand(4, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--score.extractor fd_efflite0", "n = 12 images is not above the 1280 feature dimensions of fd_efflite0"),
        ("--score.n 2", "score.n is 2; it must be at least 4"),
        ("--score.sampler.kind masked", "score.*: sampler masked is not for this model, whose tokens are codes"),
        ("--score.data.kind synthetic --score.data.image-size 32", "the data's image_size is (32, 32)"),
        ("--score.data.kind synthetic --score.data.image-size 16 --score.data.classes 4", "has no class 'ring', which"),
        ("--score.data.kind codes --score.data.root nowhere", "score.every needs held-out pictures ("),
    ],
)
def test_what_cannot_be_scored_is_refused_before_training(
    words: Callable[..., list[str]], flags: str, message: str
) -> None:
    given = [*SCORE.split(), *flags.split()]
    if "efflite0" in flags:
        given.append("--score.no-allow-small")
    with pytest.raises(UserError) as error:
        train(words("refused", *given))
    assert message in str(error.value)


def test_other_pictures_are_asked_for_by_the_name_of_their_class(
    words: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Label 0 of a folder of triangles and squares is a square, which training calls 1."""
    asked, real = set(), Generator.sample
    monkeypatch.setattr(
        Generator, "sample", lambda self, labels, *given: (asked.update(labels), real(self, labels, *given))[1]
    )
    for name in ("square", "triangle"):
        for i in range(6):
            path = tmp_path / "pictures" / name / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (40 * i, 9, 200)).save(path)
    flags = ["--score.data.kind", "folder", "--score.data.root", str(tmp_path / "pictures"), "--score.data.image-size"]
    train(words("run", *SCORE.split(), *flags, "16", "--score.data.held-out-fraction", "0.7"))
    assert asked == {1, 2}


@pytest.mark.slow
def test_two_processes_score_alike(words: Callable[..., list[str]], tmp_path: Path) -> None:
    flags = (*SCORE.split(), "--score.n", "70", "--optim.lr", "1e-12")  # weights that differ may flip a token
    train(words("one", *flags))
    accelerate = ("-m", "accelerate.commands.launch", "--config_file", "configs/accelerate/cpu2.yaml")
    launch(*accelerate, "--main_process_port", "0", "train.py", *words("two", *flags), CUDA_VISIBLE_DEVICES="")
    one, two = (
        [x for x in lines(tmp_path / run) if "eval/fd_debug-synthetic/held_out-70/fd" in x] for run in ("one", "two")
    )
    assert len(one) == len(two) == 2
    for a, b in zip(one, two, strict=True):
        assert a == pytest.approx(b, rel=1e-6)
