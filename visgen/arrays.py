"""NumPy files that carry their own checksum: a .npy file and behind it `visgen/2` and the CRC-32 in 8 hex digits.

NumPy reads such a file as any other. Files of older versions end with the array; an index may hold their SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from visgen.checks import UserError
from visgen.files import FORMAT, crc32, publishing

MARK = FORMAT.encode()
LONG = 1 << 32  # bytes of files whose check is said to be under way


def write(path: Path, array: np.ndarray) -> str:
    """Write an array with its checksum and return that.

    Raises:
        UserError: it cannot be written, for example because the disk is full.
    """
    with publishing(path) as unfinished:
        with open(unfinished, "wb") as file:
            np.save(file, array, allow_pickle=False)
        crc = f"{crc32(unfinished):08x}"
        with open(unfinished, "ab") as file:
            file.write(MARK + crc.encode())
    return crc


def read(path: Path, absent: str, remedy: str, mapped: bool = False) -> np.ndarray:
    """Return the array in a file; `verify` compares its checksum.

    Args:
        absent: what to do where there is no such file.
        remedy: what to do about a damaged file.
        mapped: keep the values in the file's memory.

    Raises:
        UserError: the file is missing, truncated or of another length than its array.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        _mark(path, array)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {absent}") from None
    except Exception as error:  # NumPy raises anything for a header that is none
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read, it is truncated or damaged ({reason}); {remedy}") from None
    return array if mapped else np.array(array)


def verify(path: Path, array: np.ndarray, remedy: str, recorded: str = "") -> None:
    """Compare a file with the checksum that it carries, and with the one that an index records.

    Args:
        array: the file's array, as `read` with `mapped` returns it.
        recorded: what `write` returned, or the SHA-256 of a file of an older version; "": nothing.

    Raises:
        UserError: the file is not what was written.
    """
    own = _mark(path, array)
    wrong = bool(own) and f"{crc32(path, path.stat().st_size - len(MARK) - 8):08x}" != own
    if recorded and len(recorded) == 64:
        with open(path, "rb") as file:
            wrong |= hashlib.file_digest(file, "sha256").hexdigest() != recorded
    elif recorded:
        wrong |= own != recorded
    if wrong:
        raise UserError(f"{path} is damaged (checksum: it is not what was written); {remedy}")


def is_finite(array: np.ndarray) -> bool:
    """Whether no value of a float array is a NaN or an infinity; copies nothing."""
    if not array.size:
        return True
    if array.dtype == np.float16:  # as whole numbers, which is many times faster; infinity is 0x7c00
        return array.view(np.int16).max() < 0x7C00 and array.view(np.uint16).max() < 0xFC00
    return bool(np.isfinite(array.min()) and np.isfinite(array.max()))


def once_a_host(work: Callable[[int], None], numbers: Iterable[int], folder: Path, size: int) -> None:
    """Do `work` on numbers of shards, several at once, on the first process of each host alone.

    Args:
        size: bytes that it reads; many are announced.

    Raises:
        UserError: the first that `work` raises.
    """
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return
    if size > LONG:
        print(f"comparing {size / 1e9:.0f} GB in {folder} with their checksums", file=sys.stderr, flush=True)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(work, numbers):
            pass


def _mark(path: Path, array: np.ndarray) -> str:
    """Return the checksum behind a mapped array; "": none."""
    end = getattr(array, "offset", 0) + array.nbytes
    with open(path, "rb") as file:
        file.seek(end)
        rest = file.read(64)
    if rest and (len(rest) != len(MARK) + 8 or not rest.startswith(MARK)):
        raise ValueError(f"{len(rest)} bytes behind the array are no checksum")
    return rest[len(MARK) :].decode("ascii", "replace")
