"""Read and write the project's own files so that nothing is half there and no damage goes unseen.

`publishing` gives a temporary path that belongs to this call alone and renames it when the file is complete, so two
programs may write to one directory and a kill leaves the older file whole. `write_json` and `read_json` keep a checksum
inside the file; `tensors.py` and `arrays.py` do the same for safetensors and NumPy files.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from visgen.checks import UserError

CHUNK = 1 << 24  # bytes read at once
JSON_LIMIT = 1 << 26  # bytes of a JSON file of ours
FORMAT = "visgen/2"  # entry `format` of a file that carries its own checksum


def from_home(path: Path | str) -> Path:
    """Return the path with the home directory for a leading `~`; as it is where the user has no home."""
    return Path(os.path.expanduser(path))


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


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum; see `publishing`."""
    marked = {"format": FORMAT, **values}
    write_text(path, json.dumps({**marked, "checksum": _checksum(marked)}, indent=1) + "\n")


def read_json(path: Path, remedy: str, limit: int = JSON_LIMIT) -> dict[str, Any]:
    """Return the object in a JSON file without the entries `format` and `checksum`.

    A file without these two entries is of an older version, or of another program, and is taken as it is.

    Args:
        remedy: what the user can do about a damaged file.
        limit: largest size of the file in bytes.

    Raises:
        UserError: the file is missing, cannot be read, is too large, is no JSON object, or its checksum differs.
    """
    try:
        if (size := path.stat().st_size) > limit:
            raise ValueError(f"it has {size:,} bytes, the limit is {limit:,}")
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError(f"it holds a {type(found).__name__}, not an object")
        if "format" in found or "checksum" in found:
            recorded = found.pop("checksum", None)
            if found.get("format") != FORMAT or recorded != _checksum(found):
                raise ValueError("its checksum differs, so it is not what was written")
            del found["format"]
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {remedy}") from None
    except (ValueError, OSError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UserError(f"{path} is damaged ({reason}); {remedy}") from None
    return found


def _checksum(values: Mapping[str, Any]) -> str:
    """Return the CRC-32, as 8 hex digits, of the shortest JSON text of `values`."""
    return f"{zlib.crc32(json.dumps(values, sort_keys=True, separators=(',', ':')).encode()):08x}"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Let one call at a time do what is in the block, of all programs that write to this directory.

    Some network file systems have no such locks; there the block just runs.
    """
    number = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def flush(path: Path) -> None:
    """Wait until a file or a directory is on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def crc32(path: Path, stop: int | None = None, start: int = 0) -> int:
    """Return the CRC-32 of a file's bytes from `start` up to `stop`, by default of all."""
    value, left = 0, (path.stat().st_size if stop is None else stop) - start
    with open(path, "rb") as file:
        file.seek(start)
        while part := file.read(min(CHUNK, max(left, 0))):
            value, left = zlib.crc32(part, value), left - len(part)
    return value


def umask() -> int:
    """Return this process's umask, which can only be read by setting it."""
    value = os.umask(0o077)
    os.umask(value)
    return value
