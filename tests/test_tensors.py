"""Files of tensors carry their own checksum; what is read is whole, as it was written, and finite."""

from __future__ import annotations

import errno
import json
import random
import zlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from visgen import files, tensors
from visgen.checks import UserError

SOME = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b": torch.tensor([1, -2]),
    "half": torch.ones(5, dtype=torch.bfloat16),
    "none": torch.zeros(0, 3),
    "n": torch.tensor(7),
}


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors.write(path, SOME, {"é": "ü\n", "b": "2", "a": '"crc32":"0123456789abcdef"'})
    found, facts = tensors.read(path, "again")
    assert found.keys() == SOME.keys() == load_file(path).keys()
    assert all(torch.equal(found[k], SOME[k]) and found[k].dtype == SOME[k].dtype for k in SOME)
    assert facts["é"] == "ü\n" and facts["format"] == files.FORMAT and len(facts["crc32"]) == 16
    header = tensors.read_header(path, "again")
    assert header.shapes["a.weight"] == (3, 4) and header.metadata == facts
    assert facts["crc32"][8:] == f"{zlib.crc32(path.read_bytes()[header.start :]):08x}", (
        "the second half is of the data"
    )


def test_no_flipped_bit_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors.write(path, SOME, {"step": "8"})
    whole = path.read_bytes()
    for bit in random.Random(0).sample(range(8 * len(whole)), 400):
        path.write_bytes(whole)
        flip(path, bit)
        with pytest.raises(UserError, match=r"a\.safetensors.*; again$"):
            tensors.read(path, "again")


def test_flips_of_the_entries_that_protect_are_seen(tmp_path: Path) -> None:
    """A file cannot become one of an older version, which is not checked, by losing `crc32` or `format`."""
    path = tmp_path / "a.safetensors"
    tensors.write(path, SOME)
    whole = path.read_bytes()
    for word in (b"crc32", b"format", b"visgen/2", b"__metadata__", b"data_offsets"):
        start = 8 * whole.index(word)
        for bit in range(start, start + 8 * len(word)):
            path.write_bytes(whole)
            flip(path, bit)
            with pytest.raises(UserError):
                tensors.read_header(path, "again")


def test_files_of_others_and_of_older_versions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for facts in (None, {"format": "pt"}, {"format": "visgen/1", "step": "3"}):
        save_file(SOME, path, facts)
        found, said = tensors.read(path, "again")
        assert torch.equal(found["b"], SOME["b"]) and said == (facts or {})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64])
def test_one_value_that_is_not_finite_is_named(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    path = tmp_path / "a.safetensors"
    bad = torch.zeros(3, 50, dtype=dtype)
    bad[1, 7] = value
    tensors.write(path, {**SOME, "layer.bad": bad})
    with pytest.raises(UserError, match=r"a\.safetensors: tensor layer\.bad holds a value that is not finite; again"):
        tensors.read(path, "again")
    assert tensors.read(path, "again", finite=False)[0]["layer.bad"].shape == (3, 50)
    assert tensors.is_finite(torch.full((3,), torch.finfo(torch.float16).max, dtype=torch.float16))


def test_pickled_state_that_is_not_finite_is_named(tmp_path: Path) -> None:
    tensors.write_pickle(tmp_path / "a.bin", {"state": {0: {"exp_avg": torch.tensor([1.0, float("nan")])}}, "lr": [1]})
    with pytest.raises(UserError, match=r"tensor state\.0\.exp_avg holds"):
        tensors.read_pickle(tmp_path / "a.bin", "again")


@pytest.mark.parametrize(
    "text", [b"", b"\xff" * 8, b"{" * 20, b"[" * 100_000, b'{"a": 1}', b'{"a": {"shape": [1e999]}}', b"3"]
)
def test_headers_that_are_none_are_one_line(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(UserError, match="is truncated or not a safetensors file") as found:
        tensors.read_header(path, "again")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("write", [tensors.write, tensors.write_pickle])
def test_a_full_disk_leaves_the_older_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write) -> None:
    path = tmp_path / "a.safetensors"
    path.write_text("older")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(
        tensors if write is tensors.write else torch, "save_file" if write is tensors.write else "save", full
    )
    with pytest.raises(UserError, match=r"a\.safetensors cannot be written .*No space left"):
        write(path, SOME)
    assert path.read_text() == "older" and list(tmp_path.iterdir()) == [path]


# ------------------------------------------------------------------------------------------------------- JSON


def test_json_is_sealed(tmp_path: Path) -> None:
    path, values = tmp_path / "a.json", {"step": 8, "best": {"value": 0.1}, "name": "é", "none": None}
    files.write_json(path, values)
    assert files.read_json(path, "again") == values
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        path.write_bytes(whole)
        flip(path, bit)
        try:
            assert files.read_json(path, "again") == values, "a flip that changes white space alone"
        except UserError as error:
            assert str(error).startswith(f"{path} is damaged (") and "\n" not in str(error)


def test_json_that_was_edited_is_refused_and_old_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_json(path, {"step": 8})
    path.write_text(path.read_text().replace("8", "9"))
    with pytest.raises(UserError, match="its checksum differs"):
        files.read_json(path, "again")
    path.write_text('{"step": 9}')
    assert files.read_json(path, "again") == {"step": 9}


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "[1]", "3", "{", "", "\x00", json.dumps({"a": "x" * 999})]
)
def test_json_that_is_none_of_ours_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"a\.json is damaged \(.*; again") as found:
        files.read_json(path, "again", limit=900_000 if len(text) > 2000 else 900)
    assert "\n" not in str(found.value)
