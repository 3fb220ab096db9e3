"""Features of clips and `eval/fvd.py`: what must raise the distance does, and I3D is called as its file expects."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from programs import program
from torch import Tensor, nn

from visgen import checkpoint, run_files
from visgen import clip_score as cs
from visgen.config import UserError, build, plugin_config
from visgen.metrics.clips import FrameDifferences, I3DFeatures
from visgen.metrics.features import build_extractor
from visgen.metrics.frechet import frechet_from_features

SPRITES = {"image_size": 16, "sprite": 8, "frames": 12, "motions": 3, "n": 240, "n_held_out": 240}


def sprites(split: Any = "train", **values: Any) -> Any:
    pictures = plugin_config("visgen.data", "synthetic", n=30, n_held_out=30, image_size=16)
    return build(plugin_config("visgen.data", "sprites", pictures=pictures, **{**SPRITES, **values}), split)


def fake_i3d(path: Path, squeeze: bool = False) -> Path:
    """A scripted 3-D network with the arguments of the real file."""

    class Fake(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv3d(3, 4, 3)

        def forward(
            self, x: Tensor, rescale: bool = False, resize: bool = False, return_features: bool = False
        ) -> Tensor:
            if not (rescale and resize and return_features):
                raise ValueError("called otherwise")
            return self.conv(x / 255).mean((2, 3, 4))

    torch.manual_seed(0)
    torch.jit.script(Fake()).save(str(path))
    return path


def frames() -> FrameDifferences:
    return FrameDifferences(build_extractor("fd_debug", batch=64))


def test_frozen_and_shuffled_clips_are_far_from_real_ones() -> None:
    extractor, data = frames(), sprites()
    chosen = list(range(240))

    def features(clips: Any) -> Tensor:
        return torch.cat([extractor(pixels)["pool"] for pixels, _ in clips])

    ref = features(cs.real(sprites("held_out"), chosen, 60))
    found = {
        "real": features(cs.real(data, chosen, 60)),
        "last_frame": features(cs.last_frame(cs.real(data, chosen, 60))),
        "shuffled": features(cs.shuffled(cs.real(data, chosen, 60), 0)),
    }
    away = {name: frechet_from_features(x, ref)["distance"] for name, x in found.items()}
    assert away["last_frame"] > 3 * away["real"] and away["shuffled"] > 3 * away["real"], away
    assert extractor.id == "fd_clips-debug" and extractor.dims == {"pool": ref.shape[1]}
    assert found["last_frame"][:, ref.shape[1] // 3 :].abs().max() < 1e-5, "nothing moves"


def test_features_depend_neither_on_the_batch_nor_on_the_place_in_it() -> None:
    extractor = frames()
    clips = sprites().get_many([0, 1, 2])["pixels"]
    together = extractor(clips)["pool"]
    assert torch.allclose(extractor(clips[1:2])["pool"][0], together[1], atol=1e-5)
    assert torch.equal(frames()(clips)["pool"], together) and frames().fingerprint == extractor.fingerprint
    with pytest.raises(UserError, match="is no uint8 clip"):
        extractor(clips[0])
    with pytest.raises(UserError, match="clips have 2 frames, it needs 3"):
        extractor(clips[:, :2])


def test_i3d_is_called_as_its_file_expects(tmp_path: Path) -> None:
    extractor = I3DFeatures(fake_i3d(tmp_path / "i3d.pt"), "cpu", 2)
    clips = sprites().get_many([0, 1, 2])["pixels"]
    network = torch.jit.load(str(tmp_path / "i3d.pt"))
    wanted = network.conv(clips.permute(0, 2, 1, 3, 4).float() / 255).mean((2, 3, 4))
    assert torch.allclose(extractor(clips)["pool"], wanted, atol=1e-5) and extractor.dims == {"pool": 4}
    with pytest.raises(UserError, match="clips have 9 frames, I3D needs 10"):
        extractor(clips[:, :9])
    with pytest.raises(UserError, match="--extractor fvd needs an I3D file; pass --weights"):
        I3DFeatures(None, "cpu", 2)
    (tmp_path / "no.pt").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"no\.pt is no TorchScript file"):
        I3DFeatures(tmp_path / "no.pt", "cpu", 2)


def test_a_choice_holds_every_class_by_its_share() -> None:
    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    chosen = cs.stratified(labels, 20, seed=1)
    assert torch.bincount(labels[chosen]).tolist() == [12, 6, 2] and len(set(chosen)) == 20
    assert chosen == cs.stratified(labels, 20, seed=1) != cs.stratified(labels, 20, seed=2)
    with pytest.raises(UserError, match="101 clips are asked for, the data have 100"):
        cs.stratified(labels, 101, 0)


def test_shuffling_keeps_the_frames() -> None:
    clips = sprites().get_many([0, 1])["pixels"]
    ((mixed, index),) = cs.shuffled(iter([(clips, torch.arange(2))]), 0)
    assert not torch.equal(mixed, clips) and index.tolist() == [0, 1]
    assert torch.equal(mixed.flatten(2).float().sum(-1).sort(1).values, clips.flatten(2).float().sum(-1).sort(1).values)


@pytest.fixture
def run_dir(make_blocks: Callable[..., Any], small: Callable[..., Any], tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = build(small("tokenizers", "conv_kl", patch=4)).eval()
    model = make_blocks((12, 2, 2), (4, 2, 2), channels=64)
    step = tmp_path / "run" / run_files.step_name(1)
    step.mkdir(parents=True)
    checkpoint.save_module(step / run_files.WEIGHTS, model, model.config, extra_metadata={"step": 1})
    (step / run_files.META).write_text('{"step": 1}')
    checkpoint.save_module(tmp_path / "run" / run_files.TOKENIZER, tokenizer, tokenizer.config)
    return tmp_path / "run"


def test_the_program_scores_rows_of_one_table(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--data.kind=sprites"] + [
        f"--data.{k.replace('_', '-')}={v}" for k, v in {**SPRITES, "n": 40, "n_held_out": 40}.items()
    ]
    flags += ["--data.pictures.kind", "synthetic", "--data.pictures.image-size", "16", "--engine.device", "cpu"]
    flags += ["--frames", "fd_debug", "--n", "12", "--groups", "4", "--allow-small", "--out", str(tmp_path / "out")]
    flags += ["--sampler.kind", "blockwise", "--sampler.steps", "2", "--sampler.frames", "16", "--start", "4"]
    rows = ["generated", "real", "recon", "last_frame", "shuffled"]
    fvd = program("fvd")
    monkeypatch.setattr(sys, "argv", ["eval/fvd.py", "--checkpoint", str(run_dir), *flags, "--rows", *rows])
    fvd.main()
    told = capsys.readouterr().out
    assert all(row in told for row in rows)
    reports = {row: json.loads((tmp_path / "out" / row / "report.json").read_text()) for row in rows}
    assert {r["protocol"]["hash"] for r in reports.values()} == {reports["real"]["protocol"]["hash"]}
    assert reports["real"]["protocol"]["reference"] == "sprites/held_out-12f-s1"
    assert reports["generated"]["sampling"]["start"] == 4
    recon = [*flags[:-8], "--rows", "recon", "--out", str(tmp_path / "recon")]  # needs no sampler that fits
    monkeypatch.setattr(sys, "argv", ["eval/fvd.py", "--checkpoint", str(run_dir), *recon])
    fvd.main()
    assert "recon" in capsys.readouterr().out
    monkeypatch.setattr(fvd.cs, "reference", None)  # what follows is refused before
    for given, said in (
        ([*flags, "--start", "5"], "the model draws 16 frames, 17 are to be scored"),
        ([*flags, "--sampler.frames", "15"], r"sampler\.frames 15 are not whole blocks of this model"),
        ([*flags[:-8], "--sampler.kind", "ar"], "sampler ar is not for this model"),
    ):
        monkeypatch.setattr(sys, "argv", ["eval/fvd.py", "--checkpoint", str(run_dir), *given])
        with pytest.raises(UserError, match=said):
            fvd.main()
