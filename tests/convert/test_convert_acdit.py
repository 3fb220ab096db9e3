"""ACDiT's files: a run directory that samples, or one line that says what is missing."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from visgen.checkpoint import load_model
from visgen.config import UserError
from visgen.convert.__main__ import main

DATA = Path(__file__).parents[1] / "data"
IMAGE = {"image_size": 32, "num_frames": 1, "block_size": 4, "ar_len": 4}
CLIP = {"image_size": 16, "num_frames": 4, "block_size": 4, "ar_len": 4}


def written(path: Path, kind: str, change: Any = None, **arguments: Any) -> str:
    """A file as the authors save it, of recorded weights."""
    found = load_file(DATA / f"acdit_{kind}_a.safetensors")
    state = {k.removeprefix("state."): v.float() for k, v in found.items() if k.startswith("state.")}
    if change:
        change(state)
    shape = {"vae_latent_size": 4, "patch_size": 1, "vae_patch_pixels": 8, **(IMAGE if kind == "image" else CLIP)}
    torch.save({"model": state, "args": Namespace(model="ACDiT-XL", nd_split=None, **{**shape, **arguments})}, path)
    return str(path)


@pytest.mark.parametrize(("kind", "grid", "block"), [("image", (1, 4, 4), (1, 2, 2)), ("video", (4, 2, 2), (1, 2, 2))])
def test_a_file_becomes_a_run(kind: str, grid: Any, block: Any, tmp_path: Path, capsys: Any) -> None:
    main(["acdit", written(tmp_path / "a.pt", kind), str(tmp_path / "out")])
    assert "2 layers, width 128" in capsys.readouterr().out
    model = load_model(tmp_path / "out")
    assert (model.grid, model.backbone.config.block, model.config.channels) == (grid, block, 4)
    assert model.backbone.config.rope == "acdit_legacy" and model.condition.config.classes == 10
    wanted = load_file(DATA / f"acdit_{kind}_a.safetensors")["state.blocks.1.mlp.fc2.weight"].float()
    assert torch.equal(model.backbone.layers[1].ffn[2].weight, wanted)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    def refused(source: str, said: str, *flags: str) -> None:
        with pytest.raises(UserError, match=said):
            main(["acdit", source, str(tmp_path / "out"), *flags])
        assert not (tmp_path / "out").exists()

    refused(str(tmp_path / "none.pt"), "does not exist")
    refused(written(tmp_path / "a.pt", "image"), "it must hold `ema` and `args`", "--weights", "ema")
    refused(written(tmp_path / "b.pt", "image", ar_len=None), "its args do not say ar_len")
    refused(written(tmp_path / "c.pt", "image", ar_len=3), r"3 blocks of 4 tokens do not make up a grid of \(1, 4, 4\)")
    refused(written(tmp_path / "d.pt", "image", lambda s: s.pop("blocks.1.norm1.weight")), r"blocks\.1\.norm1\.weight")
