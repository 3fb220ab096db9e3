"""`sample.py --control`: maps made or given, mixed, at other sizes, beside their images, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from sample_program import refused, run, settings_of

import visgen
from visgen.config import UserError, build
from visgen.controls import as_map
from visgen.data._images import center_crop
from visgen.model import Model
from visgen.nn.control import Hint
from visgen.sample import main

SIDE = 16  # pixels of the checkpoint's images; 8 x 8 tokens


@pytest.fixture(scope="module")
def controlled(make_control_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_control_run(tmp_path_factory.mktemp("runs") / "canny", beside="hed")


def photo(width: int = 40, height: int = 33, shift: int = 0) -> Image.Image:
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    draw.ellipse((6 + shift, 5, 30, 28), fill=(200, 30, 60))
    draw.rectangle((14, 12, 22, 20), fill=(20, 90, 220))
    return image


@pytest.fixture
def files(tmp_path: Path) -> Path:
    photo().save(tmp_path / "a.png")
    photo(shift=5).save(tmp_path / "B b.jpg")
    lines = Image.new("L", (SIDE, SIDE), 0)
    ImageDraw.Draw(lines).line((2, 2, 13, 9), fill=255)
    lines.save(tmp_path / "lines.png")
    return tmp_path


def edges_of(generator: Any, image: Image.Image, size: int = SIDE) -> torch.Tensor:
    """[1, 3, H, W] in [-1, 1]."""
    pixels = as_map(center_crop(image, size)).float() / 127.5 - 1
    return build(generator.model.config.control).extract(pixels[None, None])[0]


def pictures(out: Path) -> list[str]:
    return sorted(p.name for p in out.iterdir())


def test_an_image_is_extracted_and_stands_beside_what_is_drawn(controlled: Path, files: Path) -> None:
    out = files / "out"
    run(
        controlled,
        out,
        "--label",
        "square",
        "--num",
        "2",
        "--control.kind",
        "canny",
        "--control.image",
        str(files / "a.png"),
    )
    generator = visgen.load(controlled, device="cpu")
    name = next(p.stem.removeprefix("control_") for p in out.glob("control_*.png"))
    assert pictures(out) == sorted([f"0001_{name}_00000{i}.png" for i in (0, 1)] + [f"control_{name}.png", "grid.png"])
    wanted = edges_of(generator, photo())
    kept = as_map(Image.open(out / f"control_{name}.png").convert("RGB"))
    assert torch.equal(kept, ((wanted[0] + 1) * 127.5).round().to(torch.uint8)) and kept.any()
    images = generator.sample(["square"] * 2, [0, 1], control=wanted)
    plain = generator.sample(["square"] * 2, [0, 1])
    assert not torch.equal(images.tokens, plain.tokens)
    for i in (0, 1):
        drawn = as_map(Image.open(out / f"0001_{name}_00000{i}.png").convert("RGB"))
        assert torch.equal(drawn, images.pixels[i])
    about = settings_of(out / f"0001_{name}_000000.png")
    assert about["map"] == name and about["control"]["kind"] == "canny" and about["control"]["strength"] == [1.0]
    with Image.open(out / "grid.png") as grid:  # one row: the map, then its images
        assert grid.width > 2.5 * grid.height


def test_a_given_map_says_the_same_as_the_image_it_was_made_of(controlled: Path, files: Path) -> None:
    run(controlled, files / "one", "--label", "2", "--num", "1", "--control.image", str(files / "a.png"))
    made = next((files / "one").glob("control_*.png"))
    run(controlled, files / "two", "--label", "2", "--num", "1", "--control.map", str(made))
    Image.fromarray(255 - np.array(Image.open(made))).save(files / "negative.png")
    run(
        controlled,
        files / "three",
        "--label",
        "2",
        "--num",
        "1",
        "--control.map",
        str(files / "negative.png"),
        "--control.invert",
    )
    drawn = [np.array(Image.open(next((files / d).glob("0002_*.png")))) for d in ("one", "two", "three")]
    assert np.array_equal(drawn[0], drawn[1]) and np.array_equal(drawn[0], drawn[2])


def test_many_pictures_with_each_label_and_in_any_batch(controlled: Path, files: Path) -> None:
    given = ["--label", "0", "2", "--num", "2", "--control.image", str(files / "a.png"), str(files / "B b.jpg")]
    for batch in ("1", "16"):
        run(controlled, files / batch, *given, "--engine.batch", batch)
    found = pictures(files / "16")
    assert len(found) == 2 * 2 * 2 + 2 + 1 and any(name.startswith("control_b-b-") for name in found)
    assert found == pictures(files / "1")
    for name in found:
        if name.startswith("0"):
            assert np.array_equal(*[np.array(Image.open(files / b / name)) for b in ("1", "16")]), name


def test_strength_region_and_a_second_control(controlled: Path, files: Path) -> None:
    image, lines = str(files / "a.png"), str(files / "lines.png")
    region = Image.new("L", (64, 64), 0)
    region.paste(255, (0, 32, 64, 64))
    region.save(files / "low.png")
    drawn = {}
    for name, flags in {
        "none": [],
        "zero": ["--control.image", image, "--control.strength", "0"],
        "full": ["--control.image", image],
        "low": ["--control.image", image, "--control.region", str(files / "low.png")],
        "each": ["--control.image", image, "--control.strength", "0.5", "0", "2"],
        "both": ["--control.image", image, "--second.kind", "hed", "--second.map", lines, "--second.strength", "0.5"],
    }.items():
        run(controlled, files / name, "--label", "1", "--num", "1", "--seed", "7", *flags)
        drawn[name] = np.array(Image.open(next((files / name).glob("0001_*.png"))))
    assert np.array_equal(drawn["none"], drawn["zero"])
    assert len({d.tobytes() for d in drawn.values()}) == len(drawn) - 1
    generator = visgen.load(controlled, device="cpu")
    lower = (torch.arange(64) >= 32).float()[None]
    tokens = generator.sample([1], [7], control=[Hint(edges_of(generator, photo())[:, None], 1.0, lower)])
    assert np.array_equal(tokens.pil()[0], drawn["low"])
    plain = generator.sample([1], [7]).tokens
    assert torch.equal(tokens.tokens[0, :32], plain[0, :32]), "nothing counts in the upper half"
    second = as_map(Image.open(lines).convert("RGB")).float() / 127.5 - 1
    hints = [Hint(edges_of(generator, photo())[:, None]), Hint(second[None, None], 0.5)]
    assert np.array_equal(generator.sample([1], [7], control=hints).pil()[0], drawn["both"])


@pytest.mark.parametrize("size", [(16, 24), (8, 8), (24, 20)])
def test_other_sizes(controlled: Path, files: Path, size: tuple[int, int]) -> None:
    flags = ["--label", "1", "--num", "1", "--size", *map(str, size)]
    for kind, picture in (("image", "a.png"), ("map", "lines.png")):
        run(controlled, files / kind, *flags, f"--control.{kind}", str(files / picture))
        for name in ("0001_*.png", "control_*.png"):
            with Image.open(next((files / kind).glob(name))) as found:
                assert found.size == (size[1], size[0])
    generator = visgen.load(controlled, device="cpu")
    images = generator.sample([1], size=size)
    assert images.pixels.shape == (1, 3, *size) and images.tokens.shape == (1, size[0] * size[1] // 4)
    assert generator.sample([1]).pixels.shape == (1, 3, SIDE, SIDE), "and back"


def test_a_model_at_another_grid_is_the_model_made_for_it(make_model: Callable[..., Model]) -> None:
    for settings in ({}, {"rope_columns": 7}):
        model = make_model(grid=(1, 4, 4), control="canny", **settings)
        other = make_model(grid=(1, 3, 5), control="canny", **settings)
        other.load_state_dict(model.state_dict())
        batch = {"label": torch.tensor([1]), "map": torch.rand(1, 1, 3, 12, 20) * 2 - 1}
        tokens = torch.randint(16, (1, 15))
        assert torch.equal(model.at((1, 3, 5)).loss(tokens, batch, None), other.loss(tokens, batch, None))
        assert model.at((1, 4, 4)) is model and model.grid == (1, 4, 4) and model.tokens == 16
        assert model.at((1, 3, 5)).backbone.layers is model.backbone.layers  # type: ignore[union-attr]


def test_a_prompt_together_with_a_control(
    make_control_run: Callable[..., Path], text_encoder: Path, files: Path
) -> None:
    asked = {"kind": "text", "tokens": 6, "channels": 16, "encoder": str(text_encoder), "clean": False}
    run_dir = make_control_run(files / "text", condition=asked)
    flags = ["--prompt", "a red bird", "--num", "2", "--guidance.scale", "2", "--guidance.control", "3"]
    run(run_dir, files / "out", *flags, "--control.image", str(files / "a.png"))
    name = next(p.stem.removeprefix("control_") for p in (files / "out").glob("control_*.png"))
    found = list((files / "out").glob(f"a-red-bird-*_{name}_*.png"))
    assert len(found) == 2 and settings_of(found[0])["guidance"]["control"] == 3.0


def test_a_control_as_a_prefix(
    make_control_run: Callable[..., Path],
    small: Callable[..., Any],
    files: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = {"kind": "prefill", "control": small("controls", "canny"), "grid": (1, 8, 8), "classes": 3}
    run_dir, image = make_control_run(files / "prefix", None, condition=asked), str(files / "a.png")
    run(run_dir, files / "out", "--label", "1", "--num", "2", "--guidance.scale", "2", "--control.image", image)
    assert len(list((files / "out").glob("0001_a-*.png"))) == 2
    common = ["--checkpoint", str(run_dir), "--label", "1", "--out", str(files / "x"), "--engine.device", "cpu"]
    assert "reads a control map as its prefix; give it one" in refused_late(capsys, *common)
    assert "images of its own grid (1, 8, 8) alone" in refused_late(
        capsys, *common, "--control.image", image, "--size", "8", "8"
    )
    assert "reads one map, at strength 1" in refused_late(
        capsys, *common, "--control.image", image, "--control.strength", "0.5"
    )


def refused_late(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The error of a program that has shown its progress bar already."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--control.image {d}/none.png", "--control.image {d}/none.png does not exist"),
        ("--control.map {d}/none.png", "--control.map {d}/none.png does not exist"),
        ("--control.image {d}/text.png", "is not a readable picture"),
        ("--control.image {d}/tiny.png", "is 4 x 4 px; a side of less than 8 px shows nothing"),
        ("--control.map {d}/tinymap.png", "is 4 x 4 px; a side of less than 8 px shows nothing"),
        ("--control.image {d}/long.png", "is 2000 x 12 px, of which the crop shows next to nothing"),
        ("--control.image {d}/huge.png", "is not a readable picture"),
        ("--control.map {d}/a.png", "is a colour picture, a canny map is grey; to have the map made from it"),
        ("--control.map {d}/white.png", "looks like dark lines on light"),
        ("--control.image {d}/a.png --control.invert", "--control.invert takes the negative of a given map"),
        ("--control.image {d}/a.png --control.map {d}/a.png", "are both given"),
        ("--control.strength 0.5", "--control says how an image is controlled: give --control.image or --control.map"),
        ("--second.map {d}/lines.png", "--second is a control beside another"),
        ("--control.image {d}/a.png --second.map {d}/white.png", "on dark; pass --second.invert"),
        ("--control.image {d}/a.png --second.map {d}/a.png", "to have the map made from it, pass it as --second.image"),
        ("--control.image {d}/a.png --size 64", "--size must be INT INT or None, got '64'"),
        ("--control.image {d}/a.png --control.strength -1", "must be within [0, 1000]"),
        ("--control.image {d}/a.png --control.strength 1e9", "must be within [0, 1000]"),
        ("--control.image {d}/a.png --size 100000 100000", "of memory; lower --size"),
        (
            "--control.image {d}/a.png --control.strength 1 2",
            "--control.strength has 2 numbers, this checkpoint's control 3 injections",
        ),
        (
            "--control.kind sketch --control.image {d}/a.png",
            "--control.kind 'sketch' is no control; there are canny, depth",
        ),
        ("--control.kind depth --control.image {d}/a.png", "was trained for control canny and hed, not for depth"),
        (
            "--control.kind depth --control.image {d}/a.png",
            "needs a depth network to read an image: pass --control.network",
        ),
        ("--control.kind hed --control.image {d}/a.png", "control hed has given maps only"),
        ("--control.image {d}/a.png --control.network x", "--control.network is nothing that control canny needs"),
        ("--control.image {d}/a.png --control.region {d}/none.png", "--control.region {d}/none.png does not exist"),
        ("--control.map {d}/lines.png --control.region {d}/black.png", "is black nearly everywhere"),
        (
            "--control.image {d}/a.png --size 15 16",
            "size 15 16 must be multiples of the tokenizer's stride 2, e.g. 16 16",
        ),
        ("--control.image {d}/a.png --known.image {d}/a.png", "--control and --known.image are both given"),
        (
            "--control.image {d}/a.png {d}/a.png {d}/a.png --second.kind hed --second.map {d}/lines.png {d}/lines.png",
            "give as many",
        ),
        ("--guidance.control 2", "scales a control: it has a meaning only where a control is given"),
    ],
)
def test_what_is_refused_with_one_line(
    controlled: Path, files: Path, flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "text.png").write_text("no picture")
    photo(4, 4).save(files / "tiny.png")
    photo(2000, 12).save(files / "long.png")
    Image.new("L", (SIDE, SIDE), 255).save(files / "white.png")
    Image.new("L", (SIDE, SIDE), 0).save(files / "black.png")
    Image.new("L", (4, 4), 0).save(files / "tinymap.png")
    if "huge" in flags:
        Image.new("1", (20000, 20000)).save(files / "huge.png")
    given = flags.replace("{d}", str(files)).split()
    told = refused(
        capsys,
        "--checkpoint",
        str(controlled),
        "--out",
        str(files / "out"),
        "--engine.device",
        "cpu",
        "--label",
        "1",
        *given,
    )
    assert message.replace("{d}", str(files)) in told


def test_a_label_is_needed_and_a_model_without_control_has_none(
    controlled: Path, checkpoint_dir: Path, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--out", str(files / "out"), "--engine.device", "cpu", "--control.image", str(files / "a.png")]
    assert "--control needs --label" in refused(capsys, "--checkpoint", str(controlled), *flags)
    told = refused(capsys, "--checkpoint", str(checkpoint_dir), "--label", "1", *flags)
    assert "was trained without control; leave --control out, or choose another checkpoint" in told
    with pytest.raises(UserError, match="this model was trained without control"):
        visgen.load(checkpoint_dir, device="cpu").sample([1], control=torch.zeros(1, 3, SIDE, SIDE))
    generator = visgen.load(controlled, device="cpu")
    for wrong in (torch.zeros(2, 3, SIDE, SIDE), torch.zeros(1, 3, SIDE, SIDE, dtype=torch.uint8)):
        with pytest.raises(UserError, match=r"control maps are .* for 1 images; give floats in \[-1, 1\]"):
            generator.sample([1], control=wrong)
    for strength in (float("nan"), -0.5, (1.0, 1e38, 1.0)):
        with pytest.raises(UserError, match=r"strength of a control is .*; it must be within \[0, 1000\]"):
            generator.sample([1], control=[Hint(torch.zeros(1, 1, 3, SIDE, SIDE), strength)])
    maps = torch.zeros(1, 1, 3, SIDE, SIDE)
    for given, said in (
        (maps[:, 0] + 255, r"control maps lie within 255 and 255; give floats in \[-1, 1\]"),
        (maps[:, 0] * float("nan"), "control maps lie within nan"),
        ([maps[:, 0]], "control is of Tensor; give a tensor of maps"),
        ("x.png", "control is of str"),
        (Hint(maps, "much"), "strength of a control is 'much'; give a number"),  # type: ignore[arg-type]
        (Hint(maps, 1.0, torch.ones(8, 8)), r"region of a control is \[8, 8\]; give a weight for each token"),
    ):
        with pytest.raises(UserError, match=said):
            generator.sample([1], control=given)  # type: ignore[arg-type]
    one, listed = (generator.sample([1], control=c).tokens for c in (Hint(maps, torch.ones(3)), [Hint(maps)]))
    assert torch.equal(one, listed)
    with pytest.raises(UserError, match="resize it to the image's size"):
        generator.sample([1], control=torch.zeros(1, 3, SIDE, SIDE + 2))


def test_a_blank_map_is_drawn_under_and_said(controlled: Path, files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, flag in (("white", "image"), ("black", "map")):
        Image.new("RGB", (SIDE, SIDE), name).save(files / f"{name}.png")
        run(controlled, files / name, "--label", "1", "--num", "1", f"--control.{flag}", str(files / f"{name}.png"))
        assert f"--control: the map of {files}/{name}.png is blank" in capsys.readouterr().err
    run(controlled, files / "a", "--label", "1", "--num", "1", "--control.image", str(files / "a.png"))
    assert "blank" not in capsys.readouterr().err


def test_what_lies_under_transparency_has_no_edges(controlled: Path, files: Path) -> None:
    """A picture shows on white, whatever colours its transparent pixels hide."""
    image = photo()
    shown = np.asarray(image).astype(int).min(-1) < 250
    hidden = np.random.default_rng(0).integers(0, 255, (33, 40, 3), np.uint8)
    pixels = np.concatenate([np.where(shown[..., None], np.asarray(image), hidden), shown[..., None] * 255], -1)
    Image.fromarray(pixels.astype(np.uint8), "RGBA").save(files / "cut.png")
    image.save(files / "whole.png")
    for name in ("cut", "whole"):
        run(controlled, files / name, "--label", "1", "--num", "1", "--control.image", str(files / f"{name}.png"))
    cut, whole = (np.asarray(Image.open(next((files / n).glob("control_*.png")))) for n in ("cut", "whole"))
    assert np.array_equal(cut, whole) and cut.any()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "I;16", "CMYK"])
def test_pictures_of_any_mode_and_odd_size(controlled: Path, files: Path, mode: str) -> None:
    image = photo(41, 37)
    image = (
        Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
        if mode == "I;16"
        else image.convert(mode)
    )
    path = files / ("x.tif" if mode == "CMYK" else "x.png")
    image.save(path)
    run(controlled, files / "out", "--label", "1", "--num", "1", "--control.image", str(path))
    assert np.array(Image.open(next((files / "out").glob("control_*.png")))).any()
