"""Long clips: the memory of their cache, the drift of a window along them, and `eval/rollout.py`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import program

import visgen
from visgen import checkpoint, run_files
from visgen import clip_score as cs
from visgen import evaluate as ev
from visgen import rollout as ro
from visgen.config import UserError, build, plugin_config
from visgen.decode.guidance import Guidance
from visgen.metrics.clips import FrameDifferences
from visgen.metrics.features import build_extractor
from visgen.metrics.protocol import SamplePlan
from visgen.sampling import SamplingConfig
from visgen.train.scoring import ScoreConfig, Scoring

SPRITES = {"image_size": 16, "sprite": 8, "frames": 4, "motions": 3, "n": 60, "n_held_out": 60}
PICTURES = {"kind": "synthetic", "n": 30, "n_held_out": 30, "image_size": 16}


@pytest.fixture(scope="module")
def run(make_blocks: Callable[..., Any], small: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of clips of 4 frames, a frame a block."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = build(small("tokenizers", "conv_kl", patch=4)).eval()
    model = make_blocks((4, 2, 2), (1, 2, 2), channels=64)
    with torch.no_grad():
        model.head.output.weight.mul_(0.01)
    folder = tmp_path_factory.mktemp("rollout") / "run"
    step = folder / run_files.step_name(1)
    step.mkdir(parents=True)
    checkpoint.save_module(step / run_files.WEIGHTS, model, model.config, extra_metadata={"step": 1})
    (step / run_files.META).write_text('{"step": 1}')
    checkpoint.save_module(folder / run_files.TOKENIZER, tokenizer, tokenizer.config)
    return folder


def settings(**values: Any) -> SamplingConfig:
    sampler = plugin_config("visgen.samplers", "blockwise", steps=2)
    return SamplingConfig(**{"sampler": sampler, "guidance": Guidance(2.0), **values})


def test_memory_is_linear_in_the_length_and_constant_in_a_context(run: Path) -> None:
    generator = visgen.load(str(run), device="cpu")
    free = [ro.memory(generator, settings(), 4 * t, None, 2).cache_bytes for t in (1, 2, 3)]
    kept = [ro.memory(generator, settings(), 4 * t, 3, 2) for t in (1, 3)]
    assert free[2] - free[1] == free[1] - free[0] > 0
    slot = 2 * 2 * 2 * 2 * 16 * 4  # clips, layers, keys and values, heads, head size, bytes
    assert free[0] == slot * 4 * (4 + 1), "4 blocks of 4 tokens, and one of the null branch"
    assert {m.cache_bytes for m in kept} == {slot * 4 * (3 + 1 + 1)}
    assert [(m.frames, m.clips, m.context, m.peak_bytes) for m in kept] == [(4, 2, 3, None), (12, 2, 3, None)]
    text = ro.memory_table(kept)
    assert "| MiB, of frames | 4 | 12 |" in text and "| context 3 | 0.02 | 0.02 |" in text


def test_a_context_changes_what_is_drawn_past_it(run: Path) -> None:
    generator, plan = visgen.load(str(run), device="cpu"), SamplePlan(3, 3, 0)
    free, bound = (ro.rolled(generator, plan, settings(), 12, context) for context in (None, 3))
    assert free.shape == (3, 12, 3, 16, 16) and free.dtype == torch.uint8
    assert torch.equal(free[:, :4], bound[:, :4]), "all blocks lie within the context"
    with pytest.raises(UserError, match="sampler ar draws no clips block by block"):
        ro.sampler_of(SamplingConfig(), 8, None)


def test_image_scores_refuse_clips(run: Path) -> None:
    generator = visgen.load(str(run), device="cpu")
    with pytest.raises(UserError, match=r"draws clips of 4 frames, which eval/fvd\.py scores"):
        ev.check_images(generator, settings())
    with pytest.raises(UserError, match=r"score\.\*: the model draws clips of 4 frames"):
        Scoring(ScoreConfig(every=1), None).check(generator.model, generator.tokenizer, "cpu")


def test_drift_is_the_distance_of_each_window() -> None:
    """Real clips do not drift; clips that fade away do."""
    pictures = plugin_config("visgen.data", **PICTURES)
    data = build(plugin_config("visgen.data", "sprites", pictures=pictures, **{**SPRITES, "frames": 12}), "train")
    extractor = FrameDifferences(build_extractor("fd_debug", batch=64))
    held_out = build(plugin_config("visgen.data", "sprites", pictures=pictures, **SPRITES), "held_out")
    ref = cs.reference(held_out, extractor, 60, 0, 16)
    protocol = ev.protocol_of(extractor, ref, held_out, SamplePlan(60, 3, 0), 4)  # type: ignore[arg-type]
    clips = data.get_many(range(60))["pixels"]
    given = (4, range(0, 12, 4), ref, extractor, protocol)
    real = ro.drift(clips, *given, allow_small=True)
    fading = clips * torch.linspace(1, 0.1, 12)[None, :, None, None, None]
    faded = ro.drift(fading.to(torch.uint8), *given, allow_small=True)
    assert list(real) == [0, 4, 8]
    whole = ev.score(iter([(clips[:, 4:8], torch.arange(60))]), ref, extractor, protocol, allow_small=True)[0]
    assert real[4]["fd"].value == pytest.approx(whole["fd"].value, rel=1e-6)
    values = [faded[start]["fd"].value for start in (0, 4, 8)]
    assert values[0] < values[1] < values[2] and values[2] > 2 * real[8]["fd"].value
    assert ro.drift_table({"real": real, "faded": faded}).splitlines()[0] == "| fd of frames from | 0 | 4 | 8 |"


FLAGS = ["--data.kind=sprites"] + [f"--data.{k.replace('_', '-')}={v}" for k, v in SPRITES.items()]
FLAGS += [f"--data.pictures.{k.replace('_', '-')}={v}" for k, v in PICTURES.items()]
FLAGS += ["--frames", "fd_debug", "--n", "12", "--groups", "4", "--allow-small", "--engine.device", "cpu"]
FLAGS += ["--sampler.steps", "1", "--longer", "2", "--clips", "1"]


def rollout(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["eval/rollout.py", *flags])
    program("rollout").main()


def test_the_program(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout(monkeypatch, "--checkpoint", str(run), *FLAGS, "--contexts", "0", "2", "--out", str(tmp_path))
    found = json.loads((tmp_path / "rollout.json").read_text())
    assert list(found["drift"]) == ["all blocks", "context 2", "real"]
    assert all(list(row) == ["0", "4"] and row["4"]["fd"]["value"] > 0 for row in found["drift"].values())
    used = {(m["context"], m["frames"]): m["cache_bytes"] for m in found["memory"]}
    assert used[None, 8] > used[None, 4] and used[2, 8] == used[2, 4]
    text = (tmp_path / "rollout.md").read_text()
    assert "| context 2 |" in text and "--contexts 0 2" in text and (tmp_path / "rollout.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "--checkpoint is needed"),
        (["--checkpoint", "RUN", "--data.frames", "3"], "the data have clips of 3 frames, the model draws 4"),
        (["--checkpoint", "RUN", "--sampler.kind", "ar"], "sampler ar draws no clips|unknown"),
        (["--checkpoint", "RUN", "--sampler.frames", "8"], "--sampler.frames is set for each row here; use --longer"),
        (["--checkpoint", "RUN", "--sampler.context", "2"], "--sampler.context is set for each row here"),
        (["--checkpoint", "RUN", "--sampler.solver", "heun"], "solver heun is for a model of velocity"),
        (["--checkpoint", "RUN", "--longer", "1"], "longer is 1; it must be at least 2"),
        (["--checkpoint", "RUN", "--n", "3"], "leaving out one of 4 groups|groups 4 exceeds"),
    ],
)
def test_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str], said: str) -> None:
    given = [str(run) if flag == "RUN" else flag for flag in flags]
    rest = [flag for flag in FLAGS if flag != "--sampler.steps"] if "ar" in flags else FLAGS
    rest = rest[:-5] + rest[-4:] if "ar" in flags else rest
    with pytest.raises(UserError, match=said):
        rollout(monkeypatch, *rest, *given, "--out", str(tmp_path))


@pytest.mark.parametrize("name", ["fid", "report"])
def test_scores_of_images_refuse_clips(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    data = [*FLAGS[: FLAGS.index("--frames")]]
    flags = ["--checkpoint", str(run), *data, "--extractor", "fd_debug", "--engine.device", "cpu", "--allow-small"]
    rest = (
        ["--rows", "one: sampler.kind=blockwise", "--score", "fd"]
        if name == "report"
        else ["--sampler.kind", "blockwise"]
    )
    given = [f"eval/{name}.py", *flags, *rest, "--n", "12", "--groups", "4", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", given)
    with pytest.raises(UserError, match="clips of 4 frames, which eval/fvd"):
        program(name).main()


def test_models_of_images_have_no_length(checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="draws single images, which have no length"):
        rollout(monkeypatch, *FLAGS, "--checkpoint", str(checkpoint_dir), "--out", str(tmp_path))
