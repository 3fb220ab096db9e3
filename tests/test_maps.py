"""Control maps of a folder, and training that reads them: cropped and mirrored with their images."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from visgen import maps as program
from visgen.config import UserError, build, plugin_config
from visgen.controls import as_map
from visgen.controls.lineart import Config as LineartConfig
from visgen.objectives._control import Maps


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two classes, odd sizes; red says where a pixel was, so that any crop can be told."""
    for i, (name, size) in enumerate({"a/0.png": (40, 33), "a/1.jpg": (21, 64), "b/deep/2.webp": (50, 50)}.items()):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        y, x = np.mgrid[: size[1], : size[0]]
        pixels = np.stack([255 * x / size[0], 255 * y / size[1], np.full_like(x, 80 * i)], -1).astype(np.uint8)
        pixels[5:12, 6:15] = (255, 40, 40)
        Image.fromarray(pixels).save(path, quality=95)
    return tmp_path / "photos"


def folder(root: Path, **options: Any) -> Any:
    values = {"root": root, "image_size": 16, "held_out_fraction": 0.0, **options}
    return build(plugin_config("visgen.data", "folder", **values), "train")


def test_maps_of_a_folder_are_made_once(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (photos / "a" / "broken.png").write_text("no picture")
    Image.new("L", (1, 60_000)).save(photos / "a" / "thin.png")
    os.mkfifo(photos / "a" / "pipe.png")
    flags = ["--root", str(photos), "--out", str(tmp_path / "maps"), "--device", "cpu"]
    program.main(flags)
    said = capsys.readouterr()
    assert "3 maps made, 0 were there, 2 unreadable" in said.out and "broken.png cannot be read" in said.err
    assert "thin.png cannot be read" in said.err and "pipe.png" in said.err
    found = sorted(str(p.relative_to(tmp_path / "maps")) for p in (tmp_path / "maps").rglob("*.*"))
    assert found == ["a/0.png", "a/1.png", "b/deep/2.png"]
    canny = build(plugin_config("visgen.controls", "canny"))
    pixels = as_map(Image.open(photos / "a" / "0.png").convert("RGB")).float() / 127.5 - 1
    kept = as_map(Image.open(tmp_path / "maps" / "a" / "0.png").convert("RGB"))
    assert torch.equal(kept > 127, canny.extract(pixels[None, None])[0, 0] > 0) and (kept > 127).any()
    program.main(flags)
    assert "0 maps made, 3 were there" in capsys.readouterr().out


def test_what_makes_no_maps_is_refused(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="none is no folder"):
        program.main(["--root", str(tmp_path / "none")])
    with pytest.raises(UserError, match="control depth needs a depth network"):
        program.main(["--root", str(photos), "--out", str(tmp_path / "m"), "--control.kind", "depth"])
    (photos / "a" / "0.jpg").write_bytes((photos / "a" / "1.jpg").read_bytes())
    with pytest.raises(UserError, match=r"a/0\.jpg and .*a/0\.png would have one map, 0\.png; rename one of them"):
        program.main(["--root", str(photos), "--out", str(tmp_path / "m")])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="holds no image"):
        program.main(["--root", str(tmp_path / "empty"), "--out", str(tmp_path / "m")])


@pytest.mark.parametrize("crop", ["center", "random"])
def test_a_map_is_cropped_and_mirrored_with_its_image(photos: Path, crop: str) -> None:
    """The images serve as their own maps: what differs is the resampling alone."""
    data = folder(photos, maps=photos, crop=crop, hflip=True)
    assert data.has_maps and len(data) == 3
    kinds = set()
    for index in range(3):
        for seed in range(6):
            sample, plain = (
                d.get(index, np.random.default_rng(seed)) for d in (data, folder(photos, crop=crop, hflip=True))
            )
            assert torch.equal(sample["pixels"], plain["pixels"]), "maps change no draw"
            assert sample["map"].shape == (1, 3, 16, 16) and sample["map"].dtype == torch.uint8
            far = (sample["map"].float() - sample["pixels"].float()).abs().mean()
            other = (sample["map"].flip(-1).float() - sample["pixels"].float()).abs().mean()
            assert far < 20 < other
            kinds.add(
                (
                    index,
                    bool(sample["pixels"][0, 0, :, 0].float().mean() > sample["pixels"][0, 0, :, -1].float().mean()),
                )
            )
    assert len(kinds) == 6, "both mirrored and not"
    assert torch.equal(data.get_many([1])["map"][0], data.get(1)["map"])


def test_maps_are_read_as_their_kind_reads_them(photos: Path, tmp_path: Path) -> None:
    for name in ("a/0", "a/1", "b/deep/2"):
        path = tmp_path / "lines" / f"{name}.npy" if name == "a/0" else tmp_path / "lines" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, np.linspace(0, 9, 12).reshape(3, 4)) if name == "a/0" else Image.new("L", (9, 9), 200).save(path)
    data = folder(photos, maps=tmp_path / "lines")
    depth = Maps(plugin_config("visgen.controls", "depth"))
    depth.setup(data)  # needs no network
    with pytest.raises(UserError, match=r"in a training: objective\.model\.control\.network .* data\.maps"):
        depth.setup(folder(photos))
    sample = depth.reading(data).get(0)
    assert sample["map"].min() < 60 and sample["map"].max() > 190
    assert depth.reading(data).get(1)["map"].unique().tolist() == [200]
    batch = {"pixels": torch.zeros(1, 1, 3, 16, 16), "map": torch.ones(1, 1, 3, 16, 16)}
    assert torch.equal(depth.batch(batch)["map"], batch["map"])  # type: ignore[arg-type, typeddict-item]
    canny = Maps(plugin_config("visgen.controls", "canny"))
    with pytest.raises(UserError, match=r"control map .*1\.png looks like dark lines on light"):
        canny.reading(data).get(1)
    both = Maps(LineartConfig(beside=plugin_config("visgen.controls", "hed")))
    with pytest.raises(UserError, match=r"data\.maps are of one kind, the control knows lineart and hed"):
        both.setup(data)


def test_missing_maps_are_named(photos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.maps: .*none is no folder; pass one with the layout"):
        folder(photos, maps=tmp_path / "none")
    (tmp_path / "some" / "a").mkdir(parents=True)
    Image.new("L", (9, 9)).save(tmp_path / "some" / "a" / "0.png")
    with pytest.raises(UserError, match=r"no map of 2 of 3 images, the first being a/1\.jpg; make them with"):
        folder(photos, maps=tmp_path / "some")
