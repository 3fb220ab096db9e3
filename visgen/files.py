"""Read and write the project's own files so that nothing is half there and no damage goes unseen.

`publishing` gives a temporary path that belongs to this call alone and renames it when the file is complete, so two
programs may write to one directory and a kill leaves the older file whole.
"""

from __future__ import annotations

import os
import secrets
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from visgen.checks import UserError

CHUNK = 1 << 24  # bytes read at once


def temporary(path: Path) -> Path:
    """Return a hidden name beside `path` that no other call uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


@contextmanager
def publishing(path: Path, remedy: str = "make room, or choose another directory") -> Iterator[Path]:
    """Yield a temporary path; when the block ends, flush that file to disk and rename it to `path`.

    The file gets the permissions that the umask gives a new file. If the block raises, the temporary file is removed
    and an older file at `path` stays as it was.

    Raises:
        UserError: the file cannot be written, for example because the disk is full.
    """
    unfinished = temporary(path)
    try:
        yield unfinished
        unfinished.chmod(0o666 & ~umask())
        flush(unfinished)
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror or error}); {remedy}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def write_bytes(path: Path, data: bytes | memoryview) -> None:
    """Write a whole file; see `publishing`."""
    with publishing(path) as unfinished:
        unfinished.write_bytes(data)


def write_text(path: Path, text: str) -> None:
    """Write a whole UTF-8 file; see `publishing`."""
    write_bytes(path, text.encode())


def flush(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def crc32(path: Path) -> int:
    """Return the CRC-32 of a file's bytes."""
    value = 0
    with open(path, "rb") as file:
        while part := file.read(CHUNK):
            value = zlib.crc32(part, value)
    return value


def umask() -> int:
    """Return this process's umask, which can only be read by setting it."""
    value = os.umask(0o077)
    os.umask(value)
    return value
