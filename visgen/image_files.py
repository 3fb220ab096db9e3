"""Find picture files and decode them: the one place for training, for scoring and for what a user gives.

`find_files` lists a folder. `open_image` decodes one file. Whatever is wrong with a file, and whatever Pillow or one of
its plugins raises for it, becomes `Unreadable` with a short reason.
"""

from __future__ import annotations

import logging
import os
import stat
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import ExifTags, Image, ImageFile, UnidentifiedImageError

from visgen.checks import UserError, cut, printable

log = logging.getLogger(__name__)

SUFFIXES = frozenset(
    {".jpg", ".jpeg", ".jfif", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".avif"}
)
JUNK = frozenset(  # folders that computers make by themselves, in lower case; hidden ones are left out by their dot
    {
        *("__macosx", "@eadir", "@recycle", "@recently-snapshot", "#recycle", "#snapshot", "$recycle.bin"),
        *("lost+found", "system volume information", "network trash folder", "temporary items"),
    }
)
LARGEST = Image.MAX_IMAGE_PIXELS or 1 << 26  # pixels that a resized picture may have, and half of what a file may have
TURNS = {  # EXIF's orientation: how a stored picture comes to stand upright
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class Unreadable(UserError):
    """A picture that cannot be read.

    Attributes:
        reason: why, in a few words.
    """

    def __init__(self, message: object, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


# ------------------------------------------------------------------------------------------------------ finding


@dataclass
class Listing:
    """What a folder holds.

    Attributes:
        paths: relative paths of the files, sorted as bytes.
        left_out: how many entries were not taken, by reason.
        example: the first of them, by reason.
    """

    paths: list[bytes] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    example: dict[str, str] = field(default_factory=dict)

    def leave_out(self, path: bytes, reason: str) -> None:
        self.left_out[reason] += 1
        self.example.setdefault(reason, os.fsdecode(path))

    @property
    def told(self) -> str:
        """What was left out and why, in the words of a message; empty if nothing was."""
        return "; ".join(
            f"{count} left out, {reason} ({self.example[reason]}{', ...' if count > 1 else ''})"
            for reason, count in self.left_out.items()
        )


def find_files(folder: Path, suffixes: Collection[str] = SUFFIXES) -> Listing:
    """List the files below a folder whose suffix, in lower case, is one of `suffixes`.

    Hidden files and folders and those of `JUNK` are left out. Links are followed, but not to a folder that they lie in,
    which would never end. What is no regular file is left out and counted: a pipe would be waited for without end.

    Raises:
        UserError: the folder, or one in it, cannot be listed.
    """
    found = Listing()
    top = os.fsencode(folder)
    todo = [(b"", [os.path.realpath(top)])]  # relative paths, each with the true paths of it and of those above it
    while todo:
        inside, above = todo.pop()
        for entry in scan(os.path.join(top, inside)):
            path = os.path.join(inside, entry.name)
            if holds(entry.is_dir):
                true = os.path.realpath(entry.path)
                if leads_up(true, above):
                    found.leave_out(path, "links to a folder that they lie in")
                else:
                    todo.append((path, [*above, true]))
            elif os.path.splitext(os.fsdecode(entry.name))[1].lower() in suffixes:
                if holds(entry.is_file):
                    found.paths.append(path)
                else:
                    there = os.path.exists(entry.path)
                    found.leave_out(path, "pipes or devices, no regular files" if there else "links that lead nowhere")
    found.paths.sort()
    return found


def leads_up(true: bytes, above: Collection[bytes]) -> bool:
    """Whether a folder, named by its true path, is one of those above or holds one of them."""
    return any(os.path.commonpath([true, outer]) == true for outer in above)


def holds(test: Callable[[], bool]) -> bool:
    """Whether an entry is of a kind; one that leads nowhere, or round and round, is of none."""
    try:
        return test()
    except OSError:
        return False


def scan(folder: bytes) -> list[os.DirEntry[bytes]]:
    """The entries of a folder but for hidden ones and `JUNK`.

    Raises:
        UserError: it cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            return [e for e in entries if not e.name.startswith(b".") and os.fsdecode(e.name).lower() not in JUNK]
    except OSError as error:
        where = printable(os.fsdecode(folder))
        raise UserError(f"folder {where} cannot be read ({error.strerror}); check its permissions") from None


@lru_cache(maxsize=1000)
def warn_once(text: str) -> None:
    """Warn of something that several splits, or several epochs, meet."""
    log.warning("%s", text)


# ----------------------------------------------------------------------------------------------------- decoding


@contextmanager
def decoding(
    name: object, what: str = "image", remedy: str = "convert it to PNG or JPEG, or delete it"
) -> Iterator[None]:
    """Turn whatever goes wrong while a file is decoded into `Unreadable`.

    Pillow and its plugins raise errors of any type for a damaged file. Their warnings, which are about metadata and
    size, are not shown.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError:
        raise
    except Exception as error:
        reason = _reason(error)
        raise Unreadable(f"{what} {name} cannot be read ({reason}); {remedy}", reason) from None


def _reason(error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        return "it is damaged, or no picture of a known format"
    if isinstance(error, Image.DecompressionBombError):
        return f"it has more than {2 * LARGEST:,} pixels"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    plain = isinstance(error, OSError | ValueError | SyntaxError | EOFError) and said
    return cut(printable(" ".join((said if plain else f"{type(error).__name__}: {said}").split())), 200)


def open_image(file: Path | BytesIO, name: object = None) -> Image.Image:
    """Decode a picture in its own mode, the first of an animation, turned upright as its EXIF data say.

    Args:
        name: what a message calls it; default: its path.

    Raises:
        Unreadable: whatever is wrong with it.
    """
    name = file if name is None else name
    with decoding(name), opened(file) as image:
        image.load()
        return upright(image, name)


def read_image(file: Path | BytesIO, background: str = "white", name: object = None) -> Image.Image:
    """Decode a picture to RGB; see `open_image` and `to_rgb`."""
    name = file if name is None else name
    with decoding(name):
        return to_rgb(open_image(file, name), background)


@contextmanager
def opened(file: Path | BytesIO) -> Iterator[ImageFile.ImageFile]:
    """Open a picture of which nothing is decoded yet. Raises anything for a bad file."""
    if isinstance(file, Path):
        require_regular(file)
    with Image.open(file) as image:
        if image.format == "EPS":
            raise ValueError("it is PostScript, a program that would have to be run")
        yield image


def require_regular(path: Path) -> None:
    """Refuse what must not be opened: opening a pipe waits until somebody writes to it."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise ValueError("it is a folder" if stat.S_ISDIR(mode) else "it is a pipe or a device, no regular file")


def upright(image: Image.Image, name: object) -> Image.Image:
    """Return a decoded picture turned as its EXIF data say; one line is said of data that cannot be understood."""
    try:
        turn = TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception as error:  # the readers of EXIF raise anything
        warn_once(printable(f"{name}: its EXIF data cannot be read ({_reason(error)}); it is used as it is stored"))
        return image
    return image if turn is None else image.transpose(turn)


def to_rgb(image: Image.Image, background: str = "white") -> Image.Image:
    """Return a picture of any mode as RGB: alpha composited on `background`, 16 bits rounded to 8."""
    if image.mode == "F":
        raise ValueError("its pixels are floats, whose range is not known; convert it to 8 bits")
    if image.mode.startswith("I"):
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("its grey values exceed 16 bits; convert it to 8 bits")
        image = Image.fromarray(((values + 128) // 257).astype(np.uint8))  # 65535 = 255 * 257
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, background), image).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")


def require_resizable(size: tuple[int, int], shorter: int) -> None:
    """Refuse a picture of (W, H) that would fill gigabytes once its shorter side is resized to `shorter` pixels.

    Raises:
        ValueError: it is too elongated.
    """
    width, height = size
    if shorter * shorter * max(size) > LARGEST * min(size):
        raise ValueError(
            f"it is {width} x {height} pixels, too elongated to be resized to a shorter side of {shorter}; crop it"
        )
