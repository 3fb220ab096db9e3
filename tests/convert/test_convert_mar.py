"""MAR's files: a run directory that samples, or one line that says what is missing."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from visgen.checkpoint import load_model
from visgen.config import UserError, build, plugin_config
from visgen.convert.__main__ import main
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise

DATA = Path(__file__).parents[1] / "data" / "mar_a.safetensors"


def recorded() -> dict[str, torch.Tensor]:
    return {k.removeprefix("state."): v.float() for k, v in load_file(DATA).items() if k.startswith("state.")}


def written(path: Path, change: Any = None, **content: Any) -> str:
    """A file as the authors save it, of recorded weights; those that are not averaged are others."""
    state = recorded()
    if change:
        change(state)
    other = {k: v + 1 for k, v in state.items()}
    saved = {"model": other, "model_ema": state, "epoch": 3, "args": Namespace(model="mar_base"), **content}
    torch.save({k: v for k, v in saved.items() if v is not None}, path)
    return str(path)


def test_a_file_becomes_a_run_of_its_average(tmp_path: Path, capsys: Any) -> None:
    main(["mar", written(tmp_path / "a.pth"), str(tmp_path / "out"), "--heads", "3"])
    assert "2 + 2 layers, width 48, head 2 x 40, grid (1, 4, 4), 8 channels" in capsys.readouterr().out
    model, state = load_model(tmp_path / "out"), recorded()
    assert model.condition.config.classes == 1000 and model.backbone.config.buffer == 5
    table = model.condition.embedding_table.weight
    assert torch.equal(table[:-1], state["class_emb.weight"]) and torch.equal(table[-1:], state["fake_latent"])
    assert model.backbone.config.norm_eps == 1e-6 and model.head.learned
    engine = Engine(model, Guidance(2.0, schedule="linear"))
    engine.begin({"label": torch.tensor([1, 700])})
    sampler = build(plugin_config("visgen.samplers", "masked", iterations=3, steps=5))
    assert engine.run(sampler, Noise(torch.arange(2))).tokens.isfinite().all()


def test_the_other_weights_are_taken_where_asked(tmp_path: Path) -> None:
    flags = ["--heads", "3", "--weights", "model", "--dtype", "bf16"]
    main(["mar", written(tmp_path / "a.pth"), str(tmp_path / "out"), *flags])
    wanted = (recorded()["mask_token"] + 1).bfloat16().float()
    assert torch.equal(load_model(tmp_path / "out").backbone.mask_token, wanted)


def test_what_is_no_such_file_is_refused(tmp_path: Path) -> None:
    def refused(source: str, said: str, *flags: str) -> None:
        with pytest.raises(UserError, match=said):
            main(["mar", source, str(tmp_path / "out"), *flags])
        assert not (tmp_path / "out").exists()

    refused(str(tmp_path / "none.pth"), "does not exist")
    refused(written(tmp_path / "a.pth", model_ema=None), "of MAR it must hold `model_ema`")
    refused(written(tmp_path / "b.pth"), "width 48 is none of the published 768, .* pass the number of --heads")
    for i, name in enumerate(("decoder_blocks.1.norm2.bias", "class_emb.weight", "diffloss.net.input_proj.weight")):
        path = written(tmp_path / f"c{i}.pth", lambda s, name=name: s.pop(name))
        refused(path, f"1 missing: {name}", "--heads", "3")
    more = written(tmp_path / "d.pth", lambda s: s.update({"decoder_blocks.1.attn.q_norm.weight": torch.ones(16)}))
    refused(more, "1 unexpected: decoder_blocks.1.attn.q_norm.weight", "--heads", "3")
