"""A masked model of vectors from training to files: the run, its own sampler, known pixels, the programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sample_program import run

import visgen
from visgen import checkpoint
from visgen.config import UserError, build, plugin_config
from visgen.train.main import train

SAMPLER = plugin_config("visgen.samplers", "masked", iterations=4, steps=3)


@pytest.fixture(scope="module")
def trained(small: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps: 16 px, 4 x 4 tokens of 2 x 2 patches."""
    folder = tmp_path_factory.mktemp("masked")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = small("tokenizers", "conv_kl", patch=2)
        checkpoint.save_module(folder / "tokenizer.safetensors", build(config), config)
    flags = {
        "objective.tokenizer": folder / "tokenizer.safetensors",
        "objective.model.channels": 16,
        "objective.model.backbone.width": 16,
        "objective.model.head.width": 16,
        "objective.preview.images": 2,
        "objective.preview.sampler.steps": 2,
        "data.image-size": 16,
        "optim.warmup": 1,
        "loop.out": folder / "run",
    }
    steps = {"steps": 3, "batch": 4, "log-every": 1, "save-every": 3, "preview-every": 3, "eval-every": 3}
    flags |= {f"loop.{k}": v for k, v in steps.items()}
    given = [word for key, value in flags.items() for word in (f"--{key}", str(value))]
    debug = Path(__file__).parents[1] / "configs" / "debug" / "mar.yaml"
    train([str(debug), *given, "--objective.model.grid", "1", "4", "4"])
    return folder / "run"


def test_a_run_samples_by_its_own_sampler(trained: Path) -> None:
    generator = visgen.load(str(trained), device="cpu", batch=2)
    images = generator.sample([0, 1, 2], seeds=[5, 6, 7], guidance=1.5, sampler=SAMPLER)
    assert images.pixels.shape == (3, 3, 16, 16) and images.tokens.shape == (3, 16, 16)
    assert images.notes == {"head_steps": 24} and images.nfe == 8
    alone = generator.sample([2], seeds=[7], guidance=1.5, sampler=SAMPLER)
    assert torch.allclose(alone.tokens[0], images.tokens[2], rtol=1e-3, atol=1e-3)
    assert generator.model.backbone.sampler == "masked" and generator.sample([1]).notes == {"head_steps": 1600}
    with pytest.raises(UserError, match=r"vectors; use --sampler\.kind masked"):
        generator.sample([1], sampler="ar")


def test_inpainting_keeps_what_is_known(trained: Path) -> None:
    generator = visgen.load(str(trained), device="cpu")
    pixels = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    mask = (torch.arange(16) >= 8)[None, :, None].expand(1, 16, 16)  # below, which raster order could not look at
    images = generator.sample([0, 1], known=(pixels, mask), sampler=SAMPLER)
    wanted = generator.tokenizer.encode(pixels.unsqueeze(1))
    assert torch.equal(images.tokens[:, 8:], wanted[:, 8:].expand(2, -1, -1))


def test_the_program_writes_images(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--sampler.kind", "masked", "--sampler.iterations", "4", "--label", "0", "--num", "2"]
    run(trained, tmp_path / "a", *flags, "--sampler.steps", "6", "--sampler.last-steps", "2")
    assert len(list((tmp_path / "a").glob("0000_*.png"))) == 2
    with pytest.raises(SystemExit) as stop:
        run(trained, tmp_path / "b", *flags, "--sampler.solver", "heun")
    assert stop.value.code == 2 and "error: sampler.solver heun is for a model of velocity" in capsys.readouterr().err
