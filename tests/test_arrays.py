"""NumPy files carry their own checksum behind the array; caches are compared with it when they are opened."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from visgen import arrays
from visgen.checks import UserError
from visgen.data import captions, pairs

SOME = [np.arange(12, dtype=np.uint16).reshape(3, 4), np.zeros((0, 16), np.uint8), np.float16([[1.5, -2]]), np.array(3)]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def opened(path: Path) -> np.ndarray:
    array = arrays.read(path, "absent", "again", mapped=True)
    arrays.verify(path, array, "again")
    return array


@pytest.mark.parametrize("array", SOME, ids=str)
def test_what_is_written_is_read_by_us_and_by_numpy(tmp_path: Path, array: np.ndarray) -> None:
    path = tmp_path / "a.npy"
    crc = arrays.write(path, array)
    for found in (opened(path), arrays.read(path, "", ""), np.load(path), np.load(path, mmap_mode="r")):
        assert found.dtype == array.dtype and np.array_equal(found, array)
    arrays.verify(path, opened(path), "again", crc)
    with pytest.raises(UserError, match="checksum"):
        arrays.verify(path, opened(path), "again", "00000000")


def test_no_flipped_bit_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    arrays.write(path, SOME[0])
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 400):
        path.write_bytes(whole)
        flip(path, bit)
        with pytest.raises(UserError, match=r"a\.npy .*; again"):
            opened(path)


def test_files_without_a_checksum_are_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", SOME[0])
    assert np.array_equal(opened(tmp_path / "a.npy"), SOME[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_one_value_that_is_not_finite_is_found(dtype: type, value: float) -> None:
    array = np.linspace(-60000, 60000, 99, dtype=dtype).reshape(3, 33)
    assert arrays.is_finite(array) and arrays.is_finite(array[:0])
    array[1, 5] = value
    assert not arrays.is_finite(array)


def features(folder: Path) -> captions.Features:
    captions.write_index(folder, captions.Index(encoder="t5", clean=False, tokens=5, channels=2))
    captions.write_shard(folder, 0, ["a", "b"], [np.full((n, 2), n, np.float16) for n in (3, 5)])
    return captions.Features(folder)


@pytest.mark.parametrize("part", ["features", "lengths", "keys"])
def test_features_of_captions_are_compared(tmp_path: Path, part: str) -> None:
    assert len(features(tmp_path)) == 2
    path = captions.shard_path(tmp_path, 0, part)
    flip(path, 8 * (path.stat().st_size - 17))
    with pytest.raises(UserError, match=rf"{part}_00000\.npy"):
        captions.Features(tmp_path)


def test_features_of_older_versions_are_read_and_must_make_sense(tmp_path: Path) -> None:
    features(tmp_path)
    for part in ("features", "lengths", "keys"):
        path = captions.shard_path(tmp_path, 0, part)
        np.save(path, np.load(path))
    assert len(captions.Features(tmp_path)) == 2
    for part, array, said in (
        ("lengths", np.array([3, 6]), "holds lengths 3 to 6, not 1 to 5"),
        ("lengths", np.array([0, 5]), "holds lengths 0 to 5"),
        ("lengths", np.array([-3, 5]), "holds lengths -3 to 5"),
        ("lengths", np.array([3.0, 5.0]), "holds float64"),
        ("lengths", np.array([3]), r"features_00000\.npy holds"),
        ("keys", np.zeros((2, 15), np.uint8), r"keys_00000\.npy holds uint8"),
        ("keys", np.zeros((1, 16), np.uint8), "has 1 keys and 2 lengths"),
        ("features", np.full((8, 2), np.inf, np.float16), r"features_00000\.npy holds a value that is not finite"),
    ):
        path = captions.shard_path(tmp_path, 0, part)
        whole = path.read_bytes()
        np.save(path, array)
        with pytest.raises(UserError, match=said):
            captions.Features(tmp_path)
        path.write_bytes(whole)


def test_pairs_are_compared(tmp_path: Path) -> None:
    told = {"guidance": {}, "warp": {}, "map_steps": 30, "precision": "fp32", "teacher": "t", "tokenizer": "k"}
    shape = {"classes": ["a", "b"], "image_size": [16, 16], "grid": [1, 2, 2], "vocab": 300}
    index = pairs.Index(split="train", pairs=4, shard_pairs=3, first_seed=5, **shape, **told)
    pairs.write_index(tmp_path / "train", index)
    for number in range(2):
        pairs.write_shard(tmp_path / "train", index, number, np.full((len(index.shard(number)), 4), 7))
    assert pairs.Pairs(pairs.Config(tmp_path), "train").get(3)["tokens"].tolist() == [7] * 4
    path = pairs.shard_path(tmp_path / "train", 1)
    flip(path, 8 * (path.stat().st_size - 18))
    with pytest.raises(UserError, match=r"tokens_00001\.npy is damaged \(checksum.*delete it"):
        pairs.Pairs(pairs.Config(tmp_path), "train")
