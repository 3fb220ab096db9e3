"""`codes`: the cache's files read back, the drawn view, and every refusal."""

import json
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from visgen.config import UserError, build, plugin_config
from visgen.data import Samples, codes


def write(root, split="train", images=10, vocab=70000, **settings):
    """A cache of random codes in shards of 4 images, and those codes."""
    source = build(plugin_config("visgen.data", "synthetic", n=images, n_held_out=images, image_size=8), split)
    settings = {"views": "flip", "ranges": [], "grid": [1, 2, 2], "shard_images": 4, "tokenizer": "abc", **settings}
    index = codes.make_index(source, vocab=vocab, **settings)
    folder = root / split
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab, (images, index.view_count, 4))
    for number in range(index.shard_count):
        part = list(index.shard(number))
        codes.write_shard(folder, index, number, ids[part], source.labels[part].numpy())
        index.shards.append(codes.shard_record(folder, index, number))
    index.complete = True
    codes.write_index(folder, index)
    for path in folder.glob("done*"):
        path.unlink()
    return ids


def read(root, split="train"):
    return build(plugin_config("visgen.data", "codes", root=root), split)


def change(root, **values):
    path = root / "train" / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, np.uint16), (65537, np.uint32)])
def test_round_trip(tmp_path, vocab, dtype):
    ids = write(tmp_path, vocab=vocab)
    data = read(tmp_path)
    assert (len(data), data.grid, data.vocab, data.view_count, data.image_size) == (10, (1, 2, 2), vocab, 2, (8, 8))
    assert data.classes == ["disc", "square", "triangle", "ring"]
    assert data.tokens(9).dtype == dtype
    for i in range(10):
        assert np.array_equal(data.tokens(i), ids[i])
        sample = data.get(i)
        assert sample["tokens"].dtype == torch.int64
        assert sample["tokens"].tolist() == ids[i, 0].tolist()
        assert sample["label"] == i % 4
    assert data.labels.tolist() == [i % 4 for i in range(10)]
    data.verify()
    with pytest.raises(IndexError):
        data.tokens(10)


def test_views_are_drawn_evenly_in_training_only(tmp_path):
    ids = write(tmp_path, views="ten_crop", ranges=[1.1, 1.05])
    write(tmp_path, "held_out", views="ten_crop", ranges=[1.1, 1.05])
    train, held = read(tmp_path), read(tmp_path, "held_out")
    drawn = [train.get(3, np.random.default_rng(k))["tokens"].tolist() for k in range(400)]
    counts = [sum(d == view for d in drawn) for view in ids[3].tolist()]
    assert sum(counts) == 400
    assert min(counts) > 5  # 20 each expected
    for sample in (train.get(3), held.get(3), held.get(3, np.random.default_rng(0))):
        assert sample["tokens"].tolist() == ids[3, 4].tolist()  # the centre crop
        assert sample["view"] == 0
    for k in range(30):
        sample = train.get(3, np.random.default_rng(k))
        assert sample["tokens"].tolist() == ids[3, (sample["view"] + 4) % 20].tolist()


def test_workers_and_pickling_read_the_same(tmp_path):
    write(tmp_path)
    data = read(tmp_path)
    keys = [(i, e) for e in range(2) for i in range(10)]
    runs = [
        torch.cat([b["tokens"] for b in DataLoader(Samples(data, 1), sampler=keys, batch_size=4, num_workers=w)])
        for w in (0, 2)
    ]
    assert torch.equal(*runs)
    packed = pickle.dumps(data)
    assert len(packed) < 10_000
    assert np.array_equal(pickle.loads(packed).tokens(9), data.tokens(9))


def test_source_is_built_from_the_index(tmp_path):
    write(tmp_path, "held_out", images=6)
    source = read(tmp_path, "held_out").source()
    assert (type(source).__name__, source.split, len(source), source.image_size) == ("Synthetic", "held_out", 6, (8, 8))
    path = tmp_path / "held_out" / "index.json"
    moved = {**json.loads(path.read_text()), "source": {"kind": "folder", "root": str(tmp_path / "gone")}}
    path.write_text(json.dumps(moved))
    with pytest.raises(
        UserError, match=r"the source of code cache .* cannot be opened: data\.root .*gone does not exist"
    ):
        read(tmp_path, "held_out").source()


def test_check(tmp_path):
    write(tmp_path)
    read(tmp_path).check("abc")
    with pytest.raises(UserError, match="was written by tokenizer abc, not by xyz; pass that tokenizer"):
        read(tmp_path).check("xyz")


def test_missing_and_wrong_version(tmp_path):
    with pytest.raises(UserError, match=r"no code cache at .*train; write one with `python -m visgen\.encode"):
        read(tmp_path)
    write(tmp_path)
    change(tmp_path, version=7)
    with pytest.raises(UserError, match="version 7, this visgen reads 1"):
        read(tmp_path)
    (tmp_path / "train" / "index.json").write_text("{")
    with pytest.raises(UserError, match=r"index\.json is damaged"):
        read(tmp_path)
    (tmp_path / "train" / "index.json").write_text('{"version": 1}')
    with pytest.raises(UserError, match=r"index\.json is damaged"):
        read(tmp_path)


def test_incomplete_says_how_to_go_on(tmp_path):
    write(tmp_path)
    change(tmp_path, complete=False, shards=[])
    (tmp_path / "train" / "done_00001.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"incomplete, 1 of 3 shards; run `python -m visgen\.encode .*goes on from there"
    ):
        read(tmp_path)


@pytest.mark.parametrize("part", ["codes", "labels"])
def test_truncated_missing_and_changed_shards(tmp_path, part):
    write(tmp_path)
    path = tmp_path / "train" / f"{part}_00001.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(UserError, match=f"{part}_00001.npy is truncated or damaged"):
        read(tmp_path)
    path.write_bytes(whole[:40])
    with pytest.raises(UserError, match="is truncated or damaged"):
        read(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=f"{part}_00001.npy is missing"):
        read(tmp_path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match="checksum"):
        read(tmp_path).verify()


def test_shards_of_another_shape(tmp_path):
    write(tmp_path)
    change(tmp_path, grid=[1, 2, 3])
    with pytest.raises(UserError, match=r"holds uint32 \(4, 2, 4\), its index says uint32 \(4, 2, 6\)"):
        read(tmp_path)


def test_codes_have_no_pixels(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match="encode its source instead"):
        read(tmp_path).views([0], "center")
