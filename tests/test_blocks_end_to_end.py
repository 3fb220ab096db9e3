"""A model of vectors from its run directory to images and clips: loading, sampling, known frames, files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from sample_program import refused, run

import visgen
import visgen.encode as program
from visgen import checkpoint, run_files
from visgen.config import UserError, build, plugin_config
from visgen.data._clips import count, read_clip, write_gif
from visgen.decode.warp import Warp
from visgen.model import Model
from visgen.train.main import train

ROOT = Path(__file__).parents[1]
STEPS = {"kind": "blockwise", "steps": 3}


def saved(run_dir: Path, model: Model, tokenizer: Any) -> Path:
    step = run_dir / run_files.step_name(1)
    step.mkdir(parents=True)
    facts = {"step": 1, "classes": json.dumps(["a", "b", "c"])}
    checkpoint.save_module(step / run_files.WEIGHTS, model, model.config, extra_metadata=facts)
    (step / run_files.META).write_text(json.dumps({"step": 1}))
    checkpoint.save_module(run_dir / run_files.TOKENIZER, tokenizer, tokenizer.config)
    return run_dir


@pytest.fixture(scope="module")
def runs(
    make_blocks: Callable[..., Model], small: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Run directories of a model of images and of one of clips: 16 px, 4 x 4 tokens of 2 x 2 patches."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        tokenizer = build(small("tokenizers", "conv_kl", patch=2)).eval()
    folder, found = tmp_path_factory.mktemp("blocks"), {}
    for name, grid, block in (("image", (1, 4, 4), (1, 2, 2)), ("clip", (4, 4, 4), (2, 4, 4))):
        model = make_blocks(grid, block, channels=16)
        with torch.no_grad():
            model.head.output.weight.mul_(0.01)
        found[name] = saved(folder / name, model, tokenizer)
    return found


def sampler(**values: Any) -> Any:
    return plugin_config("visgen.samplers", **{**STEPS, **values})


def test_images_of_a_run(runs: dict[str, Path]) -> None:
    generator = visgen.load(str(runs["image"]), device="cpu", batch=2)
    assert generator.model.continuous
    images = generator.sample(["b", 0, 2], seeds=[5, 6, 7], guidance=1.5, sampler=sampler())
    assert images.pixels.shape == (3, 3, 16, 16) and images.clips is None
    assert images.tokens.shape == (3, 16, 16) and images.tokens.is_floating_point()
    alone = generator.sample([2], seeds=[7], guidance=1.5, sampler=sampler())
    assert torch.allclose(alone.tokens[0], images.tokens[2], rtol=1e-3, atol=1e-3)
    assert generator.sample([0], sampler="blockwise").notes == {"blocks": 4}


def test_the_models_own_sampler_is_the_default(runs: dict[str, Path], checkpoint_dir: Path) -> None:
    generator = visgen.load(str(runs["image"]), device="cpu")
    assert torch.equal(generator.sample([1]).tokens, generator.sample([1], sampler="blockwise").tokens)
    with pytest.raises(UserError, match=r"sampler ar is not for this model, .* vectors; use --sampler\.kind blockwise"):
        generator.sample([1], sampler="ar")
    with pytest.raises(UserError, match="sampler blockwise is not for this model, whose tokens are codes"):
        visgen.load(str(checkpoint_dir), device="cpu").sample([1], sampler="blockwise")
    with pytest.raises(UserError, match="filters a law over codes"):
        generator.sample([1], warp=Warp(0.5))


def test_inpainting_keeps_what_is_known(runs: dict[str, Path]) -> None:
    generator = visgen.load(str(runs["image"]), device="cpu")
    pixels = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    mask = (torch.arange(16) < 8)[None, :, None].expand(1, 16, 16)
    images = generator.sample([0, 1], known=(pixels, mask), sampler=sampler())
    wanted = generator.tokenizer.encode(pixels.unsqueeze(1))
    assert torch.equal(images.tokens[:, :8], wanted[:, :8].expand(2, -1, -1))


def test_clips_of_a_run_and_their_continuation(runs: dict[str, Path]) -> None:
    generator = visgen.load(str(runs["clip"]), device="cpu")
    images = generator.sample([0, 1], sampler=sampler(frames=8))
    assert images.clips is not None and images.clips.shape == (2, 8, 3, 16, 16)
    assert torch.equal(images.pixels, images.clips[:, 0])
    first = torch.rand(1, 2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    mask = torch.ones(1, 2, 16, 16, dtype=torch.bool)
    found = generator.sample([0, 1], known=(first, mask), sampler=sampler(frames=8))
    assert torch.equal(found.tokens[:, :32], generator.tokenizer.encode(first).expand(2, -1, -1))
    assert found.tokens.shape == (2, 128, 16) and not torch.equal(found.tokens[:, 32:], images.tokens[:, 32:])
    assert found.nfe == images.nfe - 3, "a known block is only committed"
    half = generator.sample([0], known=(first[:, :1], mask[:, :1]), sampler=sampler())
    assert torch.equal(half.tokens[:, :16], generator.tokenizer.encode(first[:, :1]))
    with pytest.raises(UserError, match=r"known pixels \[1, 2, 3, 16, 16\] .* must be \[B, 3, 16, 16\]"):
        visgen.load(str(runs["image"]), device="cpu").sample([0], known=(first, mask))


def test_the_program_writes_videos(runs: dict[str, Path], tmp_path: Path) -> None:
    flags = ["--sampler.kind", "blockwise", "--sampler.steps", "2", "--num", "1", "--label", "a", "--fps", "4"]
    run(runs["clip"], tmp_path / "a", *flags)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["0000_000000.gif", "0000_000000.mp4", "grid.png"]
    path = tmp_path / "a" / "0000_000000.mp4"
    assert count(path) == count(path.with_suffix(".gif")) == 4
    with av.open(str(path)) as container:
        about = json.loads(container.metadata["comment"])
        assert float(container.streams.video[0].average_rate) == 4
    assert about["label"] == 0 and about["sampler"]["steps"] == 2
    wanted = visgen.load(str(runs["clip"]), device="cpu").sample([0], sampler=sampler(steps=2)).clips
    assert wanted is not None
    shown = read_clip(path, 16, 4)
    assert (shown.float() - wanted[0].float()).abs().mean() < 12, "up to the video's compression"
    run(runs["clip"], tmp_path / "b", *flags, "--known.clip", str(path), "--known.frames", "2")
    again = read_clip(tmp_path / "b" / "0000_000000.mp4", 16, 4)
    assert (again[:2].float() - shown[:2].float()).abs().mean() < 60


def test_first_frames_that_cannot_be_known(
    runs: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "short.gif"
    write_gif(path, torch.randint(0, 255, (3, 3, 16, 16), dtype=torch.uint8), 8)
    out = ["--out", str(tmp_path / "o"), "--engine.device", "cpu", "--sampler.kind", "blockwise"]
    known = ["--known.clip", str(path), *out]
    told = refused(capsys, "--checkpoint", str(runs["image"]), "--label", "a", *known)
    assert "--known.clip goes with a model of clips" in told
    image = ["--label", "a", *out, "--known.image", str(ROOT / "assets/figures/cupcake.png")]
    told = refused(capsys, "--checkpoint", str(runs["clip"]), *image)
    assert "--known.image goes with a model of images, this checkpoint draws clips; use --known.clip" in told
    for name in ("frames", "stride"):
        told = refused(capsys, "--checkpoint", str(runs["clip"]), "--label", "a", f"--known.{name}", "2", *out)
        assert f"--known.{name} 2 is of a clip; add --known.clip" in told
    assert "--known.clip needs --label" in refused(capsys, "--checkpoint", str(runs["clip"]), *known)
    told = refused(capsys, "--checkpoint", str(runs["clip"]), "--label", "a", *known, "--known.frames", "4")
    assert "short.gif has 3 frames; 4 at a stride of 1 need 4: ask for at most 3 frames" in told
    write_gif(path, torch.randint(0, 255, (6, 3, 16, 16), dtype=torch.uint8), 8)
    told = refused(capsys, "--checkpoint", str(runs["clip"]), "--label", "a", *known, "--known.frames", "4")
    assert "--known.frames 4 leaves nothing to draw of 4 frames; lower it, or raise --sampler.frames" in told


@pytest.mark.parametrize("cached", [False, True])
def test_training_on_clips_leaves_a_run_that_samples(
    runs: dict[str, Path],
    tmp_path: Path,
    cached: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checked = program.preflight  # whose margin a tokenizer of random weights does not reach
    monkeypatch.setattr(program, "preflight", lambda tokenizer, codes, **rest: checked(tokenizer, codes, margin_db=-99))
    tokenizer = str(runs["clip"] / run_files.TOKENIZER)
    pictures = {"kind": "synthetic", "image_size": 16, "n": 9, "n_held_out": 9}
    data = {"kind": "sprites", "image_size": 16, "sprite": 8, "frames": 4, "motions": 3, "n": 12, "n_held_out": 6}
    sprites = [f"--data.{k}={v}" for k, v in data.items() if k != "kind"]
    sprites = ["--data.kind", "sprites", *sprites, "--data.pictures.kind", "synthetic"]
    sprites += [f"--data.pictures.{k}={v}" for k, v in pictures.items() if k != "kind"]
    if cached:
        for split in ("train", "held_out"):
            program.main(["--tokenizer", tokenizer, "--out", str(tmp_path / "c"), "--split", split, *sprites, "--cpu",
                          "--views", "center"])  # fmt: skip
        sprites = ["--data.kind", "codes", "--data.root", str(tmp_path / "c")]
    config = ROOT / "configs" / "debug" / "acdit.yaml"
    train([str(config), *sprites, "--objective.tokenizer", tokenizer, "--objective.model.grid", "4", "4", "4",
           "--objective.model.channels", "16", "--objective.model.backbone.block", "2", "4", "4",
           "--objective.model.backbone.width", "16", "--objective.model.condition.classes", "3",
           "--objective.preview.images", "2", "--objective.preview.sampler.steps", "2", "--optim.warmup", "1",
           "--loop.steps", "3", "--loop.batch", "4", "--loop.log-every", "1", "--loop.save-every", "3",
           "--loop.preview-every", "3", "--loop.eval-every", "3", "--loop.out", str(tmp_path / "run")])  # fmt: skip
    assert "held_out/mse" in capsys.readouterr().err
    generator = visgen.load(str(tmp_path / "run"), device="cpu")
    assert generator.sample(["fall"], sampler=sampler()).clips.shape == (1, 4, 3, 16, 16)  # type: ignore[union-attr]


def test_data_that_does_not_fit_is_refused(runs: dict[str, Path], tmp_path: Path) -> None:
    config = str(ROOT / "configs" / "debug" / "acdit.yaml")
    tokenizer = ["--objective.tokenizer", str(runs["image"] / run_files.TOKENIZER), "--data.image-size", "16"]
    shape = ["--objective.model.grid", "1", "4", "4", "--objective.model.channels", "16"]
    block = ["--objective.model.backbone.block", "1", "2", "2"]
    out = ["--loop.out", str(tmp_path / "run")]
    for flags, said in (
        ([*tokenizer, *shape[:4], *block, "--objective.model.channels", "4"], "its channels is 16, the model's is 4"),
        ([*tokenizer, "--objective.model.grid", "2", "4", "4", *shape[4:], *block], "the data gives 1 frames a sample"),
        ([*tokenizer, *shape, "--objective.model.backbone.block", "1", "3", "2"], "does not divide the grid"),
        ([*tokenizer, *shape, *block, "--objective.model.condition.classes", "5"], "the data has 4 classes"),
        ([*shape, *block, "--objective.tokenizer", "none"], "none does not exist"),
        (
            [*shape, *block, "--objective.tokenizer", str(ROOT / "assets/fashion32")],
            "its tokens are codes, the model's are vectors",
        ),
    ):
        with pytest.raises(UserError, match=said):
            train([config, *flags, *out])
