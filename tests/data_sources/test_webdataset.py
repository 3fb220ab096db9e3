"""`webdataset`: the tar index against the webdataset package, labels, patterns, refusals."""

import io
import json
import os
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from visgen.config import UserError, build, plugin_config
from visgen.data import webdataset
from visgen.image_files import warn_once


def picture(seed, fmt="PNG"):
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (18, 20, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, fmt)
    return buffer.getvalue()


def write_tar(path, members):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def source(shards, split="train", **options):
    options = {"image_size": 16, "held_out_fraction": 0, **options}
    return build(plugin_config("visgen.data", "webdataset", shards=str(shards), **options), split)


@pytest.fixture
def shards(tmp_path):
    """Two shards: nested and long keys, upper-case suffixes, other members, a meta file."""
    long = "sub/" + "k" * 120
    write_tar(
        tmp_path / "t-00.tar",
        [
            ("__meta__/info.json", b"{}"),
            ("a/000.PNG", picture(0)),
            ("a/000.cls", b"1"),
            ("a/001.json", json.dumps({"label": 4, "caption": "x"}).encode()),
            ("a/001.jpg", picture(1, "JPEG")),
            (f"{long}.cls", b" 0\n"),
            (f"{long}.seg.png", picture(9)),
            (f"{long}.webp", picture(2, "WEBP")),
        ],
    )
    write_tar(tmp_path / "t-01.tar", [("b.jpg", picture(3, "JPEG")), ("b.cls", b"2")])
    return tmp_path


def test_index_agrees_with_the_webdataset_package(shards):
    import webdataset as wds

    data = source(shards / "t-{00..01}.tar")
    theirs = list(wds.WebDataset([str(shards / f"t-0{i}.tar") for i in range(2)], shardshuffle=False))
    assert len(data) == len(theirs) == 4
    for i, sample in enumerate(theirs):
        key, _, suffix = os.fsdecode(data._keys[i].item()).rpartition(".")
        assert key == sample["__key__"]
        assert data._file(i).getvalue() == sample[suffix]
    assert data.labels.tolist() == [1, 4, 0, 2]
    assert data.classes == ["0", "1", "2", "3", "4"]


def test_samples(shards):
    data = source(shards / "*.tar")
    sample = data.get(0)
    assert (sample["pixels"].shape, sample["label"]) == ((1, 3, 16, 16), 1)
    assert data.views([0, 3], "ten_crop")["pixels"].shape == (2, 10, 1, 3, 16, 16)
    assert data._name(2).endswith("k.webp")


def test_held_out_shards_or_share(shards):
    train = source(shards / "t-00.tar", held_out_shards=str(shards / "t-01.tar"))
    held = source(shards / "t-00.tar", "held_out", held_out_shards=str(shards / "t-01.tar"))
    assert (len(train), len(held), held.labels.tolist()) == (3, 1, [2])
    assert train.classes == held.classes
    parts = [source(shards / "*.tar", split, held_out_fraction=0.5) for split in ("train", "held_out")]
    keys = [set(part._keys.tolist()) for part in parts]
    assert len(keys[0] | keys[1]) == len(keys[0]) + len(keys[1]) == 4


def test_labels_by_name_and_none(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("zebra\ndog\n")
    tar = write_tar(
        tmp_path / "n.tar", [("0.png", picture(0)), ("0.cls", b"dog"), ("1.png", picture(1)), ("1.cls", b"0")]
    )
    data = source(tar, class_names=names)
    assert (data.classes, data.labels.tolist()) == (["zebra", "dog"], [1, 0])
    with pytest.raises(UserError, match=r"sample '0' has label 'dog', .* data\.class_names"):
        source(tar)
    with pytest.raises(UserError, match="nowhere does not exist"):
        source(tar, class_names=tmp_path / "nowhere")
    names.write_text("cat\n")
    with pytest.raises(UserError, match="'dog'"):
        source(tar, class_names=names)
    bare = write_tar(tmp_path / "bare.tar", [("0.png", picture(0))])
    assert source(bare).labels.tolist() == [0]


def test_names_agree_in_any_unicode_form(tmp_path):
    names = tmp_path / "names.txt"
    names.write_text("a\ncafe\u0301\n", encoding="utf-8")
    tar = write_tar(tmp_path / "n.tar", [("0.png", picture(0)), ("0.cls", "caf\u00e9".encode())])
    assert source(tar, class_names=names).labels.tolist() == [1]
    names.write_text("caf\u00e9\ncafe\u0301\n", encoding="utf-8")
    with pytest.raises(UserError, match="twice"):
        source(tar, class_names=names)
    names.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read as text"):
        source(tar, class_names=names)


@pytest.mark.parametrize(
    ("members", "text"),
    [
        ([("0.cls", b"1")], "sample '0' has no image, only cls"),
        ([("0.png", b"x"), ("0.json", b"{")], "label of sample '0' cannot be read"),
        ([("0.png", b"x"), ("0.json", b'{"label": [1]}')], r"is \[1\]; allowed"),
        ([("0.png", b"x"), ("0.cls", b"-1")], "label -1; allowed: numbers from 0"),
        ([("0.png", b"x"), ("0.cls", b"1"), ("1.png", b"x")], "sample '1' has label None"),
        ([("0.png", b"x"), ("0.PNG", b"x")], "two members with one suffix"),
        ([("readme", b"x")], "holds no image"),
    ],
)
def test_bad_samples(tmp_path, members, text):
    with pytest.raises(UserError, match=text):
        source(write_tar(tmp_path / "x.tar", members))


def test_bad_shards(shards, tmp_path):
    for pattern in ("https://host/x-{0..9}.tar", "pipe:cat x.tar"):
        with pytest.raises(UserError, match="is not a local path; download"):
            source(pattern)
    with pytest.raises(UserError, match=r"no file .*t-02\.tar"):
        source(shards / "t-{00..02}.tar")
    with pytest.raises(UserError, match="no file"):
        source(shards / "u*.tar")
    whole = (shards / "t-00.tar").read_bytes()
    (shards / "cut.tar").write_bytes(whole[:3000])
    with pytest.raises(UserError, match=r"cut\.tar is not whole: after 2 members"):
        source(shards / "cut.tar")
    with tarfile.open(shards / "z.tar", "w:gz"):
        pass
    with pytest.raises(UserError, match="uncompressed"):
        source(shards / "z.tar")


def test_damaged_image_is_named(shards):
    write_tar(shards / "d.tar", [("0.png", b"damaged"), ("1.png", picture(1))])
    with pytest.raises(UserError, match=r"d\.tar:0\.png cannot be read"):
        source(shards / "d.tar").get(0)
    skipping = source(shards / "d.tar", on_error="skip")
    assert torch.equal(skipping.get(0)["pixels"], skipping.get(1)["pixels"])
    assert skipping.skipped == 1


def test_index_beside_the_tar(shards, monkeypatch):
    plain = source(shards / "*.tar")
    assert not list(shards.glob("*.json"))
    source(shards / "*.tar", index_cache=True)
    assert len(list(shards.glob("*.tar.index.json"))) == 2
    scans = []
    scan = webdataset.scan_tar
    monkeypatch.setattr(webdataset, "scan_tar", lambda path, label: scans.append(path) or scan(path, label))
    cached = source(shards / "*.tar", index_cache=True)
    assert not scans
    assert np.array_equal(cached._where, plain._where)
    assert torch.equal(cached.labels, plain.labels)
    write_tar(shards / "t-01.tar", [("b.png", picture(5)), ("b.cls", b"3")])
    assert source(shards / "*.tar", index_cache=True).labels.tolist() == [1, 4, 0, 3]
    assert [p.name for p in scans] == ["t-01.tar"]  # the stale one only


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("{x,y}/{1..2}", ["x/1", "x/2", "y/1", "y/2"]),
        ("plain", ["plain"]),
    ],
)
def test_braces(pattern, expected):
    from braceexpand import braceexpand  # comes with webdataset

    assert webdataset._braces(pattern) == expected == list(braceexpand(pattern))


def small_tar(path, count, first=0):
    return write_tar(
        path,
        [
            m
            for i in range(count)
            for m in ((f"{i:02d}.png", picture(i)), (f"{i:02d}.cls", str(first + i % 2).encode()))
        ],
    )


def test_a_tar_that_is_cut_anywhere_is_refused_or_counted(tmp_path, caplog):
    whole = small_tar(tmp_path / "w.tar", 12).read_bytes()
    data = source(tmp_path / "w.tar")
    end = max(int(offset + size) for _, offset, size in data._where)
    end = -(-end // 512) * 512 + 1024  # and the last label, a block with its header
    assert any(whole[end - 1 - i] for i in range(1024)) and not any(whole[end : end + 1024])
    cut, kept = tmp_path / "c.tar", set()
    for at in [*range(0, end + 1024, 512), *range(100, end + 1000, 5000)]:
        cut.write_bytes(whole[:at])
        with pytest.raises(UserError, match=r"c\.tar"):
            source(cut)
        caplog.clear()
        warn_once.cache_clear()
        try:
            some = source(cut, on_error="skip")
        except UserError:  # nothing is left
            continue
        assert f"only the {len(some)} samples before that are used" in caplog.text
        assert len(some) < 12 and torch.equal(some.get(len(some) - 1)["pixels"], data.get(len(some) - 1)["pixels"])
        kept.add(len(some))
    assert kept == set(range(1, 12))
    cut.write_bytes(whole[: end + 1024])  # no padding beyond the two blocks
    assert len(source(cut)) == 12


def test_data_behind_the_end_of_a_tar_is_not_lost_silently(tmp_path, caplog):
    parts = [small_tar(tmp_path / f"{i}.tar", 3).read_bytes() for i in range(2)]
    (tmp_path / "both.tar").write_bytes(b"".join(parts))
    with pytest.raises(UserError, match=r"both\.tar is not whole: after the end of its 6 members stand other data"):
        source(tmp_path / "both.tar")
    assert len(source(tmp_path / "both.tar", on_error="skip")) == 3
    (tmp_path / "padded.tar").write_bytes(parts[0] + bytes(100_000))
    assert len(source(tmp_path / "padded.tar")) == 3


def test_a_damaged_header_within_a_tar_is_no_end(tmp_path):
    path = small_tar(tmp_path / "x.tar", 4)
    data = bytearray(path.read_bytes())
    at = source(path)._where[2, 1] - 512
    data[at : at + 8] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(UserError, match="after 4 members stands no header"):
        source(path)


def test_a_kept_index_hides_no_truncation(tmp_path):
    path = small_tar(tmp_path / "x.tar", 4)
    source(path, index_cache=True)
    stat, whole = path.stat(), path.read_bytes()
    path.write_bytes(whole[: source(path)._where[3, 1] - 512])
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(UserError, match="without the zeros that end a tar"):
        source(path, index_cache=True)
    assert len(source(path, index_cache=True, on_error="skip")) == 2
    with pytest.raises(UserError, match="without the zeros"):  # what was skipped is not kept as whole
        source(path, index_cache=True)
    (tmp_path / "x.tar.index.json").write_text('{"stamp": ')
    path.write_bytes(whole)
    assert len(source(path, index_cache=True)) == 4


def test_a_class_without_samples_is_told(tmp_path, caplog):
    source(small_tar(tmp_path / "x.tar", 4, first=1))
    assert "class 0 has no sample, yet counts" in caplog.text
    caplog.clear()
    source(small_tar(tmp_path / "y.tar", 4))
    assert not caplog.records


@pytest.mark.parametrize(
    ("member", "text"),
    [
        (("0.cls", b"300000000"), "has label 300000000; allowed: numbers from 0 to 999999"),
        (("0.cls", b"9" * 5000), "label of sample '0' cannot be read"),
        (("0.json", b'{"label": ' + b"[" * 100_000), "label of sample '0' cannot be read"),
        (("0.cls", b"\x1b[2J\x1b]0;x\x07"), r"has label '.x1b\[2J"),
    ],
)
def test_absurd_labels_are_one_short_line(tmp_path, member, text):
    with pytest.raises(UserError, match=text) as caught:
        source(write_tar(tmp_path / "x.tar", [("0.png", picture(0)), member]))
    assert len(str(caught.value)) < 500 and str(caught.value).isprintable()


def test_a_pipe_is_no_shard(tmp_path):
    os.mkfifo(tmp_path / "p.tar")
    with pytest.raises(UserError, match="no file"):
        source(tmp_path / "*.tar")
    with pytest.raises(UserError, match="names 1000000000 files"):
        source(tmp_path / "{0..999999999}.tar")
