"""Compare class names, since a label means the name at its place and not the number."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

from visgen.config import UserError

SHOWN = 3  # names that a message gives


def same_classes(trained: Sequence[str], given: Sequence[str], where: str, remedy: str) -> None:
    """Refuse class names that differ in number, name or order.

    Args:
        trained: names that a checkpoint or a cache records; empty: it records none, and nothing is compared.
        given: names of the data.
        where: what records `trained`, for the message.
        remedy: what the user should do, for the message.

    Raises:
        UserError: the names differ.
    """
    if not trained or _plain(trained) == _plain(given):
        return
    raise UserError(f"{where} was made with other classes: {_difference(trained, given)}; {remedy}")


def match_classes(trained: Sequence[str], given: Sequence[str], where: str) -> list[int]:
    """Map labels of the data to labels of a checkpoint by class name.

    Args:
        trained: names that the checkpoint records; empty: it records none, and numbers are kept.
        given: names of the data, which may be fewer or stand in another order.
        where: what records `trained`, for the message.

    Returns:
        For each class of the data, in order, its label in the checkpoint.

    Raises:
        UserError: the data have a class that the checkpoint does not have, or one name twice.
    """
    if not trained:
        return list(range(len(given)))
    place = {name: label for label, name in enumerate(_plain(trained))}
    names = _plain(given)
    unknown = [given[i] for i, name in enumerate(names) if name not in place]
    if unknown:
        raise UserError(
            f"{where} has no class {_some(unknown)}, which the data have; its {len(trained)} classes are "
            f"{_some(trained)}: rename or remove folders so that the names agree"
        )
    if len(set(names)) < len(names) or len(place) < len(trained):
        both = names if len(set(names)) < len(names) else _plain(trained)
        twice = sorted({name for name in both if both.count(name) > 1})
        raise UserError(f"{where}: class names occur twice ({_some(twice)}), so labels cannot be matched by name")
    return [place[name] for name in names]


def _plain(names: Sequence[str]) -> list[str]:
    """Return names in one Unicode normal form: file systems differ in theirs."""
    return [unicodedata.normalize("NFC", name) for name in names]


def _difference(trained: Sequence[str], given: Sequence[str]) -> str:
    old, new = _plain(trained), _plain(given)
    parts = []
    if gone := [name for name in old if name not in new]:
        parts.append(f"{_some(gone)} then, not now")
    if added := [name for name in new if name not in old]:
        parts.append(f"{_some(added)} now, not then")
    if not parts and sorted(old) != sorted(new):
        parts.append(f"{len(old)} then, {len(new)} now, with equal names among them")
    if not parts:
        i = next(i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
        parts.append(f"in another order, label {i} was {old[i]!r} and is {new[i]!r} now")
    return ", ".join(parts)


def _some(names: Sequence[str]) -> str:
    """Return the first names, quoted and with control characters escaped."""
    shown = ", ".join(repr(name) for name in names[:SHOWN])
    return shown + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
