"""Finding and decoding picture files: everything that is wrong with a file is one exception with a short reason."""

from __future__ import annotations

import os
import socket
import struct
import warnings
import zlib
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile, ImageOps

from visgen import image_files
from visgen.image_files import Unreadable, find_files, open_image, read_image, require_resizable

DATA = Path(__file__).parent / "data"


def photo(width: int = 24, height: int = 16) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


# ------------------------------------------------------------------------------------------------------ finding


def test_one_rule_for_what_a_folder_holds(tmp_path: Path) -> None:
    root = tmp_path / "root"
    kept = ["a/0.PNG", "a/b.jpg", "a-/x.webp", "deep/er/y.tif", "z.avif"]
    junk = [
        ".x.png",
        ".thumbs/0.png",
        "a/__MACOSX/0.png",
        "@eaDir/0.jpg",
        "$RECYCLE.BIN/0.png",
        "notes.txt",
        "Thumbs.db",
    ]
    for name in kept + junk:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "q.png").touch()
    (root / "linked").symlink_to(tmp_path / "far")
    found = find_files(root)
    assert [os.fsdecode(p) for p in found.paths] == sorted([*kept, "linked/q.png"], key=os.fsencode)
    assert not found.left_out and found.told == ""
    assert find_files(root, {".txt"}).paths == [b"notes.txt"]


def test_what_is_no_regular_file_is_counted_and_never_opened(tmp_path: Path) -> None:
    photo().save(tmp_path / "x.png")
    os.mkfifo(tmp_path / "pipe.png")
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(tmp_path)  # the path of a socket has at most 108 bytes
        server.bind("s.jpg")
        os.chdir(here)
        (tmp_path / "null.png").symlink_to("/dev/null")
        (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
        (tmp_path / "round.png").symlink_to("round.png")
        (tmp_path / "up").symlink_to(tmp_path)
        found = find_files(tmp_path)
    assert found.paths == [b"x.png"]
    assert found.left_out == {
        "links that lead nowhere": 2,
        "pipes or devices, no regular files": 3,
        "links to a folder that they lie in": 1,
    }
    assert "1 left out, links to a folder that they lie in (up)" in found.told
    for name in ("pipe.png", "null.png"):
        with pytest.raises(Unreadable, match="no regular file"):
            open_image(tmp_path / name)


# ----------------------------------------------------------------------------------------------------- decoding


def test_a_picture_with_odd_exif_data_is_turned_as_they_say() -> None:
    with Image.open(DATA / "odd_exif.jpg") as stored:
        stored.load()
        expected = np.rot90(np.asarray(stored), -1)
    assert np.array_equal(np.asarray(read_image(DATA / "odd_exif.jpg")), expected)


@pytest.mark.parametrize("orientation", range(10))
def test_every_orientation_is_that_of_pillow(orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    for suffix in ("png", "tif", "webp"):
        photo().save(tmp_path / f"x.{suffix}", exif=exif, **({"lossless": True} if suffix == "webp" else {}))
        with Image.open(tmp_path / f"x.{suffix}") as stored:
            expected = ImageOps.exif_transpose(stored)
        assert np.array_equal(np.asarray(open_image(tmp_path / f"x.{suffix}")), np.asarray(expected))


@pytest.mark.parametrize("exif", [b"Exif\0\0MM\0*\0\0\0\x08\0\x01", b"Exif\0\0rubbish", b"Exif\0\0"])
def test_a_picture_with_damaged_exif_data_is_used(exif: bytes, tmp_path: Path) -> None:
    photo().save(tmp_path / "x.png", exif=exif)
    assert np.array_equal(np.asarray(read_image(tmp_path / "x.png")), np.asarray(photo()))


def test_exif_data_that_cannot_be_read_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    photo().save(tmp_path / "x.png")
    monkeypatch.setattr(Image.Image, "getexif", lambda self: {}["orientation"])
    for _ in range(2):
        assert np.array_equal(np.asarray(read_image(tmp_path / "x.png")), np.asarray(photo()))
    assert [r.getMessage().partition("x.png: ")[2] for r in caplog.records] == [
        "its EXIF data cannot be read (KeyError: 'orientation'); it is used as it is stored"
    ]


def png(*chunks: tuple[bytes, bytes]) -> bytes:
    out = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        out += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return out


def header(width: int, height: int) -> tuple[bytes, bytes]:
    return b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)


def bomb_of_text() -> bytes:
    text = b"key\0\0" + zlib.compress(bytes(1 << 24), 9)
    return png(header(1, 1), (b"zTXt", text), (b"IDAT", zlib.compress(b"\0\0")), (b"IEND", b""))


def half(suffix: str) -> bytes:
    buffer = BytesIO()
    photo().save(buffer, suffix)
    return buffer.getvalue()[: len(buffer.getvalue()) // 2]


BAD = {
    "empty": b"",
    "text": b"no picture",
    "avif": (DATA / "damaged.avif").read_bytes(),
    "bomb": png(header(30_000, 30_000), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b"")),
    "text bomb": bomb_of_text(),
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
    **{f"half a {suffix}": half(suffix) for suffix in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP")},
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_short_line(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "bad\x1b[2J\n.png"
    path.write_bytes(BAD[kind])
    for file in (path, BytesIO(BAD[kind])):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(Unreadable) as caught:
                read_image(file, name=path)
        said = str(caught.value)
        assert said.isprintable() and "x1b[2J" in said and len(caught.value.reason) <= 200
        assert said.endswith("convert it to PNG or JPEG, or delete it")


def test_a_large_picture_is_read_without_a_warning_of_pillows(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    Image.new("1", (10_000, 9_000)).save(tmp_path / "x.png")
    assert open_image(tmp_path / "x.png").size == (10_000, 9_000)
    assert not recwarn


ERRORS = [TypeError, AttributeError, RuntimeError, MemoryError, KeyError, zlib.error, struct.error, OverflowError]
ERRORS += [
    ValueError,
    SyntaxError,
    RecursionError,
    EOFError,
    IndexError,
    AssertionError,
    SystemError,
    ZeroDivisionError,
]


@pytest.mark.parametrize("error", ERRORS)
def test_whatever_a_plugin_raises_is_unreadable(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: object) -> None:
        raise error("x" * 10_000)

    photo().save(tmp_path / "x.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(Unreadable) as caught:
        open_image(tmp_path / "x.png")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_none_of_a_pictures_errors(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: object) -> None:
        raise error

    photo().save(tmp_path / "x.png")
    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(error):
        open_image(tmp_path / "x.png")


@pytest.mark.parametrize(("size", "shorter", "fits"), [((1, 60_000), 16, True), ((1, 60_000), 64, False)])
def test_a_picture_that_would_be_resized_to_gigabytes_is_refused(
    size: tuple[int, int], shorter: int, fits: bool
) -> None:
    call: Callable[[], None] = lambda: require_resizable(size, shorter)  # noqa: E731
    if fits:
        call()
    else:
        with pytest.raises(ValueError, match="1 x 60000 pixels, too elongated"):
            call()
    assert image_files.LARGEST == 89_478_485
