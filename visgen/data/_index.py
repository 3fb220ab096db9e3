"""`index.json` of a folder that a program of ours wrote: what its files are of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from visgen.config import UserError
from visgen.files import read_json, write_json

T = TypeVar("T")


def read_index(folder: Path, kind: type[T], version: int, absent: str, again: str, damaged: str) -> T:
    """Return the folder's `index.json` as the dataclass `kind`.

    Args:
        absent, again, damaged: what to say, and to do, where there is none, where it is of another `version`, and where
            it is no such index.

    Raises:
        UserError: one of these.
    """
    path = folder / "index.json"
    if not path.is_file():
        raise UserError(absent)
    values = read_json(path, damaged)
    if values.get("version") != version:
        raise UserError(f"{path} has version {values.get('version')}, this visgen reads {version}; {again}")
    hints = get_type_hints(kind)
    try:
        for name, value in values.items():
            if name in hints and not _fits(value, hints[name]):
                raise ValueError(f"its {name} is {str(value)[:60]!r}")
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); {damaged}") from None


def write_index(folder: Path, index: Any) -> None:
    """Write the dataclass `index` as the folder's `index.json`, with its checksum."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "index.json", dataclasses.asdict(index))


def check_sizes(index: Any) -> None:
    """Raise `ValueError` where grid and image size of an index have another number of sides, or one is 0."""
    for name, sides in (("grid", 3), ("image_size", 2)):
        value = getattr(index, name)
        if len(value) != sides or min(value) < 1:
            raise ValueError(f"its {name} is {value}")
    if not index.classes:
        raise ValueError("it names no class")


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is of a type that a field of an index has; numbers are never negative."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in args
    if origin is list:
        return isinstance(value, list) and all(_fits(item, args[0]) for item in value)
    if hint in (int, float):
        kinds = int if hint is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and value >= 0
    return isinstance(value, origin or hint)
