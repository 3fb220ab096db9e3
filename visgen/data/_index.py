"""`index.json` of a folder that a program of ours wrote: what its files are of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from visgen.config import UserError

T = TypeVar("T")


def read_index(folder: Path, make: Callable[..., T], version: int, absent: str, again: str, damaged: str) -> T:
    """`make` of the fields in the folder's `index.json`.

    Args:
        absent, again, damaged: what to say, and to do, where there is none, where it is of another `version`, and where
            it is no such index.

    Raises:
        UserError: one of these.
    """
    path = folder / "index.json"
    if not path.is_file():
        raise UserError(absent)
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        if values.get("version") != version:
            raise UserError(f"{path} has version {values.get('version')}, this visgen reads {version}; {again}")
        return make(**values)
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is damaged ({error}); {damaged}") from None


def replace(path: Path, data: bytes | memoryview) -> None:
    """Writes a file so that it is there whole or not at all, also after a power cut."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
