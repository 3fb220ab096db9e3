"""Every data source: the same sample for the same key, in the shapes and ranges that training expects."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import freedoom_set
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from visgen.checks import check
from visgen.config import UserError, build, plugin_config
from visgen.data import Data, Samples, Split, captions, codes, pairs, to_batch

PACKAGE = "data"
COUNT = {"train": 12, "held_out": 7}


# ---------------------------------------------------------------------------- files for the sources that read some


def picture(seed: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 24, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def folder(root: Path) -> dict[str, Any]:
    for split, count in COUNT.items():
        for i in range(count):
            path = root / split / f"class_{i % 3}" / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(100 * len(split) + i))
    return {"root": root}


def webdataset(root: Path) -> dict[str, Any]:
    for split, count in COUNT.items():
        with tarfile.open(root / f"{split}.tar", "w") as tar:
            for i in range(count):
                for name, data in ((f"{i:03}.png", picture(100 * len(split) + i)), (f"{i:03}.cls", b"%d" % (i % 3))):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    return {"shards": str(root / "train.tar"), "held_out_shards": str(root / "held_out.tar")}


def fashion_mnist(root: Path) -> dict[str, Any]:
    for name, count in (("train", COUNT["train"]), ("t10k", COUNT["held_out"])):
        rng = np.random.default_rng(count)
        images, labels = rng.integers(0, 256, (count, 28, 28), np.uint8), rng.integers(0, 10, count, np.uint8)
        for part, array in (("images-idx3", images), ("labels-idx1", labels)):
            header = (0x800 + array.ndim).to_bytes(4, "big") + np.array(array.shape, ">u4").tobytes()
            (root / f"{name}-{part}-ubyte").write_bytes(header + array.tobytes())
    return {"root": root}


def cached(root: Path) -> dict[str, Any]:
    for split, count in COUNT.items():
        config = plugin_config("visgen.data", "synthetic", n=count, n_held_out=count, image_size=16)
        source = build(config, split)
        settings: dict[str, Any] = {"views": "flip", "ranges": [], "shard_images": 4, "tokenizer": "abc"}
        index = codes.make_index(source, grid=[1, 2, 2], vocab=300, **settings)
        (root / split).mkdir()
        ids = np.random.default_rng(count).integers(0, 300, (count, 2, 4))
        for number in range(index.shard_count):
            part = list(index.shard(number))
            codes.write_shard(root / split, index, number, ids[part], source.labels[part].numpy())
            index.shards.append(codes.shard_record(root / split, index, number))
        index.complete = True
        codes.write_index(root / split, index)
    return {"root": root}


def trajectories(root: Path) -> dict[str, Any]:
    for split, count in COUNT.items():
        told = {"guidance": {}, "warp": {}, "map_steps": 30, "precision": "fp32", "teacher": "t", "tokenizer": "k"}
        shape: dict[str, Any] = {"classes": ["a", "b", "c"], "image_size": [16, 16], "grid": [1, 2, 2], "vocab": 300}
        index = pairs.Index(split=split, pairs=count, shard_pairs=5, first_seed=10 * count, **shape, **told)
        pairs.write_index(root / split, index)
        for number in range(index.shard_count):
            rng = np.random.default_rng(100 * count + number)
            pairs.write_shard(root / split, index, number, rng.integers(0, 300, (len(index.shard(number)), 4)))
    return {"root": root}


def captioned(root: Path) -> dict[str, Any]:
    words = ["a bird", "a red bird", "the sea"]
    for split, count in COUNT.items():
        lines = [{"image": f"{split}_{i}.png", "text": words[i % 3 :]} for i in range(count)]
        for i, line in enumerate(lines):
            (root / str(line["image"])).write_bytes(picture(100 * len(split) + i))
        (root / f"{split}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    captions.write_index(root / "text", captions.Index(encoder="t5", clean=False, tokens=5, channels=2))
    features = [np.full((n + 1, 2), n, np.float16) for n in range(3)]
    captions.write_shard(root / "text", 0, words, features)
    files = {"file": root / "train.jsonl", "held_out_file": root / "held_out.jsonl"}
    return {**files, "features": root / "text"}


def sprites(root: Path) -> dict[str, Any]:
    pictures = plugin_config("visgen.data", "synthetic", n=9, n_held_out=9, image_size=16)
    return {"pictures": pictures, "sprite": 8, "frames": 3}


def video(root: Path) -> dict[str, Any]:
    for split, count in COUNT.items():
        for i in range(count):
            path = root / split / f"class_{i % 3}" / f"{i}.gif"
            path.parent.mkdir(parents=True, exist_ok=True)
            rng = np.random.default_rng(100 * len(split) + i)
            first, *rest = (Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)) for _ in range(7))
            first.save(path, save_all=True, append_images=rest)
    return {"root": root, "frames": 2, "stride": 3}


def freedoom(root: Path) -> dict[str, Any]:
    for split, count in COUNT.items():
        freedoom_set.write(root, "train" if split == "train" else "held_out", freedoom_set.clips(count, 5, 12))
    return {"root": root, "frames": 3, "maps": "seg"}


MAKERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "folder": folder,
    "webdataset": webdataset,
    "fashion_mnist": fashion_mnist,
    "codes": cached,
    "pairs": trajectories,
    "captions": captioned,
    "sprites": sprites,
    "video": video,
    "freedoom": freedoom,
}
AUGMENTED = {"hflip": True, "crop": "random", "shift": 2}  # where a source has these options

Open = Callable[..., Data]
kept: dict[tuple[str, Split], Data] = {}


@pytest.fixture
def source(kind: str, small: Callable[..., Any], tmp_path: Path) -> Open:
    """Opens a split, augmented; a source without a maker runs on its default files, read once: they are shipped."""
    if kind in MAKERS:
        config = small(PACKAGE, kind, **MAKERS[kind](tmp_path), **AUGMENTED)
        return lambda split="train": build(config, split)

    config = small(PACKAGE, kind, **AUGMENTED)
    check(config, "data")

    def open_split(split: Split = "train") -> Data:
        if (kind, split) not in kept:
            kept[kind, split] = build(config, split)
        return kept[kind, split]

    return open_split


def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)


def test_samples_have_the_promised_shapes_and_ranges(source: Open) -> None:
    data = source()
    assert len(data) > 3 and data.split == "train" and len(data.classes) >= 1
    assert all(isinstance(name, str) for name in data.classes)
    for i in (0, 1, len(data) - 1):
        for sample in (data.get(i), data.get(i, rng(0))):
            assert isinstance(sample["label"], int) and 0 <= sample["label"] < len(data.classes)
            assert ("pixels" in sample) != ("tokens" in sample)
            if "pixels" in sample:
                assert sample["pixels"].dtype == torch.uint8 and sample["pixels"].shape[1] == 3
                assert sample["pixels"].ndim == 4 and tuple(sample["pixels"].shape[2:]) == tuple(data.image_size)
                assert sample["pixels"].shape[0] == data.frames
            else:
                assert sample["tokens"].dtype == torch.int64 and sample["tokens"].ndim == 1
                assert int(sample["tokens"].min()) >= 0 and int(sample["tokens"].max()) < data.vocab


def test_a_sample_depends_on_its_key_alone(source: Open) -> None:
    data, again = source(), source()
    for i in range(4):
        assert same(data.get(i), data.get(i)) and same(data.get(i), again.get(i)), "plain samples"
        first = [data.get(i, rng(s)) for s in (1, 2)]
        np.random.seed(3)
        torch.manual_seed(3)
        assert same(data.get(i, rng(1)), first[0]) and same(again.get(i, rng(2)), first[1])


def test_held_out_is_another_set_without_augmentation(source: Open) -> None:
    train, held_out = source("train"), source("held_out")
    assert held_out.classes == train.classes and tuple(held_out.image_size) == tuple(train.image_size)
    count = min(len(train), len(held_out), 7)
    assert not all(same(train.get(i), held_out.get(i)) for i in range(count))
    assert all(same(held_out.get(i), held_out.get(i, rng(i))) for i in range(count))


def test_many_samples_at_once_are_the_plain_ones(source: Open) -> None:
    data = source()
    chosen = [2, 0, len(data) - 1, 0]
    many = data.get_many(chosen)
    assert many["label"].dtype == torch.int64 and many["label"].shape == (4,)
    for row, i in enumerate(chosen):
        assert same({k: v[row] for k, v in many.items()}, data.get(i))


def test_views_of_pixels(source: Open) -> None:
    data = source()
    if "tokens" in data.get(0):
        with pytest.raises(UserError, match="tokens"):
            data.views([0], "center")
        return
    for kind, count in (("center", 1), ("flip", 2), ("shift", 18)):
        views = data.views([1, 2], kind)
        assert views["pixels"].dtype == torch.uint8 and views["pixels"].shape[:3] == (2, count, data.frames)
        assert torch.equal(views["pixels"][:, 0], data.get_many([1, 2])["pixels"])
        assert torch.equal(
            views["pixels"][:, count // 2], views["pixels"][:, 0].flip(-1) if count > 1 else views["pixels"][:, 0]
        )
        assert views["label"].tolist() == [data.get(1)["label"], data.get(2)["label"]]
    shifted = data.views([1], "shift")["pixels"][0, :, 0]  # [18, 3, H, W], which repeat the edge
    padded = torch.nn.functional.pad(shifted[0].float(), (1, 1, 1, 1), mode="replicate").byte()
    size = shifted.shape[-1]
    crops = [padded[:, y : y + size, x : x + size] for y in range(3) for x in range(3)]
    assert all(any(torch.equal(view, crop) for view in shifted[:9]) for crop in crops)


def test_the_loader_gets_what_the_keys_say(source: Open) -> None:
    data = source()
    keys = [(3, 0), (1, 0), (3, 1), (0, 5)]
    loader: Any = DataLoader(Samples(data, seed=4), batch_size=4, sampler=keys)
    batch = to_batch(next(iter(loader)), "cpu")
    assert batch["index"].tolist() == [3, 1, 3, 0]
    assert batch["label"].tolist() == [data.get(i)["label"] for i, _ in keys]
    name = "pixels" if "pixels" in batch else "tokens"
    expected = torch.stack([data.get(i, np.random.default_rng((4, epoch, i)))[name] for i, epoch in keys])
    assert torch.equal(batch[name], expected.float() / 127.5 - 1 if name == "pixels" else expected)
    assert name == "tokens" or (batch["pixels"].min() >= -1 and batch["pixels"].max() <= 1)


def test_positions_outside_are_refused(source: Open) -> None:
    data = source()
    with pytest.raises(IndexError):
        data.get(len(data))
