"""`metrics.jsonl`: one JSON object a line, so written that a full disk or a damaged line costs no other."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visgen import files
from visgen.config import UserError


class Lines:
    """The lines of one file. A line that cannot be written waits, and is tried again with the next one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting: list[bytes] = []

    def open(self, step: int) -> None:
        """Make sure that lines can be added, and drop those of later steps than `step`: they will be written again.

        A file without later lines is left as it is, to the byte.

        Raises:
            UserError: the file cannot be read or written.
        """
        if self.path.exists() and not self.path.is_file():
            raise UserError(f"{self.path} is no file; move it away, metrics are written there")
        try:
            with open(self.path, "ab"):
                pass
            kept, later = _up_to(self.path, step)
        except OSError as error:
            raise UserError(f"{self.path} cannot be written ({error.strerror}); choose another loop.out") from None
        if later:
            files.write_bytes(self.path, b"".join(kept))

    def add(self, values: Mapping[str, Any]) -> str:
        """Append one line; see `flush`."""
        self.waiting.append(json.dumps(values).encode() + b"\n")
        return self.flush()

    def flush(self) -> str:
        """Append the lines that wait. Return why that failed, or ""."""
        try:
            if self.waiting:
                _append(self.path, b"".join(self.waiting))
        except OSError as error:
            return error.strerror or str(error)
        self.waiting = []
        return ""


def _append(path: Path, data: bytes) -> None:
    """Append all of `data` or, as far as the system allows, nothing."""
    number = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(number).st_size
        if size and os.pread(number, 1, size - 1) != b"\n":  # a killed process left half a line
            data = b"\n" + data
        try:
            while data:
                data = data[os.write(number, data) :]
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(number, size)
            raise
    finally:
        os.close(number)


def _up_to(path: Path, step: int) -> tuple[list[bytes], bool]:
    """Return the lines of steps up to `step`, and whether there are later ones. A damaged line belongs to no step."""
    kept, later = [], False
    with open(path, "rb") as file:
        for line in file:
            at = _step_of(line)
            if at is not None and at <= step:
                kept.append(line if line.endswith(b"\n") else line + b"\n")
            later |= at is not None and at > step
    return kept, later


def _step_of(line: bytes) -> float | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
    return step if isinstance(step, int | float) and not isinstance(step, bool) else None
