"""`folder`: layout, splits, unreadable images, order-free randomness."""

import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from visgen.config import UserError, build, plugin_config
from visgen.data import Samples
from visgen.data._images import center_crop

DATA = Path(__file__).parents[1] / "data"


def image(seed, size=(20, 24), mode="RGB"):
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def folder(root, split="train", **options):
    return build(plugin_config("visgen.data", "folder", root=root, **{"image_size": 16, **options}), split)


@pytest.fixture
def mixed(tmp_path):
    """Two classes of every kind of file, nested; stray text and hidden files."""
    root = tmp_path / "mixed"
    (root / "b" / "deep").mkdir(parents=True)
    (root / "a").mkdir()
    image(0).save(root / "a" / "0.jpg")
    image(1, mode="RGBA").save(root / "a" / "1.png")
    image(2, mode="L").save(root / "a" / "2.JPEG")
    image(3).save(root / "b" / "deep" / "3.webp")
    image(4, mode="CMYK").save(root / "b" / "4.jpg")
    Image.fromarray(np.full((20, 20), 30000, np.uint16)).save(root / "b" / "5.png")
    image(6, mode="P").save(root / "b" / "6.gif")
    image(7).save(root / "b" / "7.bmp")
    (root / "b" / "notes.txt").write_text("no image")
    (root / "b" / ".hidden.png").write_text("no image")
    return root


def test_layout_and_order(mixed):
    data = folder(mixed, held_out_fraction=0)
    assert data.classes == ["a", "b"]
    names = [os.path.relpath(data._name(i), mixed) for i in range(len(data))]
    assert names == ["a/0.jpg", "a/1.png", "a/2.JPEG", "b/4.jpg", "b/5.png", "b/6.gif", "b/7.bmp", "b/deep/3.webp"]
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    for i in range(len(data)):
        sample = data.get(i)
        assert sample["pixels"].shape == (1, 3, 16, 16)
        assert sample["pixels"].dtype == torch.uint8
        assert sample["label"] == data.labels[i]
    expected = np.asarray(center_crop(image(7), 16)).transpose(2, 0, 1)
    assert np.array_equal(data.get(6)["pixels"][0].numpy(), expected)
    assert data.get(4)["pixels"].unique().tolist() == [117]


def test_one_class_without_sub_folders(tmp_path):
    image(0).save(tmp_path / "x.png")
    data = folder(tmp_path, held_out_fraction=0)
    assert (data.classes, len(data), data.get(0)["label"]) == (["all"], 1, 0)


def test_links_are_followed_but_never_round_and_round(tmp_path, caplog):
    root = tmp_path / "root"
    for name in ("a/deep", "b"):
        (root / name).mkdir(parents=True)
        image(0).save(root / name / "x.png")
    image(0).save(tmp_path / "outside.png")
    os.symlink(tmp_path / "outside.png", root / "a" / "linked.png")
    os.symlink(root / "b", root / "a" / "other")
    os.symlink(root / "a", root / "b" / "other")  # a/other/other is a again
    os.symlink(root, root / "a" / "up")
    os.symlink(root / "a", root / "a" / "itself")
    with caplog.at_level(logging.WARNING):
        data = folder(root, held_out_fraction=0)
    names = [os.path.relpath(data._name(i), root) for i in range(len(data))]
    assert names == [
        *("a/deep/x.png", "a/linked.png", "a/other/x.png"),
        *("b/other/deep/x.png", "b/other/linked.png", "b/x.png"),
    ]
    assert "left out, links to a folder that they lie in (a/itself" in caplog.text


def test_train_and_val_folders(tmp_path):
    for where in ("train/cat", "train/dog", "val/dog"):
        (tmp_path / where).mkdir(parents=True)
        image(0).save(tmp_path / where / "x.png")
    assert len(folder(tmp_path)) == 2
    held = folder(tmp_path, "held_out")
    assert (held.classes, held.labels.tolist()) == (["cat", "dog"], [1])
    (tmp_path / "val" / "cow").mkdir()
    with pytest.raises(UserError, match="class 'cow' is not among"):
        folder(tmp_path, "held_out")


@pytest.mark.parametrize("layout", ["by name", "two folders"])
def test_images_beside_class_folders_are_told(tmp_path, caplog, layout):
    parts = {s: tmp_path / s if layout == "two folders" else tmp_path for s in ("train", "held_out")}
    for part in parts.values():
        for name in (*(f"{c}/{i}.png" for i in range(9) for c in "ab"), "x.png", "y.JPG"):
            (part / name).parent.mkdir(parents=True, exist_ok=True)
            image(0).save(part / name)
    (tmp_path / "train.txt").touch()
    with caplog.at_level(logging.WARNING):
        for split in parts:
            folder(tmp_path, split, held_out_fraction=0.5)
    told = [f"{p}: 2 images beside its class folders are ignored; move them into one" for p in parts.values()]
    assert [r.getMessage() for r in caplog.records] == (told if layout == "two folders" else told[:1])


def test_a_class_without_images_is_told(mixed, caplog):
    for name in ("empty", "notes"):
        (mixed / name).mkdir()
    (mixed / "notes" / "x.txt").touch()
    with caplog.at_level(logging.WARNING):
        for split in ("train", "held_out"):
            assert {"empty", "notes"} < set(folder(mixed, split, held_out_fraction=0.5).classes)
    found = [r.getMessage() for r in caplog.records]
    assert found == [f"{mixed}: class empty, notes holds no image, yet counts; delete the folder"]


def test_nothing_is_said_of_other_files_and_of_one_class(mixed, tmp_path, caplog):
    (mixed / "notes.txt").write_text("no image")
    (tmp_path / "flat").mkdir()
    image(0).save(tmp_path / "flat" / "x.png")
    with caplog.at_level(logging.WARNING):
        folder(mixed, held_out_fraction=0)
        folder(tmp_path / "flat", held_out_fraction=0)
    assert not caplog.records


def test_split_by_hash_is_stable_and_disjoint(tmp_path):
    (tmp_path / "a").mkdir()
    for i in range(60):
        (tmp_path / "a" / f"{i}.png").touch()

    def names(split):
        data = folder(tmp_path, split, held_out_fraction=0.3)
        return {data._name(i) for i in range(len(data))}

    train, held = names("train"), names("held_out")
    assert len(train) + len(held) == 60
    assert not train & held
    assert 8 <= len(held) <= 30
    for i in range(60, 90):
        (tmp_path / "a" / f"{i}.png").touch()
    assert train <= names("train")
    assert held <= names("held_out")
    with pytest.raises(UserError, match=r"held_out_fraction 0\.0 leaves none of its 90 images"):
        folder(tmp_path, "held_out", held_out_fraction=0.0)


def break_two(root):
    """Truncates one file, empties another."""
    whole = (root / "a" / "0.jpg").read_bytes()
    (root / "a" / "0.jpg").write_bytes(whole[: len(whole) // 2])
    (root / "a" / "1.png").write_bytes(b"")


def test_unreadable_image_stops_the_run_and_is_named(mixed):
    break_two(mixed)
    data = folder(mixed, held_out_fraction=0)
    with pytest.raises(UserError, match=r"a/0\.jpg cannot be read .* --data\.on-error skip") as caught:
        data.get(0)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"a/1\.png"):
        data.get(1)
    batches = iter(DataLoader(Samples(data, 0), sampler=[(0, 0)], batch_size=1, num_workers=1))
    with pytest.raises(UserError) as caught:
        next(batches)
    batches._shutdown_workers()  # or the traceback keeps them until a slow garbage collection
    assert re.fullmatch(r"image .*a/0\.jpg cannot be read .*skip", str(caught.value))


def test_unreadable_image_is_skipped_and_counted(mixed, caplog):
    break_two(mixed)
    data = folder(mixed, held_out_fraction=0, on_error="skip")
    with caplog.at_level(logging.WARNING):
        sample = data.get(0)
        data.get(0)
    assert torch.equal(sample["pixels"], data.get(2)["pixels"])  # the next readable one
    assert data.skipped == 2
    assert len(caplog.records) == 2  # each is named once
    counted = folder(mixed, held_out_fraction=0, on_error="skip")
    loader = DataLoader(Samples(counted, 0), sampler=[(i, 0) for i in range(8)], batch_size=2, num_workers=2)
    labels = torch.cat([b["label"] for b in loader])
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    assert counted.skipped == 2  # seen from the main process


def test_all_images_unreadable(tmp_path):
    for i in range(3):
        (tmp_path / f"{i}.png").write_text("x")
    data = folder(tmp_path, held_out_fraction=0, on_error="skip")
    with pytest.raises(UserError, match="3 of 3 are damaged"):
        data.get(1)


def test_bad_roots(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"data\.root .*nowhere does not exist"):
        folder(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is not a folder"):
        folder(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty holds no image"):
        folder(tmp_path / "empty")
    (tmp_path / "beside" / "thumbs").mkdir(parents=True)
    image(0).save(tmp_path / "beside" / "x.png")
    with pytest.raises(UserError, match="the 1 beside its sub-folders"):
        folder(tmp_path / "beside")

    def refuse(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(UserError, match=r"empty cannot be read .Permission denied.; check its permissions"):
        folder(tmp_path / "empty")


@pytest.mark.parametrize(
    ("options", "text"), [({"image_size": 0}, "image_size 0"), ({"held_out_fraction": 1.5}, r"held_out_fraction 1\.5")]
)
def test_bad_options(tmp_path, options, text):
    with pytest.raises(UserError, match=text):
        folder(tmp_path, **options)


def test_samples_depend_on_seed_epoch_and_index_alone(mixed):
    data = folder(mixed, held_out_fraction=0, crop="random", hflip=True)
    keys = [(i, e) for e in range(3) for i in range(8)]

    def run(workers, seed=5, order=keys):
        loader = DataLoader(Samples(data, seed), sampler=order, batch_size=3, num_workers=workers)
        return dict(zip(order, torch.cat([b["pixels"] for b in loader]), strict=True))

    alone, workers = run(0), run(2, order=keys[::-1])
    assert all(torch.equal(alone[k], workers[k]) for k in keys)
    assert any(not torch.equal(alone[(0, 0)], alone[(0, e)]) for e in (1, 2))
    assert any(not torch.equal(alone[k], other) for k, other in run(0, seed=6).items())


def test_held_out_is_never_augmented(mixed):
    held = folder(mixed, "held_out", held_out_fraction=0.6, crop="random", hflip=True)
    assert torch.equal(held.get(0)["pixels"], held.get(0, np.random.default_rng(3))["pixels"])


def test_views(mixed):
    data = folder(mixed, held_out_fraction=0, crop="random", hflip=True)
    flip = data.views([2, 5], "flip")
    assert flip["pixels"].shape == (2, 2, 1, 3, 16, 16)
    assert torch.equal(flip["pixels"][:, 1], flip["pixels"][:, 0].flip(-1))
    assert torch.equal(flip["pixels"][1, 0], data.get(5)["pixels"])
    assert flip["label"].tolist() == [0, 1]
    assert torch.equal(data.views([2, 5], "center")["pixels"], flip["pixels"][:, :1])
    ten = data.views([2, 5], "ten_crop", [1.1, 1.5])
    assert ten["pixels"].shape == (2, 20, 1, 3, 16, 16)
    assert torch.equal(ten["pixels"][:, :10], data.views([2, 5], "ten_crop")["pixels"])


def fill(root, *names):
    for name in names:
        (root / name).mkdir(parents=True, exist_ok=True)
        image(len(name)).save(root / name / "x.png")
    return root


@pytest.mark.parametrize(
    "name", ["valid", "validation", "Val", "eval", "dev", "TEST", "testing", "held_out", "Held-Out", "evaluation"]
)
@pytest.mark.parametrize("train", ["train", "Train", "training"])
def test_every_usual_name_of_a_held_out_part_is_known(tmp_path, train, name):
    fill(tmp_path, f"{train}/cat", f"{train}/dog", f"{name}/dog")
    parts = [folder(tmp_path, split) for split in ("train", "held_out")]
    assert [part.classes for part in parts] == [["cat", "dog"]] * 2
    assert [part.labels.tolist() for part in parts] == [[0, 1], [1]]


def test_of_several_held_out_parts_one_is_used_and_the_others_are_named(tmp_path, caplog):
    fill(tmp_path, "train/cat", "test/cat", "validation/cat", "extra")
    assert folder(tmp_path, "held_out")._name(0).endswith("validation/cat/x.png")
    assert "train/ is trained on, validation/ is held out, extra/, test/ not used" in caplog.text
    fill(tmp_path, "Training/cat")
    with pytest.raises(UserError, match="holds Training/ and train/; keep the one"):
        folder(tmp_path)


def test_train_beside_a_part_of_unknown_name_is_no_class(tmp_path, caplog):
    fill(tmp_path / "a", "train/cat", "train/dog", "others/dog")
    with pytest.raises(UserError, match=r"train/ and others/ hold the same class folders, 'dog' among them; call"):
        folder(tmp_path / "a")
    fill(tmp_path / "b", "train", "bus")
    assert folder(tmp_path / "b", held_out_fraction=0).classes == ["bus", "train"]
    assert "train/ is taken as a class" in caplog.text


def test_class_names_are_composed_and_may_not_differ_in_their_form_alone(tmp_path):
    one, two = ("caf\u00e9", "cafe\u0301")
    fill(tmp_path, f"train/{two}", "train/z", f"val/{one}")
    train, held_out = (folder(tmp_path, split) for split in ("train", "held_out"))
    assert train.classes == held_out.classes == [one, "z"] and held_out.labels.tolist() == [0]
    assert train.get(0)["label"] == 0
    fill(tmp_path, f"train/{one}")
    with pytest.raises(UserError, match=r"two folders called .* Unicode"):
        folder(tmp_path)


def test_what_training_leaves_out_is_said_once(tmp_path, caplog):
    fill(tmp_path, "a", "a/.thumbs", "a/@eaDir", "__MACOSX/a")
    os.mkfifo(tmp_path / "a" / "pipe.png")
    (tmp_path / "whole").symlink_to(tmp_path)
    for split in ("train", "held_out"):
        with caplog.at_level(logging.WARNING):
            try:
                data = folder(tmp_path, split, held_out_fraction=0)
            except UserError:
                continue
            assert data.classes == ["a"] and len(data) == 1
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "pipe.png" in said[0] and "(whole)" in said[0]


ODD = {
    "exif.jpg": lambda path: path.write_bytes((DATA / "odd_exif.jpg").read_bytes()),
    "damaged.avif": lambda path: path.write_bytes((DATA / "damaged.avif").read_bytes()),
    "thin.png": lambda path: Image.new("L", (1, 60_000)).save(path),
    "float.tif": lambda path: Image.fromarray(np.zeros((9, 9), np.float32)).save(path),
    "empty.webp": lambda path: path.touch(),
}


@pytest.mark.parametrize("crop", ["center", "random"])
def test_no_odd_picture_ends_a_training_that_skips(tmp_path, crop, caplog):
    fill(tmp_path, "a", "b")
    for name, write in ODD.items():
        write(tmp_path / "a" / name)
    data = folder(tmp_path, held_out_fraction=0, image_size=64, crop=crop, on_error="skip")
    rngs = [np.random.default_rng(i) for i in range(len(data))]
    samples = [data.get(i, rng) for i, rng in enumerate(rngs)]
    assert data.skipped == 4 and caplog.text.count("skipped") == 4  # EXIF data lose no picture
    assert [s["label"] for s in samples] == [0, 0, 0, 0, 0, 0, 1]
    again = [data.get(i, np.random.default_rng(i)) for i in range(len(data))]
    assert all(torch.equal(a["pixels"], b["pixels"]) for a, b in zip(samples, again, strict=True))
    assert data.views(range(len(data)), "ten_crop")["pixels"].shape[1] == 10
    for name in ("damaged.avif", "thin.png"):
        index = next(i for i in range(len(data)) if data._name(i).endswith(name))
        with pytest.raises(UserError, match=rf"{name} cannot be read .*; convert it to PNG or JPEG, or delete it"):
            folder(tmp_path, held_out_fraction=0, image_size=64, crop=crop).get(index)


def test_a_bad_or_missing_map_is_skipped_with_its_image(tmp_path, caplog):
    fill(tmp_path / "photos", "a", "b", "c")
    fill(tmp_path / "maps", "a", "b")
    (tmp_path / "maps" / "a" / "x.png").write_text("no map")
    options = {"maps": tmp_path / "maps", "held_out_fraction": 0}
    with pytest.raises(UserError, match="no map of 1 of 3 images"):
        folder(tmp_path / "photos", **options)
    data = folder(tmp_path / "photos", on_error="skip", **options)
    assert [data.get(i)["label"] for i in range(3)] == [1, 1, 1] and data.skipped == 2
    assert "maps/a/x.png" in caplog.text and "maps/c/x.png" in caplog.text
