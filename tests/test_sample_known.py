"""`sample.py --known.image`: what is kept, how pictures and masks are read, and one-line errors."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sample_program import refused, run, settings_of

import visgen
from visgen.config import build, plugin_config
from visgen.data import to_batch
from visgen.generate import Generator
from visgen.known import KnownConfig, known_pixels, read_known
from visgen.sample import main


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
    monkeypatch.setattr(visgen.sample, "save", lambda images, *rest: seen.append(images.tokens) or [])
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


def test_the_known_files_are_recorded(checkpoint_dir: Path, tmp_path: Path, picture: Path) -> None:
    mask = mask_file(tmp_path, slice(0, 8))
    about = {
        file: {"path": str(file), "sha256": hashlib.sha256(file.read_bytes()).hexdigest()[:12]}
        for file in (picture, mask)
    }
    known = ["--known.image", str(picture), "--num", "1", "--label", "0"]
    run(checkpoint_dir, tmp_path / "a", *known)
    run(checkpoint_dir, tmp_path / "b", *known, "--known.mask", str(mask))
    run(checkpoint_dir, tmp_path / "c", *known[2:])
    for name in ("grid.png", "0000_000000.png"):
        assert settings_of(tmp_path / "a" / name)["known"] == {
            "image": about[picture],
            "mask": "upper half",
            "paste": True,
        }
        assert settings_of(tmp_path / "b" / name)["known"] == {
            "image": about[picture],
            "mask": about[mask],
            "paste": True,
        }
        assert "known" not in settings_of(tmp_path / "c" / name)


def test_the_kept_pixels_are_those_of_the_picture(checkpoint_dir: Path, tmp_path: Path, picture: Path) -> None:
    known = ["--known.image", str(picture), "--known.mask", str(mask_file(tmp_path, slice(0, 7))), "--num", "1"]
    for name, flags in (("a", []), ("b", ["--known.no-paste"])):
        run(checkpoint_dir, tmp_path / name, *known, "--label", "0", *flags)
    given, pasted, plain = (
        np.array(Image.open(path))
        for path in (picture, tmp_path / "a" / "0000_000000.png", tmp_path / "b" / "0000_000000.png")
    )
    assert (pasted[:7] == given[:7]).all() and (pasted[7:] == plain[7:]).all() and (plain[:7] != given[:7]).any()


def test_a_known_image_needs_its_label_where_there_are_several(
    checkpoint_dir: Path,
    tmp_path: Path,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = ["--checkpoint", str(checkpoint_dir), "--out", str(tmp_path / "out"), "--engine.device", "cpu"]
    message = refused(capsys, *given, "--known.image", str(picture))
    assert message == "--known.image needs --label, the class of what it shows: Ankle boot, bag, Coat\n"
    monkeypatch.setattr(Generator, "class_count", 1)
    main([*given, "--known.image", str(picture), "--num", "1"])
    assert (tmp_path / "out" / "0000_000000.png").exists()


def varieties(whole: Image.Image) -> dict[str, Image.Image]:
    """One picture in the modes and sizes that image files come in."""
    wide = Image.new("RGB", (64, 32))
    wide.paste(whole.resize((32, 32), Image.Resampling.NEAREST), (16, 0))
    clear = whole.convert("RGBA")
    clear.putalpha(Image.linear_gradient("L").resize(whole.size))
    deep = Image.fromarray(np.asarray(whole.convert("L")).astype(np.uint16) * 257)
    turned = whole.transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6  # shown turned clockwise
    grown = whole.resize((75, 41), Image.Resampling.BICUBIC)
    return {
        "wide": wide,
        "alpha": clear,
        "deep": deep,
        "palette": whole.quantize(16),
        "bits": whole.convert("1"),
        "animated": whole,
        "dot": whole.resize((1, 1)),
        "long": whole.resize((100, 1)),
        "cmyk": whole.convert("CMYK"),
        "turned": turned,
        "grown": grown,
    }


KINDS = ["wide", "alpha", "deep", "palette", "bits", "animated", "dot", "long", "cmyk", "turned", "grown"]
SUFFIX = {"cmyk": "jpg", "animated": "webp"}


@pytest.mark.parametrize("kind", KINDS)
def test_pictures_are_decoded_and_cropped_as_training_images_are(
    checkpoint_dir: Path, tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    seen = drawn_tokens(monkeypatch)
    given = varieties(Image.open(picture))[kind]
    path = tmp_path / "set" / "a" / f"x.{SUFFIX.get(kind, 'png')}"
    path.parent.mkdir(parents=True)
    several = {"save_all": True, "append_images": [given.rotate(90)], "lossless": True} if kind == "animated" else {}
    given.save(path, exif=given.getexif(), **several)
    Image.new("L", given.size[::-1] if kind == "turned" else given.size, 255).save(tmp_path / "mask.png")
    known = ["--known.image", str(path), "--known.mask", str(tmp_path / "mask.png")]
    run(checkpoint_dir, tmp_path / "out", *known, "--num", "1", "--label", "0")
    data = build(
        plugin_config("visgen.data", "folder", root=tmp_path / "set", image_size=16, held_out_fraction=0.0), "train"
    )
    generator = visgen.load(str(checkpoint_dir), device="cpu")
    with torch.no_grad():
        expected = generator.tokenizer.encode(to_batch(data.get_many([0]), "cpu")["pixels"])
    assert torch.equal(seen[0], expected)


@pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA", "LA", "I;16"])
def test_masks_of_every_mode(tmp_path: Path, picture: Path, mode: str) -> None:
    mask = Image.open(mask_file(tmp_path, slice(0, 8)))
    deep = Image.fromarray(np.asarray(mask).astype(np.uint16) * 257)
    (deep if mode == "I;16" else mask.convert(mode)).save(tmp_path / "m.png")
    keep = known_pixels(*read_known(KnownConfig(picture, tmp_path / "m.png")), 16)[1]
    assert keep[0, :8].all() and not keep[0, 8:].any()


def test_the_transparent_part_of_a_mask_is_not_kept(tmp_path: Path, picture: Path) -> None:
    mask = Image.new("RGBA", (16, 16), "white")
    mask.putalpha(Image.open(mask_file(tmp_path, slice(0, 8))))
    mask.save(tmp_path / "m.png")
    keep = known_pixels(*read_known(KnownConfig(picture, tmp_path / "m.png")), 16)[1]
    assert keep[0, :8].all() and not keep[0, 8:].any()


def test_a_mask_that_keeps_nothing_is_refused(
    checkpoint_dir: Path, tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (16, 16), 1).save(tmp_path / "m.png")  # a 0/1 mask, as arrays are
    given = ["--checkpoint", str(checkpoint_dir), "--out", str(tmp_path / "out"), "--known.image", str(picture)]
    message = refused(capsys, *given, "--known.mask", str(tmp_path / "m.png"))
    assert "m.png keeps nothing: its brightest pixel is 1 of 255; paint what is kept white" in message
    assert not (tmp_path / "out").exists(), "before any work"


def test_a_picture_with_no_square_in_it_is_refused(
    checkpoint_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (101, 1)).save(tmp_path / "line.png")
    given = ["--checkpoint", str(checkpoint_dir), "--out", str(tmp_path / "out")]
    message = refused(capsys, *given, "--known.image", str(tmp_path / "line.png"))
    assert "line.png is 101 x 1 px" in message and "crop it closer" in message


def test_a_mask_follows_the_crop_of_its_picture(checkpoint_dir: Path) -> None:
    picture, mask = Image.new("RGB", (96, 64)), Image.new("RGB", (96, 64))
    mask.paste("white", (0, 0, 48, 64))  # left half
    pixels, keep = known_pixels(picture, mask, 16)
    assert pixels.shape == (1, 3, 16, 16) and keep.shape == (1, 16, 16) and keep.dtype == torch.bool
    assert keep[0, :, :8].all() and not keep[0, :, 8:].any()
    upper = known_pixels(picture, None, 16)[1]
    assert upper.shape == (1, 16, 16) and upper[0, :8].all() and not upper[0, 8:].any()


def test_a_mask_of_another_size_is_refused(
    checkpoint_dir: Path, tmp_path: Path, picture: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (16, 32), 255).save(tmp_path / "mask.png")
    given = ["--checkpoint", str(checkpoint_dir), "--out", str(tmp_path / "out"), "--known.image", str(picture)]
    message = refused(capsys, *given, "--known.mask", str(tmp_path / "mask.png"))
    assert "mask.png is 16 x 32 px" in message and "is 16 x 16; give a mask of the picture's size" in message
    assert not (tmp_path / "out").exists(), "before any work"


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
    message = refused(capsys, *given, *flags[part])
    assert f"--known.{part} {bad} is not a readable picture (" in message
    assert message.endswith("; save it as an 8-bit PNG of usual size, or pass another\n")
