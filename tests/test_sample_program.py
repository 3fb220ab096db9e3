"""`sample.py`: pictures with their settings inside, and one-line errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import visgen
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.sample import Progress, grid, main

ROOT = Path(__file__).parents[1]


def run(run_dir: Path, out: Path, *argv: str) -> None:
    main(["--checkpoint", str(run_dir), "--out", str(out), "--engine.device", "cpu", *argv])


def settings_of(path: Path) -> dict[str, Any]:
    with Image.open(path) as picture:
        return json.loads(picture.info["visgen"])


# ---------------------------------------------------------------------------------------------------------- pictures


def test_writes_a_grid_and_single_pictures_with_their_settings(
    checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--label coat 0 --num 3 --seed 40 --guidance.scale 2 --guidance.schedule linear --warp.top-k 9"
    run(checkpoint_dir, tmp_path / "a" / "b", *flags.split())
    out = tmp_path / "a" / "b"
    names = [f"{label:04d}_{seed:06d}.png" for label, seed in zip([2] * 3 + [0] * 3, range(40, 46), strict=True)]
    assert sorted(p.name for p in out.iterdir()) == sorted([*names, "grid.png"])

    found = settings_of(out / "0000_000044.png")
    assert (found["label"], found["seed"]) == (0, 44)
    assert found["guidance"] == {"scale": 2.0, "interval": [0.0, 1.0], "schedule": "linear"}
    assert found["warp"] == {"temperature": 1.0, "top_k": 9, "top_p": 1.0}
    assert found["sampler"] == {"kind": "ar"} and found["checkpoint"] == str(checkpoint_dir)
    assert found["engine"] == {"device": "cpu", "precision": "float32", "batch": 16}
    assert found["model"]["step"] == 10 and len(found["model"]["tokenizer"]) == 12
    whole = settings_of(out / "grid.png")
    assert (whole["labels"], whole["seeds"]) == ([2] * 3 + [0] * 3, list(range(40, 46)))
    assert {k: v for k, v in whole.items() if k in found} == {k: v for k, v in found.items() if k in whole}

    generator = visgen.load(str(checkpoint_dir), device="cpu")
    guidance, warp = Guidance(2.0, schedule="linear"), Warp(top_k=9)
    expected = generator.sample([found["label"]], [found["seed"]], guidance, warp).pixels[0]
    assert np.array_equal(np.array(Image.open(out / "0000_000044.png")).transpose(2, 0, 1), expected.numpy())

    printed = capsys.readouterr()
    assert "6 images in" in printed.out and "images/s, NFE 64)" in printed.out and str(out / "grid.png") in printed.out


def test_by_default_every_class_is_drawn(checkpoint_dir: Path, tmp_path: Path) -> None:
    run(checkpoint_dir, tmp_path, "--num", "1")
    assert sorted(p.name for p in tmp_path.glob("0*")) == [f"{i:04d}_{i:06d}.png" for i in range(3)]


def test_the_same_command_writes_the_same_pictures(checkpoint_dir: Path, tmp_path: Path) -> None:
    for name, batch in (("a", "16"), ("b", "16"), ("c", "1")):
        run(checkpoint_dir, tmp_path / name, "--num", "2", "--label", "1", "--engine.batch", batch)
    files = [(tmp_path / name / "grid.png").read_bytes() for name in "ab"]
    assert files[0] == files[1]
    pixels = [np.array(Image.open(tmp_path / name / "grid.png")) for name in "ac"]
    assert np.array_equal(*pixels)


def test_settings_come_from_yaml_and_flags(checkpoint_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        f"checkpoint: {checkpoint_dir}\nlabel: [bag]\nnum: 1\nguidance: {{scale: 3}}\nengine: {{device: cpu}}\n"
    )
    main([str(tmp_path / "s.yaml"), "--out", str(tmp_path / "out"), "--step", "5", "--warp.temperature", "0.5"])
    found = settings_of(tmp_path / "out" / "0001_000000.png")
    assert found["guidance"]["scale"] == 3 and found["warp"]["temperature"] == 0.5 and found["model"]["step"] == 5


def test_the_script_itself_runs(checkpoint_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "sample.py"), "--checkpoint", str(checkpoint_dir), "--out", str(tmp_path)]
    done = subprocess.run(
        [*command, "--label", "boat", "--engine.device", "cpu"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: label 'boat' is unknown; the checkpoint knows Ankle boot, bag, Coat\n"


def test_grid_of_small_pictures() -> None:
    pixels = torch.arange(3, dtype=torch.uint8).reshape(3, 1, 1, 1).expand(3, 3, 64, 64) * 100
    found = grid(pixels, columns=2)
    side, gap = 128, 4  # enlarged twice, and so is the gap
    assert found.shape == (2 * side + 3 * gap, 2 * side + 3 * gap, 3) and found.dtype == np.uint8
    assert (found[:gap] == 255).all()
    corners = [found[gap, gap, 0], found[gap, gap + side + gap, 0], found[gap + side + gap, gap, 0]]
    assert corners == [0, 100, 200]
    large = grid(pixels[:2].repeat(1, 1, 4, 4), columns=2)
    assert large.shape == (256 + 2 * 2, 2 * 256 + 3 * 2, 3), "large ones stay"


def test_progress_can_be_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("drawing") as step:
        step(3, 7)
    assert "3/7" in capsys.readouterr().err
    with Progress("drawing", shown=False) as step:
        step(3, 7)
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------------------ known pixels


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "known.png"
    Image.fromarray(rng.integers(0, 256, (16, 16, 3), np.uint8)).save(path)
    return path


def mask_file(tmp_path: Path, rows: slice) -> Path:
    mask = np.zeros((16, 16), np.uint8)
    mask[rows] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    return tmp_path / "mask.png"


def tokens_of(path: Path, checkpoint_dir: Path) -> torch.Tensor:
    generator = visgen.load(str(checkpoint_dir), device="cpu")
    pixels = (
        torch.from_numpy(np.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)[None, None].float() / 127.5 - 1
    )
    with torch.no_grad():
        return generator.tokenizer.encode(pixels)[0]


def drawn_tokens(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(visgen.sample, "save", lambda images, *rest: seen.append(images.tokens))
    return seen


@pytest.mark.parametrize(
    ("rows", "kept"), [(None, slice(0, 32)), (slice(8, 16), slice(32, 64)), (slice(0, 16), slice(0, 64))]
)
def test_the_known_part_stays(
    checkpoint_dir: Path,
    tmp_path: Path,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: slice | None,
    kept: slice,
) -> None:
    seen = drawn_tokens(monkeypatch)
    mask = [] if rows is None else ["--known.mask", str(mask_file(tmp_path, rows))]
    run(checkpoint_dir, tmp_path / "out", "--known.image", str(picture), *mask, "--num", "2", "--label", "0")
    given = tokens_of(picture, checkpoint_dir)
    for tokens in seen[0]:
        assert torch.equal(tokens[kept], given[kept])
        assert kept == slice(0, 64) or not torch.equal(tokens, given)


def test_pictures_of_any_size_and_mode_are_cropped(
    checkpoint_dir: Path, tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = drawn_tokens(monkeypatch)
    full = mask_file(tmp_path, slice(0, 16))
    wide = Image.new("RGB", (32, 16))
    wide.paste(Image.open(picture), (8, 0))  # the centre
    wide.save(tmp_path / "wide.png")
    for name in ("known.png", "wide.png"):
        flags = ["--known.image", str(tmp_path / name), "--known.mask", str(full)]
        run(checkpoint_dir, tmp_path / "out", *flags, "--num", "1", "--label", "0")
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0][0], tokens_of(picture, checkpoint_dir))


# ------------------------------------------------------------------------------------------------------------ errors


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed.err
    return printed.err.removeprefix("error: ")


def test_a_checkpoint_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys).startswith("--checkpoint is needed: a run directory, such as assets/fashion32")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--label", "7"], "label 7 is out of range: the checkpoint knows classes 0 to 2"),
        (["--label", "-1"], "label -1 is out of range"),
        (["--label", "bag", "boat"], "label 'boat' is unknown; the checkpoint knows Ankle boot, bag, Coat"),
        (["--num", "0"], "--num 0 must be at least 1"),
        (["--num", "-2"], "--num -2 must be at least 1"),
        (["--num", "two"], "--num"),
        (["--step", "3"], "holds no step 3; it holds 5, 10"),
        (["--step", "best"], "knows no best step"),
        (["--step", "first"], "first"),
        (["--sampler.kind", "sdj"], "sampler.kind: unknown kind 'sdj'"),
        (["--guidance.scale", "-1"], "guidance.scale -1.0 must be"),
        (["--warp.top_p", "0"], "top_p 0.0 must be in (0, 1]"),
        (["--engine.batch", "0"], "engine.batch 0 must be at least 1"),
        (["--engine.precision", "fp8"], "'fp8'"),
        (["--lable", "3"], "did you mean 'label'"),
        (["--known.mask", "m.png"], "--known.mask needs --known.image"),
        (["--known.image", "gone.png"], "--known.image gone.png does not exist"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else "",
)
def test_bad_options(
    checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], named: str
) -> None:
    given = ["--checkpoint", str(checkpoint_dir), "--out", str(tmp_path), "--engine.device", "cpu", *flags]
    assert named in refused(capsys, *given)
    assert not list(tmp_path.iterdir()), "nothing was written"


@pytest.mark.parametrize("checkpoint", ["nowhere", "nobody/nothing", "runs/my run"])
def test_a_missing_checkpoint(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"checkpoint '{checkpoint}'" in refused(capsys, "--checkpoint", checkpoint, "--out", str(tmp_path))


def test_a_file_in_the_way(checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        message = refused(capsys, "--checkpoint", str(checkpoint_dir), "--out", str(out))
        assert message.startswith(f"--out {out} cannot be written: ") and "choose another directory" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_no_permission(checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert "Permission denied" in refused(capsys, "--checkpoint", str(checkpoint_dir), "--out", str(tmp_path))
    tmp_path.chmod(0o700)


def test_a_refused_write_is_said_even_to_root(
    checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def deny(*given: Any, **named: Any) -> None:
        raise PermissionError(13, "Permission denied", str(named["dir"]))

    monkeypatch.setattr(tempfile, "TemporaryFile", deny)
    message = refused(capsys, "--checkpoint", str(checkpoint_dir), "--out", str(tmp_path))
    assert f"--out {tmp_path} cannot be written: Permission denied" in message


@pytest.mark.parametrize("part", ["image", "mask"])
@pytest.mark.parametrize("damage", ["text", "truncated", "empty", "folder"])
def test_an_unreadable_picture(
    checkpoint_dir: Path, tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str], part: str, damage: str
) -> None:
    bad = tmp_path / "bad.png"
    if damage == "folder":
        bad.mkdir()
    else:
        whole = picture.read_bytes()
        bad.write_bytes({"text": b"no picture", "truncated": whole[: len(whole) // 2], "empty": b""}[damage])
    flags = {"image": ["--known.image", str(bad)], "mask": ["--known.image", str(picture), "--known.mask", str(bad)]}
    given = ["--checkpoint", str(checkpoint_dir), "--out", str(tmp_path / "out"), "--engine.device", "cpu"]
    assert f"--known.{part} {bad} is not a readable picture" in refused(capsys, *given, *flags[part])
