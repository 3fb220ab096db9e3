"""`sample.py`: pictures with their settings inside, and one-line errors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from sample_program import refused, run, settings_of

import visgen
import visgen.pictures
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.generate import Generator
from visgen.images import Images, grid, save, save_png
from visgen.launch import Progress
from visgen.pictures import Sheet
from visgen.sample import main

ROOT = Path(__file__).parents[1]


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
    assert found["guidance"] == {"scale": 2.0, "interval": [0.0, 1.0], "schedule": "linear", "control": None}
    assert found["warp"] == {"temperature": 1.0, "top_k": 9, "top_p": 1.0}
    assert found["sampler"] == {"kind": "ar"} and found["checkpoint"] == str(checkpoint_dir)
    assert found["engine"] == {"kind": "eager", "device": "cpu", "precision": "float32", "batch": 16, "compile": False}
    assert found["model"]["step"] == 10 and len(found["model"]["tokenizer"]) == 12
    whole = settings_of(out / "grid.png")
    assert (whole["labels"], whole["seeds"]) == ([2] * 3 + [0] * 3, list(range(40, 46)))
    assert {k: v for k, v in whole.items() if k in found} == {k: v for k, v in found.items() if k in whole}

    generator = visgen.load(str(checkpoint_dir), device="cpu")
    guidance, warp = Guidance(2.0, schedule="linear"), Warp(top_k=9)
    expected = generator.sample([found["label"]], [found["seed"]], guidance, warp).pixels[0]
    written = np.array(Image.open(out / "0000_000044.png")).transpose(2, 0, 1).astype(int)
    assert abs(written - expected.numpy()).max() <= 1, "another batch may differ by a level"

    printed = capsys.readouterr()
    assert "6 images in" in printed.out and "images/s, NFE 64)" in printed.out and str(out / "grid.png") in printed.out


def test_what_was_counted_and_chosen_is_printed_and_recorded(
    checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--label", "coat", "--num", "2", "--sampler.kind", "sjd", "--sampler.window", "auto"]
    run(checkpoint_dir, tmp_path, *flags)
    found = settings_of(tmp_path / "0002_000001.png")
    assert 1 <= found["nfe"] <= 64 and found["sampler"]["window"] == "auto"
    assert str(found["notes"]["window"]) in found["notes"]["trial"]
    assert f", window {found['notes']['window']})" in capsys.readouterr().out


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
    assert (
        done.stderr == "error: label 'boat' is unknown (perhaps 'Coat'); the checkpoint knows Ankle boot, bag, Coat\n"
    )


def test_what_is_drawn_before_an_interruption_is_kept_and_a_huge_number_is_no_burden(
    checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = Generator.sample, []

    def interrupted(*given: Any, **named: Any) -> Any:
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given, **named)

    monkeypatch.setattr(Generator, "sample", interrupted)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10**20))
    with pytest.raises(SystemExit) as stop:
        run(checkpoint_dir, tmp_path, "--num", str(10**15), "--label", "1", "--engine.batch", "2")
    assert stop.value.code == 130 and capsys.readouterr().err.endswith("interrupted\n")
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"0001_{i:06d}.png" for i in range(4)]


def test_a_full_disk_is_one_line(
    checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(picture: Any, path: Path, **named: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    run(checkpoint_dir, tmp_path, "--num", "1", "--label", "0")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(SystemExit) as stop:
        run(checkpoint_dir, tmp_path, "--num", "1", "--label", "0")
    last = capsys.readouterr().err.splitlines()[-1]  # after the progress bar
    assert stop.value.code == 2 and last.startswith(
        f"error: {tmp_path / '0000_000000.png'} cannot be written (No space"
    )
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_more_images_than_the_disk_holds_are_refused(
    checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--checkpoint", str(checkpoint_dir), "--out", str(tmp_path), "--label", "0", "1", "--engine.device", "cpu"]
    message = refused(capsys, *given, "--num", "99999999999")
    assert "--num asks for 199999999998 images of 16 x 16 px, which take 819,200.0 GB or more; the disk" in message
    assert message.endswith("GB free: lower --num, or choose an --out with more room\n") and not list(
        tmp_path.iterdir()
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * 4096))
    assert "--num asks for 6 images" in refused(capsys, *given, "--num", "3")
    main([*given, "--num", "2"])


def test_images_of_earlier_runs_are_kept_and_counted(
    checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, older in (("--label 0 1 --num 2", 0), ("--label 1 --num 3 --seed 1", 2), ("--label 1 --num 3", 3)):
        (tmp_path / "holiday.png").write_text("not ours")
        run(checkpoint_dir, tmp_path, *flags.split())
        printed = capsys.readouterr().out
        assert printed.count("\n") == 1 and ("older" in printed) == (older > 0)
        assert not older or printed.endswith(f".png; older images kept there: {older}\n")
    names = ["0000_000000", "0000_000001", *(f"0001_{seed:06d}" for seed in range(4)), "holiday"]
    assert sorted(p.stem for p in tmp_path.iterdir() if "grid" not in p.name) == names


def pictures_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_images_of_other_settings_stay_and_the_new_ones_lie_beside_them(
    checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(checkpoint_dir, tmp_path, "--num", "2", "--label", "1")
    first = pictures_in(tmp_path)
    assert sorted(first) == ["0001_000000.png", "0001_000001.png", "grid.png"]
    run(checkpoint_dir, tmp_path, "--num", "2", "--label", "1")
    assert pictures_in(tmp_path) == first and "ends in" not in capsys.readouterr().out
    for times in (1, 2):
        run(checkpoint_dir, tmp_path, "--num", "2", "--label", "1", "--warp.top-k", "3")
        both = pictures_in(tmp_path)
        assert {name: both[name] for name in first} == first and len(both) == 6, times
        grids = [name for name in both if name.startswith("grid-")]
        ends = {name[11:] for name in both if re.fullmatch(r"0001_00000[01]-[0-9a-f]{6}\.png", name)}
        assert len(grids) == len(ends) == 1
        printed = capsys.readouterr().out
        assert f"{grids[0]}; older images kept there: 2; 2 with the label and seed of a new one" in printed
        assert printed.endswith(f"ends in {ends.pop().removesuffix('.png')}\n")
    assert settings_of(tmp_path / grids[0])["warp"]["top_k"] == 3


@pytest.mark.parametrize("there", ["text", "folder", "pipe", "link", "picture", "list"])
def test_a_file_that_is_not_ours_stays(checkpoint_dir: Path, tmp_path: Path, there: str) -> None:
    path = tmp_path / "0001_000000.png"
    if there == "text":
        path.write_text("no picture")
    elif there == "folder":
        path.mkdir()
    elif there == "pipe":
        os.mkfifo(path)
    elif there == "link":
        path.symlink_to(tmp_path / "gone")
    else:
        info = PngInfo()
        info.add_text("visgen", "[1]")
        Image.new("RGB", (16, 16)).save(path, pnginfo=info if there == "list" else None)
    before = path.lstat()
    run(checkpoint_dir, tmp_path, "--num", "1", "--label", "1")
    after = path.lstat()
    assert (after.st_ino, after.st_size, after.st_mode) == (before.st_ino, before.st_size, before.st_mode)
    assert len(list(tmp_path.glob("0001_000000-*.png"))) == 1


def test_a_clip_of_other_settings_stays(tmp_path: Path) -> None:
    clip = torch.zeros(1, 2, 3, 16, 16, dtype=torch.uint8)
    images = Images(clip[:, 0], clip, [1], [0], 0, 0.0, torch.ones(1, 1, dtype=torch.int64), clips=clip)
    paths = [save(images, tmp_path, {"top_k": k})[0].name for k in (1, 1, 2)]
    assert paths[0] == paths[1] == "0001_000000.mp4" and re.fullmatch(r"0001_000000-[0-9a-f]{6}\.mp4", paths[2])
    assert sorted(p.suffix for p in tmp_path.iterdir()) == [".gif", ".gif", ".mp4", ".mp4"]
    (tmp_path / paths[0]).unlink()
    assert save(images, tmp_path, {"top_k": 3})[0].name != paths[0], "the GIF of that name stays too"


def test_pictures_at_their_names_are_whole_while_others_write_them(tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (64, 64, 3), dtype=torch.uint8).numpy()
    path, failed = tmp_path / "grid.png", []
    save_png(Image.fromarray(pixels), path, {"writer": 0})

    def write() -> None:
        try:
            for _ in range(20):
                save_png(Image.fromarray(pixels), path, {"writer": 0})
        except BaseException as error:
            failed.append(error)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert settings_of(path) == {"writer": 0}
    assert not failed and [p.name for p in tmp_path.iterdir()] == ["grid.png"]


def test_writers_of_other_settings_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    def write(number: int) -> None:
        save_png(Image.new("RGB", (8, 8)), tmp_path / "grid.png", {"writer": number})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(16)))
    assert sorted(settings_of(path)["writer"] for path in tmp_path.iterdir()) == list(range(16))


def test_a_picture_names_the_version_and_the_weights(checkpoint_dir: Path, tmp_path: Path) -> None:
    for step in ("5", "10"):
        run(checkpoint_dir, tmp_path / step, "--num", "1", "--label", "1", "--step", step)
    five, ten = (settings_of(tmp_path / step / "0001_000000.png") for step in ("5", "10"))
    assert five["visgen"] == ten["visgen"] == visgen.__version__
    assert five["model"]["model_crc32"] != ten["model"]["model_crc32"]
    assert five["model"]["tokenizer_crc32"] == ten["model"]["tokenizer_crc32"]


@pytest.mark.parametrize(
    ("labels", "num", "shown", "size"),
    [
        (3, 2, [(0, 0), (0, 1), (1, 2), (1, 3), (2, 4), (2, 5)], (2, 3)),
        (1, 5, [(0, i) for i in range(5)], (5, 1)),
        (1, 30, [(0, i) for i in range(16)], (8, 2)),
        (8, 9, [(i, 9 * i + j) for i in range(8) for j in range(2)], (2, 8)),
        (20, 3, [(i, 3 * i) for i in range(16)], (8, 2)),
    ],
)
def test_the_grid_shows_the_first_of_each_label_and_never_too_many(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    labels: int,
    num: int,
    shown: list[tuple[int, int]],
    size: tuple[int, int],
) -> None:
    monkeypatch.setattr(visgen.pictures, "GRID", 16)
    sheet, total = Sheet(labels, num), labels * num
    for start in range(0, total, 7):
        seeds = list(range(start, min(start + 7, total)))
        pixels = torch.zeros(len(seeds), 3, 128, 128, dtype=torch.uint8)
        sheet.add(Images(pixels, pixels, [s // num for s in seeds], seeds, 0, 0.0, pixels))
    sheet.save(tmp_path / "grid.png", {"step": 3})
    found = settings_of(tmp_path / "grid.png")
    assert list(zip(found["labels"], found["seeds"], strict=True)) == shown and found["step"] == 3
    with Image.open(tmp_path / "grid.png") as picture:
        assert picture.size == tuple(n * 130 + 2 for n in size)


def test_the_default_labels_are_ids_though_names_be_numbers(
    checkpoint_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = visgen.sample.load

    def renamed(*given: Any) -> Generator:
        generator = real(*given)
        generator.classes = ["1", "2", "0"]
        return generator

    monkeypatch.setattr(visgen.sample, "load", renamed)
    run(checkpoint_dir, tmp_path, "--num", "1")
    assert sorted(p.name for p in tmp_path.glob("0*")) == [f"{i:04d}_{i:06d}.png" for i in range(3)]


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


# ------------------------------------------------------------------------------------------------------------ errors


def test_a_checkpoint_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys).startswith("--checkpoint is needed: a run directory, such as assets/fashion32")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--label", "7"], "label 7 is out of range: the checkpoint knows classes 0 to 2"),
        (["--label", "-1"], "label -1 is out of range"),
        (
            ["--label", "bag", "boat"],
            "label 'boat' is unknown (perhaps 'Coat'); the checkpoint knows Ankle boot, bag, Coat",
        ),
        (["--num", "0"], "num is 0; it must be at least 1"),
        (["--num", "-2"], "num is -2; it must be at least 1"),
        (["--num", "two"], "--num"),
        (["--seed", "-1"], f"seed is -1; it must be within [0, {2**63 - 1}]"),
        (["--seed", str(2**63)], f"seed is {2**63}; it must be within"),
        (["--seed", str(2**63 - 5)], f"seed {2**63 + 6} is no seed; it must lie within 0 and 2^63 - 1"),
        (["--step", "3"], "holds no step 3; it holds 5, 10"),
        (["--step", "best"], "knows no best step"),
        (["--step", "last"], "holds no step last; it holds 5, 10: choose one of them, 'best' ("),
        (["--sampler.kind", "sdj"], "sampler.kind: unknown kind 'sdj'"),
        (["--guidance.scale", "-1"], "guidance.scale -1.0 must be"),
        (["--warp.top_p", "0"], "top_p 0.0 must be in (0, 1]"),
        (["--engine.batch", "0"], "engine.batch 0 must be at least 1"),
        (["--engine.precision", "fp8"], "'fp8'"),
        (["--lable", "3"], "did you mean '--label'"),
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


def test_a_folder_in_the_way(checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grid.png").mkdir()
    message = refused(capsys, "--checkpoint", str(checkpoint_dir), "--out", str(tmp_path))
    assert f"{tmp_path}/grid.png is a folder" in message and [p.name for p in tmp_path.iterdir()] == ["grid.png"]


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
