"""`codes`: the cache's files read back, the drawn view, and every refusal."""

import hashlib
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from visgen.config import UserError, build, plugin_config
from visgen.data import Samples, codes


def write(root, split="train", images=10, vocab=70000, bad=None, **settings):
    """A cache of random codes in shards of 4 images, and those codes."""
    source = build(plugin_config("visgen.data", "synthetic", n=images, n_held_out=images, image_size=8), split)
    settings = {"views": "flip", "ranges": [], "grid": [1, 2, 2], "shard_images": 4, "tokenizer": "abc", **settings}
    index = codes.make_index(source, vocab=vocab, **settings)
    folder = root / split
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, vocab or 9, (images, index.view_count, 4))
    if index.channels:
        ids = ids[..., None].astype(np.float16)
        ids[5, 0, 1] = bad
    for number in range(index.shard_count):
        part = list(index.shard(number))
        codes.write_shard(folder, index, number, ids[part], source.labels[part].numpy())
        index.shards.append(codes.read_record(folder, index, number))
    index.complete = True
    codes.write_index(folder, index)
    for path in folder.glob("done*"):
        path.unlink()
    return ids


def read(root, split="train"):
    return build(plugin_config("visgen.data", "codes", root=root), split)


def change(root, at="train", **values):
    """Edits the index, which is then one without a checksum, as older versions wrote."""
    path = root / at / "index.json"
    kept = {k: v for k, v in json.loads(path.read_text()).items() if k not in ("format", "checksum")}
    path.write_text(json.dumps({**kept, **values}))


def older(root):
    """Makes of a cache what an older version wrote: arrays without a checksum behind them, SHA-256 in the index."""
    index = json.loads((root / "train" / "index.json").read_text())
    for number, record in enumerate(index["shards"]):
        for part in record:
            path = codes.shard_path(root / "train", number, part)
            np.save(path, np.load(path))
            record[part] = hashlib.sha256(path.read_bytes()).hexdigest()
    change(root, shards=index["shards"])


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
    change(tmp_path, "held_out", source={"kind": "folder", "root": str(tmp_path / "gone")})
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
    with pytest.raises(UserError, match=f"{part}_00001.npy .*is truncated or damaged"):
        read(tmp_path)
    path.write_bytes(whole[:40])
    with pytest.raises(UserError, match="is truncated or damaged"):
        read(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match=f"{part}_00001.npy is missing"):
        read(tmp_path)
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=f"{part}_00001.npy.*damaged"):
        read(tmp_path)
    last = len(whole) - (20 if part == "codes" else 24)  # the lowest byte of the last value
    path.write_bytes(whole[:last] + bytes([whole[last] ^ 1]) + whole[last + 1 :])
    with pytest.raises(UserError, match=f"{part}_00001.npy.*checksum"):
        read(tmp_path)


def test_caches_of_older_versions_are_read_and_compared_with_their_sha256(tmp_path):
    ids = write(tmp_path)
    older(tmp_path)
    assert read(tmp_path).tokens(9).tolist() == ids[9].tolist()
    path = codes.shard_path(tmp_path / "train", 2, "codes")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"codes_00002\.npy is damaged \(checksum"):
        read(tmp_path)


def test_a_shard_of_another_cache_is_refused(tmp_path):
    write(tmp_path / "one")
    write(tmp_path / "other", vocab=69999)
    shutil.copy(*(codes.shard_path(tmp_path / name / "train", 1, "codes") for name in ("other", "one")))
    with pytest.raises(UserError, match=r"codes_00001\.npy is damaged \(checksum"):
        read(tmp_path / "one")


def test_codes_and_labels_out_of_range_are_refused(tmp_path):
    write(tmp_path)
    change(tmp_path, vocab=69000)
    with pytest.raises(UserError, match=r"holds code 69\d\d\d, the vocabulary has 69000"):
        read(tmp_path)
    change(tmp_path, vocab=70000, classes=["disc", "square"])
    with pytest.raises(UserError, match=r"labels_0000\d\.npy holds label 3, the cache has 2 classes"):
        read(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_vectors_that_are_not_finite_are_refused(tmp_path, value):
    write(tmp_path, vocab=0, channels=1, bad=value)
    with pytest.raises(UserError, match=r"codes_00001\.npy holds a value that is not finite"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("images", x) for x in (-1, 0, "10", 10.5, None, True)),
        *(("grid", x) for x in ([], [1, 2], [1, 2, 0], [1, 2, "x"], 4)),
        *(("image_size", x) for x in ([8], [-8, 8])),
        *(("classes", x) for x in ([], [1], "ab", {})),
        *(("shards", x) for x in ([], {}, [1, 2, 3], [{"codes": 1, "labels": 2}] * 3)),
        *(("vocab", x) for x in (0, [], "x")),
        *(("views", x) for x in ("all", [], None)),
        *(("shard_images", x) for x in (0, -1, "x")),
        *(("source", x) for x in ([], "x")),
        *(("split", x) for x in ("x", None)),
        ("news", 3),
    ],
)
def test_an_index_that_was_edited_is_one_line(tmp_path, name, value):
    write(tmp_path)
    path = tmp_path / "train" / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "images": 11}))
    with pytest.raises(UserError, match=r"index\.json is damaged \(its checksum differs"):
        read(tmp_path)
    change(tmp_path, **{"images": 10, name: value})
    with pytest.raises(UserError, match=r"index\.json is damaged \(.*delete") as found:
        read(tmp_path)
    assert "\n" not in str(found.value)


def test_one_process_of_a_host_compares(tmp_path, monkeypatch):
    write(tmp_path)
    path = codes.shard_path(tmp_path / "train", 1, "codes")
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert len(read(tmp_path)) == 10
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(UserError, match="checksum"):
        read(tmp_path)


def test_shards_of_another_shape(tmp_path):
    write(tmp_path)
    change(tmp_path, grid=[1, 2, 3])
    with pytest.raises(UserError, match=r"holds uint32 \(4, 2, 4\), its index says uint32 \(4, 2, 6\)"):
        read(tmp_path)


def test_codes_have_no_pixels(tmp_path):
    write(tmp_path)
    with pytest.raises(UserError, match="encode its source instead"):
        read(tmp_path).views([0], "center")
