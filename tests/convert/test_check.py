"""Replay of recorded vectors: the files pass, and whatever differs makes it fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from visgen.config import UserError, run_program
from visgen.convert.__main__ import main
from visgen.convert.check import compare

DATA = Path(__file__).parents[1] / "data"
OUTPUTS = {
    "llamagen_vq_a": ("reconstruction", "decoded_random", "quantized", "indices"),
    "acdit_image_a": ("prediction", "inference_prediction"),
    "acdit_video_a": ("prediction", "inference_prediction"),
    "mar_a": ("z", "model_out", "mean", "log_variance", "pred_xstart", "kept_timesteps"),
    "llamagen_c2i_a": ("logits", "greedy_cfg1", "greedy_cfg3"),
    "llamagen_t2i_a": ("logits", "greedy_cfg1", "greedy_cfg3"),
}


def edited(
    name: str, out: Path, change: Callable[[dict[str, Tensor]], object], metadata: dict[str, str] | None = None
) -> str:
    """A copy of recorded vectors after `change` of {key: tensor}."""
    with safe_open(DATA / f"{name}.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        facts = {**file.metadata(), **(metadata or {})}
    change(tensors)
    save_file(tensors, out, facts)
    return str(out)


def code(*argv: str) -> int:
    """Exit code of the program."""
    try:
        run_program(lambda: main(["check", *argv]))
    except SystemExit as leave:
        return int(leave.code or 0)
    return 0


@pytest.mark.parametrize("name", OUTPUTS)
def test_recorded_vectors_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code(str(DATA / f"{name}.safetensors")) == 0
    told = capsys.readouterr().out
    for output in OUTPUTS[name]:
        assert any(line.split()[0] == output and line.endswith("ok") for line in told.splitlines()[1:-1]), output
    assert told.splitlines()[-1] == "passed" and "DIFFERS" not in told


@pytest.mark.parametrize(
    ("name", "key", "output"),
    [
        ("acdit_image_a", "state.blocks.1.attn.q_norm.weight", "prediction"),
        ("acdit_video_a", "in.clean", "inference_prediction"),
        ("mar_a", "state.encoder_blocks.1.mlp.fc2.weight", "z"),
        ("mar_a", "state.diffloss.net.res_blocks.1.adaLN_modulation.1.weight", "log_variance"),
        ("llamagen_c2i_a", "state.layers.1.attention.wqkv.weight", "logits"),
        ("llamagen_c2i_a", "state.cls_embedding.embedding_table.weight", "logits"),
        ("llamagen_t2i_a", "state.cls_embedding.cap_proj.fc2.weight", "logits"),
        ("llamagen_t2i_a", "state.cls_embedding.uncond_embedding", "greedy_cfg3"),
        ("llamagen_vq_a", "state.quantize.embedding.weight", "quantized"),
        ("llamagen_vq_a", "state.decoder.conv_blocks.0.upsample.conv.weight", "decoded_random"),
        ("llamagen_vq_a", "state.encoder.mid.1.proj_out.weight", "indices"),
    ],
)
def test_a_perturbed_weight_fails(
    name: str, key: str, output: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def perturb(tensors: dict[str, Tensor]) -> None:
        rng = torch.Generator().manual_seed(0)
        tensors[key] = tensors[key] + 0.5 * torch.randn(tensors[key].shape, generator=rng).half()

    assert code(edited(name, tmp_path / "x.safetensors", perturb)) == 1
    told = capsys.readouterr().out.splitlines()
    assert any(line.split()[0] == output and line.endswith("DIFFERS") for line in told[1:])
    assert told[-1].startswith("failed")


def test_one_other_token_or_mask_fails(tmp_path: Path) -> None:
    def token(tensors: dict[str, Tensor]) -> None:
        tensors["out.greedy_cfg3"][1, 15] += 1

    def mask(tensors: dict[str, Tensor]) -> None:
        tensors["in.text_mask"][1, 3] = 0

    assert code(edited("llamagen_t2i_a", tmp_path / "token.safetensors", token)) == 1
    assert code(edited("llamagen_t2i_a", tmp_path / "mask.safetensors", mask)) == 1


def test_an_output_that_is_not_replayed_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = edited("llamagen_c2i_a", tmp_path / "x.safetensors", lambda t: t.update({"out.other": torch.ones(2)}))
    assert code(path) == 1
    assert "not replayed" in capsys.readouterr().out


def test_rows_have_their_own_tolerance() -> None:
    recorded = torch.tensor([[0.0, 0.5], [0.0, 1000.0]])
    error = torch.tensor([[0.0, 0.9e-4], [0.09, 0.0]])
    assert compare(recorded + error, recorded)[1]
    assert not compare(recorded + 2 * error * torch.tensor([[1.0], [0.0]]), recorded)[1]
    assert not compare(recorded + 2 * error * torch.tensor([[0.0], [1.0]]), recorded)[1]
    assert not compare(recorded + error.flip(0), recorded)[1], "one row's size excuses no other row"
    assert not compare(recorded * torch.nan, recorded)[1]
    assert compare(recorded + error, recorded)[0] == "largest error 9.00e-05 of 1.00e-04 allowed"  # not 0.09, of 0.1
    assert compare(recorded[:1], recorded) == ("shape [1, 2] instead of [2, 2]", False)
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 3])) == ("1 of 2 differ", False)


def test_what_cannot_be_checked_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (DATA / "llamagen_c2i_a.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    foreign = edited("llamagen_c2i_a", tmp_path / "f.safetensors", lambda t: None, {"origin": "var"})
    plain = edited("llamagen_c2i_a", tmp_path / "p.safetensors", lambda t: None, {"origin": ""})
    config = json.dumps({"block_size": 16})
    bare = edited("llamagen_c2i_a", tmp_path / "b.safetensors", lambda t: None, {"config": config})
    for argv, message in (
        (
            [foreign],
            "origin 'var' cannot be checked; supported: acdit, controlar, llamagen_gpt, llamagen_vq, mar",
        ),
        ([str(tmp_path / "cut.safetensors")], "is truncated or not a safetensors file"),
        ([str(tmp_path / "none")], "does not exist"),
        ([str(tmp_path)], "is no file; pass a file of recorded vectors"),
        ([plain], "names no origin, so it holds no recorded vectors"),
        ([bare], "lacks what llamagen_gpt needs: 'n_head'"),
        ([], "FILE is needed"),
    ):
        assert code(*argv) == 2
        told = capsys.readouterr().err
        assert message in told and told.count("\n") == 1


def test_a_weight_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = edited("llamagen_vq_a", tmp_path / "x.safetensors", lambda t: t.pop("state.quant_conv.bias"))
    with pytest.raises(UserError, match=r"1 missing: quant_conv\.bias"):
        main(["check", path])
