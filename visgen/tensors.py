"""Files of tensors: safetensors that carry their own checksum, and what every reader of tensors checks.

The metadata of a file that `write` wrote hold `format` and `crc32`: 16 hex digits, the CRC-32 of the header (with
zeros for these digits) and the CRC-32 of the data. `read` compares both, so a file is checked wherever it was copied.
Files without the entry, of older versions and of other programs, are read as they are.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from visgen.checks import UserError
from visgen.files import FORMAT, crc32, publishing

LIMIT = 100_000_000  # bytes of a header, as safetensors has it
NO_CRC = "0" * 16
_DIGITS = re.compile(rb'"crc32":"([0-9a-f]{16})"')


@dataclass(frozen=True)
class Header:
    """What stands before the data of a safetensors file.

    Attributes:
        metadata: entries of text.
        shapes: of the tensors, by name.
        start: where the data begin.
        crc32: the recorded checksum; "": none.
    """

    metadata: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    start: int
    crc32: str


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with its checksum. Equal contents give equal files.

    Raises:
        UserError: it cannot be written, for example because the disk is full.
    """
    with publishing(path) as unfinished:
        plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        try:
            save_file(plain, unfinished, {**(metadata or {}), "format": FORMAT, "crc32": NO_CRC})
        except SafetensorError as error:  # also of a full disk
            raise OSError(" ".join(str(error).split())) from error
        _seal(unfinished)


def read(path: Path, remedy: str, finite: bool = True) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file.

    Args:
        remedy: what the user can do about a damaged file.
        finite: refuse values that are not finite.

    Raises:
        UserError: the file is missing, truncated, changed since it was written, or holds a value that is not finite.
    """
    metadata = verify(path, remedy).metadata
    return load(path, remedy, finite), metadata


def load(path: Path, remedy: str, finite: bool = True) -> dict[str, Tensor]:
    """Return the tensors of a file that was verified already; see `read`."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise _no_safetensors(path, error, remedy) from None
    if finite:
        check_finite(tensors, path, remedy)
    return tensors


def read_header(path: Path, remedy: str) -> Header:
    """Return the header of a safetensors file; its data are not read.

    Raises:
        UserError: the file is missing or truncated, or its header was changed.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or not 2 <= length <= min(size - 8, LIMIT):
                raise ValueError(f"it has {size:,} bytes, too few for its header")
            text = file.read(length)
        values = json.loads(text)
        metadata = values.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata are not text")
        shapes = {name: tuple(map(int, about["shape"])) for name, about in values.items()}
        end = 8 + length + max((about["data_offsets"][1] for about in values.values()), default=0)
        if size != end:
            raise ValueError(f"it has {size:,} bytes, its header says {end:,}")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; {remedy}") from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise _no_safetensors(path, error, remedy) from None
    crc = metadata.get("crc32", "")
    if (crc or metadata.get("format") == FORMAT) and crc[:8] != _header_crc(first + text):
        raise _changed(path, "header", remedy)
    return Header(metadata, shapes, 8 + length, crc)


def verify(path: Path, remedy: str) -> Header:
    """Compare the data of a safetensors file with its checksum, if it has one, and return its header.

    Raises:
        UserError: as `read_header`; or the data were changed.
    """
    header = read_header(path, remedy)
    if header.crc32:
        try:
            found = f"{crc32(path, start=header.start):08x}"
        except OSError as error:
            raise _no_safetensors(path, error, remedy) from None
        if header.crc32[8:] != found:
            raise _changed(path, "data", remedy)
    return header


def write_pickle(path: Path, value: Any) -> None:
    """Write plain values and tensors with `torch.save`.

    Raises:
        UserError: it cannot be written, for example because the disk is full.
    """
    with publishing(path) as unfinished:
        try:
            torch.save(value, unfinished)
        except RuntimeError as error:  # what torch raises where a write fails
            raise OSError(" ".join(str(error).split())[:200]) from error


def read_pickle(path: Path, remedy: str) -> Any:
    """Return what `write_pickle` wrote, on the CPU; code in the file is not run. The file has no checksum of its own.

    Raises:
        UserError: a value is not finite.
    """
    found = torch.load(path, map_location="cpu", weights_only=True)
    check_finite(dict(_tensors(found, "")), path, remedy)
    return found


def check_finite(tensors: Mapping[str, Tensor], where: Path | str, remedy: str) -> None:
    """Raise `UserError` that names the first tensor that holds a NaN or an infinity."""
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise UserError(f"{where}: tensor {name} holds a value that is not finite; {remedy}")


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is a NaN or an infinity; reads the tensor once and copies nothing."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    real = real.float() if real.element_size() == 1 else real  # 8-bit floats have no such kernels
    return bool(torch.stack(torch.aminmax(real)).isfinite().all())


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor inside nested dictionaries and lists, with a dotted name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in items:
            yield from _tensors(item, f"{name}.{key}".lstrip("."))


def _seal(path: Path) -> None:
    """Sort the metadata, which safetensors writes in an order of chance, and fill in the checksum."""
    with open(path, "r+b") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, "a JSON header changed its length by sorting"
        text = text.ljust(length)
        crc = f"{_header_crc(first + text)}{crc32(path, start=8 + length):08x}"
        file.seek(8)
        file.write(_DIGITS.sub(b'"crc32":"%s"' % crc.encode(), text, count=1))


def _header_crc(header: bytes) -> str:
    blank = b'"crc32":"%s"' % NO_CRC.encode()
    return f"{zlib.crc32(_DIGITS.sub(blank, header, count=1)):08x}"


def _no_safetensors(path: Path, error: Exception, remedy: str) -> UserError:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return UserError(f"{path} cannot be read, it is truncated or not a safetensors file ({reason}); {remedy}")


def _changed(path: Path, what: str, remedy: str) -> UserError:
    return UserError(f"{path} is damaged (checksum: its {what} is not what was written); {remedy}")
