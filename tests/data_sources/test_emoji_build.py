"""The builder behind `emoji`, on tiny fake packages: labels, spellings, styles, what is left out, npm, errors."""

import io
import json
import re
import subprocess
import sys
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from visgen.config import UserError, build, plugin_config
from visgen.data import _emoji_build


def make(split="train", **options):
    return build(plugin_config("visgen.data", "emoji", **options), split)


def entry(code, name, category, subcategory, order, tones=()):
    variants = {tone: {"unified": code + "-" + tone.upper()} for tone in tones}
    found = {"unified": code, "name": name, "category": category, "subcategory": subcategory, "sort_order": order}
    return {**found, **({"skin_variations": variants} if tones else {})}


LABELS = [
    entry("0039-FE0F-20E3", "KEYCAP 9", "Symbols", "keycap", 9),
    entry("1F436", "DOG FACE", "Animals & Nature", "animal-mammal", 2),
    entry("1F42F", "TIGER FACE", "Animals & Nature", "animal-mammal", 3),
    entry("1F9D1-200D-1F33E", "FARMER", "People & Body", "person-role", 5, ["1F3FB", "1F3FF"]),
    entry("1F468-200D-1F33E", "MAN FARMER", "People & Body", "person-role", 4),
    entry("1F4CE", "PAPERCLIP", "Objects", "office", 6),
    entry("1F1E9-1F1EA", "Germany Flag", "Flags", "country-flag", 7),
    entry("1F3FB", "EMOJI MODIFIER FITZPATRICK TYPE-1-2", "Component", "skin-tone", 8),
]
COLOURS = {
    "1f436": (200, 0, 0),
    "1f42f": (200, 120, 0),
    "39-fe0f-20e3": (0, 0, 200),
    "1f9d1-200d-1f33e": (220, 200, 0),
    "1f9d1-200d-1f33e-1f3fb": (220, 200, 120),
    "1f468-200d-1f33e": (120, 200, 0),
    "1f4ce": (90, 90, 90),
    "1f1e9-1f1ea": (0, 0, 0),
    "1f999": (1, 2, 3),  # without a label
}


def disc(colour, width, height):
    image = Image.new("RGBA", (width, height), (0, 0, 0, 0))
    y, x = np.ogrid[:height, :width]
    inside = (x - width / 2 + 0.5) ** 2 + (y - height / 2 + 0.5) ** 2 < (min(width, height) * 0.4) ** 2
    image.paste(Image.new("RGB", image.size, colour), mask=Image.fromarray((inside * 255).astype(np.uint8)))
    return image


@pytest.fixture
def packages(tmp_path):
    """A node_modules with tiny versions of the three packages."""
    root = tmp_path / "node_modules"
    for style, package in _emoji_build.PACKAGES.items():
        folder = root / package.name / package.folder
        folder.mkdir(parents=True)
        (root / package.name / "package.json").write_text(json.dumps({"version": package.version}))
        (root / package.name / "emoji.json").write_text(json.dumps(LABELS))
        for code, colour in COLOURS.items():
            if style == "fluent":
                disc(colour, 256, 264 if code == "1f42f" else 256).save(folder / f"{code}.webp", lossless=True)
            elif code != "1f42f":
                disc(colour, 64, 64).save(folder / f"{code}.png")
    return root


def run(packages, out, *words):
    _emoji_build.main(["--out", str(out), "--source", str(packages), *words])
    return out


def both(root, **options):
    return [make(split, root=root, **options) for split in ("train", "held_out")]


def test_builder(packages, tmp_path, capsys):
    parts = both(run(packages, tmp_path / "set"))
    assert re.search(r"fluent: 6 pictures, 1 sheets, .* PSNR \d\d\.\d dB", capsys.readouterr().out)
    drawn = {code: data.get(i)["pixels"][0] for data in parts for i, code in enumerate(data.codes)}
    assert set(drawn) == {
        "1f436",
        "1f42f",
        "39-20e3",
        "1f9d1-200d-1f33e",
        "1f9d1-200d-1f33e-1f3fb",
        "1f468-200d-1f33e",
    }, "a picture without a label, a withheld or an undrawn one came in, or a spelling was not understood"
    for code, pixels in drawn.items():
        colour = next(value for name, value in COLOURS.items() if name.replace("-fe0f", "") == code)
        middle = pixels[:, 28:36, 28:36].float().mean((1, 2))
        assert (middle - torch.tensor(colour)).abs().max() < 8, code
        assert pixels[:, 0, 0].min() > 250
    ink = (drawn["1f42f"].float().amin(0) < 250).float()
    assert abs(ink.any(0).sum() - ink.any(1).sum()) <= 2, "a picture that is not square was stretched"
    farmers = next(d for d in parts if "farmer" in d.names)
    assert [farmers.names[i] for i in farmers.bases() if "farmer" in farmers.names[i]] == ["farmer"]
    assert "farmer, light skin tone" in farmers.names and "farmer, dark skin tone" not in farmers.names


def test_three_styles_have_one_split_and_lossless_small_pictures(packages, tmp_path):
    out = run(packages, tmp_path / "set3", "--styles", "twemoji", "fluent", "noto")
    train, held = both(out, classes="style_category")
    assert len(train.classes) == 27 and train.classes[9] == "noto Smileys & Emotion"
    assert len(train) + len(held) == 6 + 7 + 7, "Noto and Twemoji keep flags and paperclips, and lack the tiger here"
    of = {(s, n): k for d in (train, held) for s, n, k in zip(d.styles, d.names, d.concepts.tolist(), strict=True)}
    assert of["fluent", "dog face"] == of["noto", "dog face"] == of["twemoji", "dog face"]
    assert not set(train.concepts.tolist()) & set(held.concepts.tolist())
    data, i = next((d, i) for d in (train, held) for i, n in enumerate(d.names) if n == "keycap 9")
    assert data.classes[data.labels[i]] == f"{data.styles[i]} Symbols"
    j = next(j for j, n in enumerate(data.names) if n == "keycap 9" and data.styles[j] == "noto")
    expected = Image.alpha_composite(Image.new("RGBA", (64, 64), "white"), disc(COLOURS["39-fe0f-20e3"], 64, 64))
    assert np.array_equal(data.get(j)["pixels"][0].permute(1, 2, 0), np.asarray(expected.convert("RGB")))
    alone = both(out, styles=("twemoji",), classes="subcategory")
    assert all(set(d.styles) <= {"twemoji"} for d in alone)
    assert {d.classes[k] for d in alone for k in d.labels.tolist()} >= {"country-flag", "office", "person-role"}
    kept = both(out, concepts_of="fluent")
    shared = {k for (style, _), k in of.items() if style == "fluent"}
    assert (
        {(s, n): k for d in kept for s, n, k in zip(d.styles, d.names, d.concepts.tolist(), strict=True)}
        == {key: k for key, k in of.items() if k in shared}
        != of
    )
    names = [name for d in both(out, concepts_of="noto", styles=("fluent",)) for name in d.names]
    assert names and not any("tiger" in name for name in names), "a style that is not used may say what is left out"


def test_the_command(packages, tmp_path):
    command = [sys.executable, "-m", "visgen.data.emoji", "--source", str(packages), "--out", str(tmp_path / "set")]
    assert subprocess.run(command, capture_output=True).returncode == 0
    again = subprocess.run(command, capture_output=True, text=True)
    assert again.returncode == 2
    assert again.stderr == f"error: {tmp_path / 'set'} already holds a set; delete it or pass another --out\n"


def fake_npm(packages, names):
    """`npm pack`, from the fake packages; the archives also hold what must not be unpacked."""

    def pack(command, cwd, **options):
        assert command[:3] == ["npm", "pack", "--silent"]
        name = command[3].rpartition("@")[0]
        names.append(name)
        with tarfile.open(cwd / "package.tgz", "w:gz") as archive:
            archive.add(packages / name, "package")
            for path in (
                f"package/{'../' * 20}{packages.parent}/escaped/package.json",
                "package/img/google/sheets/64.png",
            ):
                member = tarfile.TarInfo(path)
                member.size = 2
                archive.addfile(member, io.BytesIO(b"{}"))
        return subprocess.CompletedProcess(command, 0, "package.tgz\n", "")

    return pack


def test_packages_come_from_npm(packages, tmp_path, monkeypatch):
    names = []
    monkeypatch.setattr(subprocess, "run", fake_npm(packages, names))
    _emoji_build.main(["--out", str(tmp_path / "set")])
    assert names == ["@lobehub/fluent-emoji-3d", "emoji-datasource-google"], "pictures, and labels"
    assert sum(map(len, both(tmp_path / "set"))) == 6
    assert not list(tmp_path.rglob("escaped"))


def one_line(error, *words):
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_errors_of_the_builder(packages, tmp_path, monkeypatch):
    def offline(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "npm error code ENOTFOUND\nnpm error network")

    def missing(command, **options):
        raise FileNotFoundError("npm")

    out = ["--out", str(tmp_path / "set")]
    for broken, words in ((offline, "ENOTFOUND"), (missing, "not installed")):
        with monkeypatch.context() as patch, pytest.raises(UserError) as error:
            patch.setattr(subprocess, "run", broken)
            _emoji_build.main(out)
        one_line(error, "@lobehub/fluent-emoji-3d@1.1.0", words, "--source")
    with pytest.raises(UserError) as error:
        run(tmp_path / "nowhere", tmp_path / "set")
    one_line(error, "nowhere/@lobehub/fluent-emoji-3d", "--source")
    (packages / "emoji-datasource-google" / "package.json").write_text('{"version": "3.0.0"}')
    with pytest.raises(UserError) as error:
        run(packages, tmp_path / "set")
    one_line(error, "3.0.0", "16.0.0")
    for words in (["--quality", "101"], ["--size", "4"], ["--styles", "apple"]):
        with pytest.raises(UserError):
            run(packages, tmp_path / "set", *words)
    assert not (tmp_path / "set" / "index.json").exists(), "a failed build left a set"


def test_a_damaged_package_is_named(packages, tmp_path):
    picture = packages / "@lobehub" / "fluent-emoji-3d" / "assets" / "1f436.webp"
    picture.write_bytes(b"RIFF")
    with pytest.raises(UserError) as error:
        run(packages, tmp_path / "set")
    one_line(error, "1f436.webp", "unpack")
