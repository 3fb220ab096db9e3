"""`emoji`: the bundled set, its split by concept, what may be mirrored, what it says about missing and damaged sets."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from visgen.config import UserError, build, plugin_config
from visgen.data import Samples, emoji
from visgen.data._emoji_concepts import concept_of, held_out_concepts, neutral_code

BUNDLED = Path(__file__).parents[2] / "assets" / "emoji64"
TONES = re.compile("1f3f[b-f]")


def make(split="train", **options):
    return build(plugin_config("visgen.data", "emoji", **options), split)


@pytest.fixture(scope="module")
def train():
    return make("train")


@pytest.fixture(scope="module")
def held_out():
    return make("held_out")


# ------------------------------------------------------------------------------------------------ the bundled set


def test_the_bundled_set_fits_its_budget_and_its_notice_names_its_sources():
    assert sum(f.stat().st_size for f in (BUNDLED / "index.json", *BUNDLED.glob("*.webp"))) <= 3.0 * 2**20
    index = json.loads((BUNDLED / "index.json").read_text())
    assert list(index["styles"]) == ["fluent"], "Noto and Twemoji are built by users, never bundled"
    notice = (BUNDLED.parent / "NOTICE").read_text()
    for word in (index["styles"]["fluent"]["source"].replace("@1", " 1"), "Microsoft Corporation", "LobeHub"):
        assert word in notice
    assert "THE SOFTWARE IS PROVIDED" in notice and "Apache" in notice and "CC-BY" in notice


def test_what_microsoft_does_not_license_is_not_bundled(train, held_out):
    names = " ; ".join(train.names + held_out.names)
    for withheld in ("germany flag", "england flag", "family", "kiss:", "couple with heart", "holding hands"):
        assert withheld not in names
    assert not re.search(r"\b(video game|technologist)\b|(?<!linked )paperclip", names)
    assert "linked paperclips" in names and "laptop" not in names


def test_pictures_are_64_pixels_on_white(train, held_out):
    assert len(train) + len(held_out) == 3011
    for data in (train, held_out):
        pixels = data.get_many(range(len(data)))["pixels"]
        assert (pixels.dtype, tuple(pixels.shape[1:])) == (torch.uint8, (1, 3, 64, 64))
        assert data.image_size == (64, 64)
        corners = pixels[..., [0, 0, -1, -1], [0, -1, 0, -1]].amin((1, 2, 3))
        assert corners.min() >= 240, "a corner is not white: transparency was not composited"
        assert 0.4 < (pixels.amin(2) > 250).float().mean() < 0.6
        assert (pixels.flatten(1).float().std(1) > 3).all(), "an empty picture"
    sample = train.get(5)
    assert torch.equal(sample["pixels"], train.get_many([5])["pixels"][0])
    assert sample["label"] == int(train.labels[5])


def test_labels_are_nine_categories(train, held_out):
    assert len(train.classes) == 9 and train.classes == held_out.classes
    for data in (train, held_out):
        assert set(data.labels.tolist()) == set(range(9)), "a category without pictures"
    of = {name: train.classes[label] for name, label in zip(train.names, train.labels.tolist(), strict=True)}
    assert of["tiger"] == "Animals & Nature" and of["pretzel"] == "Food & Drink" and of["rainbow flag"] == "Flags"
    assert of["thumbs up sign, medium-dark skin tone"] == "People & Body"


def test_names_and_codes_say_what_is_drawn(train):
    place = {code: i for i, code in enumerate(train.codes)}
    assert train.names[place["1f9d1-1f3ff-200d-1f373"]] == "cook, dark skin tone"
    assert len(place) == len(train), "a code occurs twice"
    red, green = (train.get(place[code])["pixels"].float().mean((0, 2, 3)) for code in ("1f34e", "1f34f"))
    assert red[0] > red[1] + 20 and green[1] > green[0] + 20, "pictures and names are out of step"


# ---------------------------------------------------------------------------------------------- the split by concept


def plain(name):
    """A name without skin tones and words of gender: written anew here, apart from what the builder does."""
    words = re.sub(r", .* skin tones?$", "", name)
    words = re.sub(r"\b(man|woman|men|women|person|people|boy|girl|mans|womans|male|female)\b", "", words)
    return " ".join(words.replace("facing right", "").replace(":", "").split())


def skeleton(code):
    """A code without skin tones, gender signs, joiners and direction; any adult is the same adult."""
    kept = [p for p in code.split("-") if not TONES.match(p) and p not in ("200d", "2640", "2642", "27a1")]
    return tuple("1f9d1" if p in ("1f468", "1f469") else p for p in kept)


def test_no_concept_lies_on_both_sides(train, held_out):
    assert not set(train.concepts.tolist()) & set(held_out.concepts.tolist())
    assert not {plain(n) for n in train.names} & {plain(n) for n in held_out.names}
    assert not {skeleton(c) for c in train.codes} & {skeleton(c) for c in held_out.codes}


def test_skin_tones_and_genders_share_a_concept(train, held_out):
    for data in (train, held_out):
        groups = {}
        for code, name, concept in zip(data.codes, data.names, data.concepts.tolist(), strict=True):
            if skeleton(code):  # the right arrow itself, and the signs of gender, have none
                groups.setdefault(skeleton(code), set()).add(concept)
            groups.setdefault(plain(name), set()).add(concept)
        assert all(len(concepts) == 1 for concepts in groups.values())
        assert len(data) > 2 * len(set(data.concepts.tolist())), "no variants: the test would be empty"


def distances(left, right):
    """[len(left), len(right)] RMS over 0..1 of pictures reduced to 32 pixels."""
    small = [torch.nn.functional.avg_pool2d(d[:, 0].float() / 255, 2).flatten(1) for d in (left, right)]
    return torch.cdist(*small) / small[0].shape[1] ** 0.5


def test_no_held_out_picture_has_a_near_duplicate_in_training(train, held_out):
    mine, theirs = (d.get_many(range(len(d)))["pixels"] for d in (held_out, train))
    assert distances(mine, theirs).min() > 0.045
    within = distances(theirs, theirs) + torch.eye(len(theirs))
    assert (within.amin(1) < 0.045).float().mean() > 0.15, "variants are no nearer than others: the test is blind"


def test_a_tenth_of_each_category_is_held_out(train, held_out):
    for label, category in enumerate(train.classes):
        held, kept = (len(set(d.concepts[d.labels == label].tolist())) for d in (held_out, train))
        assert held >= 1, category
        assert abs(held / (held + kept) - 0.1) < 0.03, category


def test_the_split_is_a_function_of_names_alone():
    concepts = [(f"thing {i}", ("Objects", False), 1) for i in range(200)]
    held = {concepts[i][0] for i in held_out_concepts(concepts)}
    assert len(held) == 20
    assert {concepts[::-1][i][0] for i in held_out_concepts(concepts[::-1])} == held
    assert held_out_concepts([("alone", ("Flags", False), 1)]) == []
    for small in (0, 1):
        pair = [(name, ("Objects", False), 1 if i == small else 99) for i, name in enumerate("ab")]
        assert held_out_concepts(pair) == [small], "a large concept was held out"


@pytest.mark.parametrize(
    ("names", "together"),
    [
        (("BLUE HEART", "HEAVY BLACK HEART", "LIGHT BLUE HEART"), True),
        (("CLOCK FACE ONE OCLOCK", "CLOCK FACE TEN-THIRTY"), True),
        (("LEFT-FACING FIST", "RIGHT-FACING FIST"), True),
        (("France Flag", "St. Martin Flag"), True),
        (("FAMILY: MAN, BOY", "FAMILY"), True),
        (("BELL", "BELL WITH CANCELLATION STROKE"), True),
        (("BELL", "BELL PEPPER"), False),
        (("KISS MARK", "KISS"), False),
        (("Ireland Flag", "Italy Flag"), False),
        (("PAPERCLIP", "LINKED PAPERCLIPS"), False),
        (("MOON CAKE", "CRESCENT MOON"), False),
    ],
)
def test_series_of_one_thing_share_a_concept(names, together):
    assert (len({concept_of(name) for name in names}) == 1) == together


def test_neutral_code():
    assert neutral_code("1f469-1f3fd-200d-2695") == "1f9d1-200d-2695"
    assert neutral_code("1f3c3-1f3fb-200d-2640-200d-27a1") == "1f3c3"
    assert neutral_code("1f469") == "1f469", "a woman alone has no neutral sequence; SERIES joins her to `person`"


def test_bases_are_one_plain_neutral_picture_per_concept(held_out):
    bases = held_out.bases()
    assert len(bases) == len(set(held_out.concepts.tolist())) == len(set(held_out.concepts[bases].tolist()))
    assert not any(TONES.search(held_out.codes[i]) for i in bases)
    for i in bases:
        words = held_out.names[i].split()
        neutral = [c for c, k in zip(held_out.codes, held_out.concepts, strict=True) if k == held_out.concepts[i]]
        assert not {"man", "woman"} & set(words) or not any(c == neutral_code(c) for c in neutral), held_out.names[i]
    small = make("held_out", variants="base")
    assert small.names == [held_out.names[i] for i in bases]


# -------------------------------------------------------------------------------------------------- augmentation


def test_flags_symbols_and_lettering_are_never_mirrored():
    data = make(hflip=True)
    rng = np.random.default_rng(0)
    plain_pixels = data.get_many(range(len(data)))["pixels"]
    flipped = dict.fromkeys(range(9), 0)
    for i in [*range(0, len(data), 4), *np.flatnonzero(data.labels.numpy() >= 7)]:
        pixels = data.get(int(i), rng)["pixels"]
        if not torch.equal(pixels, plain_pixels[i]):
            assert torch.equal(pixels, plain_pixels[i].flip(-1))
            flipped[int(data.labels[i])] += 1
    named = {name: i for i, name in enumerate(data.classes)}
    assert flipped[named["Flags"]] == flipped[named["Symbols"]] == 0
    assert all(flipped[named[c]] > 5 for c in ("Animals & Nature", "Food & Drink", "People & Body", "Objects"))
    views = data.views(range(len(data)), "flip")["pixels"]
    mirrored = (views[:, 1] != views[:, 0]).flatten(1).any(1)
    assert not mirrored[data.labels >= 7].any() and mirrored[data.labels == named["Animals & Nature"]].all()
    clock = data.names.index("clock face three oclock")
    assert not mirrored[clock]


AUGMENTED = {"hflip": True, "shift": 4, "scale": 0.1, "jitter": 0.2}


def test_augmentation_is_a_function_of_the_generator():
    data = make(**AUGMENTED)
    one, two, other = (Samples(data, seed)[17, 3]["pixels"] for seed in (5, 5, 6))
    assert torch.equal(one, two) and not torch.equal(one, other)
    assert (one.dtype, one.shape) == (torch.uint8, (1, 3, 64, 64))
    assert not torch.equal(one, Samples(data, 5)[17, 4]["pixels"])
    assert torch.equal(data.get(17)["pixels"], make().get(17)["pixels"]), "without a generator the sample is plain"


def test_held_out_pictures_are_never_augmented(held_out):
    data = make("held_out", **AUGMENTED)
    assert all(
        torch.equal(data.get(i, np.random.default_rng(i))["pixels"], held_out.get(i)["pixels"]) for i in range(9)
    )


def test_a_sample_owns_its_pixels(train):
    before = train.get(3)["pixels"].clone()
    train.get(3)["pixels"].zero_()
    train.get(3, np.random.default_rng(0))["pixels"].zero_()
    assert torch.equal(train.get(3)["pixels"], before)


def test_shift_fills_with_white_and_moves_everything_alike(train):
    data, seen = make(shift=3), set()
    for seed in range(60):
        got = data.get(0, np.random.default_rng(seed))["pixels"][0]
        for x in range(-3, 4):
            for y in range(-3, 4):
                moved = torch.roll(train.get(0)["pixels"][0], (y, x), (1, 2))
                moved[:, : max(y, 0)], moved[:, :, : max(x, 0)] = 255, 255
                moved[:, 64 + min(y, 0) :], moved[:, :, 64 + min(x, 0) :] = 255, 255
                if torch.equal(got, moved):
                    seen.add((x, y))
    assert len(seen) > 20 and {abs(x) for x, _ in seen} == {abs(y) for _, y in seen} == {0, 1, 2, 3}


@pytest.mark.parametrize("option", [{"scale": 0.3}, {"jitter": 0.5}])
def test_zoom_and_jitter_keep_the_background_white(train, option):
    data = make(**option)
    i = train.names.index("snail")
    many = torch.stack([data.get(i, np.random.default_rng(seed))["pixels"] for seed in range(20)])
    ink = (255 - many.float()).mean((1, 2, 3, 4))
    base = (255 - train.get(i)["pixels"].float()).mean()
    assert ink.min() < 0.85 * base and ink.max() > 1.15 * base
    smaller = many[ink < 0.9 * base] if "scale" in option else many  # a larger one may reach the corner
    assert len(smaller) > 3 and smaller[..., 0, 0].min() >= 245


# ------------------------------------------------------------------------------------------------------ where and what


def one_line(error, *words):
    text = str(error.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text


def test_the_default_root_is_found_from_everywhere(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(make()) == len(train)
    assert emoji.Config().root == Path("assets/emoji64"), "an absolute default would tie run directories to a machine"


def test_a_missing_set_names_the_builder(tmp_path):
    with pytest.raises(UserError) as error:
        make(root=tmp_path / "none")
    one_line(error, str(tmp_path / "none"), f"python -m visgen.data.emoji --out {tmp_path / 'none'}")


def test_a_missing_style_names_the_builder():
    with pytest.raises(UserError) as error:
        make(styles=("fluent", "noto"))
    one_line(error, "fluent, not noto", "python -m visgen.data.emoji", "--styles fluent noto")


@pytest.mark.parametrize("damage", ["truncated sheet", "missing sheet", "foreign sheet", "index"])
def test_a_damaged_set_is_named(tmp_path, damage):
    root = shutil.copytree(BUNDLED, tmp_path / "set")
    sheet = root / "fluent_1.webp"
    if damage == "truncated sheet":
        sheet.write_bytes(sheet.read_bytes()[:1000])
    elif damage == "missing sheet":
        sheet.unlink()
    elif damage == "foreign sheet":
        Image.new("RGB", (64, 64)).save(sheet)
    else:
        (root / "index.json").write_text("[]")
    with pytest.raises(UserError) as error:
        make(root=root)
    one_line(error, str(root), "build it again")


def test_evenly_draws_each_concept_as_often_as_any_other(train):
    data = make(evenly=True)
    bases = set(train.bases())
    concepts = len(bases)
    assert len(data) == len(train) and torch.equal(data.labels, train.labels), "what is looked up stays the same"
    rng = np.random.default_rng(0)
    people = {}
    for share in (0.0, 0.5, 1.0):
        data = make(evenly=True, base_share=share)
        pictures = {data._pixels[i].numpy().tobytes(): i for i in range(len(data))}
        drawn = [pictures[data.get(i, rng)["pixels"].numpy().tobytes()] for i in range(concepts)]
        assert len(set(train.concepts[drawn].tolist())) == concepts
        of_people = [i for i in drawn if train.labels[i] == 1]
        people[share] = sum(i in bases for i in of_people) / len(of_people)
    assert people[0.0] < 0.4 < people[0.5] < 0.8 < people[1.0] == 1
    held_out = make("held_out", evenly=True)
    assert torch.equal(held_out.get(3, rng)["pixels"][0], held_out._pixels[3])


@pytest.mark.parametrize(
    "options",
    [
        {"base_share": 0.5},
        {"shift": -1},
        {"shift": 40},
        {"scale": 0.6},
        {"jitter": -0.1},
        {"styles": ("fluent", "fluent")},
    ],
)
def test_values_out_of_range(options):
    with pytest.raises(UserError, match=f"data.{next(iter(options))}"):
        make(**options)
