"""Files are published whole, under a temporary name that is theirs alone."""

from __future__ import annotations

import os
import pwd
import zlib
from pathlib import Path

import pytest

from visgen import files
from visgen.checks import UserError
from visgen.data import fashion_mnist


def test_a_failed_write_leaves_the_older_file_and_no_rest(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    files.write_text(path, "old")
    with pytest.raises(RuntimeError, match="stop"), files.publishing(path) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError("stop")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_have_different_temporary_names(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with files.publishing(path) as first, files.publishing(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("mask", [0o077, 0o002, 0o022])
def test_the_umask_decides_the_permissions(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with files.publishing(tmp_path / "a") as unfinished:
            unfinished.touch(0o600)  # as safetensors does
    finally:
        os.umask(before)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o666 & ~mask


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(UserError, match=r"a\.json.*No space left"), files.publishing(tmp_path / "a.json") as unfinished:
        with open("/dev/full", "w") as full:
            full.write("x" * 100_000)
        unfinished.touch()


def test_the_checksum_is_of_all_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * 5
    files.write_bytes(tmp_path / "a", data)
    monkeypatch.setattr(files, "CHUNK", 7)
    assert files.crc32(tmp_path / "a") == zlib.crc32(data)


def test_a_user_without_a_home_keeps_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(number: int) -> None:
        raise KeyError(number)

    monkeypatch.setenv("HOME", "/home/me")
    assert files.from_home("~/a") == Path("/home/me/a") and files.from_home(Path("b")) == Path("b")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert files.from_home("~/a") == Path("~/a")
    with pytest.raises(UserError, match="Fashion-MNIST: no absent"):
        fashion_mnist._find(fashion_mnist.Config(), "absent")
