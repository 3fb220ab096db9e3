"""What a config's values may be: ranges as part of their types, and the error that names what lies outside.

`width: Positive = 768` is an int of at least 1. `config.load` checks what it read, `config.build` what it builds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import reprlib
import unicodedata
from collections.abc import Callable
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

_hints: Callable[[Any], dict[str, Any]] = functools.cache(functools.partial(get_type_hints, include_extras=True))


LONGEST = 2000  # characters of a message
JOINERS = "\u200c\u200d"  # invisible, and needed to write Persian names and family emojis


class UserError(ValueError):
    """An error whose message names the value at fault and the remedy. Programs print it in one line and exit 2.

    The message is kept as one printable line of bounded length, whatever names and values stand in it. It stays one
    line when a DataLoader worker raises it: torch raises it again as `type(error)(whole traceback)`, of which only the
    last line is kept.
    """

    def __init__(self, message: object = "") -> None:
        text = str(message).rpartition(f"{type(self).__name__}: ")[2]
        super().__init__(cut(printable(" ".join(text.split())), LONGEST))


def printable(text: object) -> str:
    """Return a text that comes from outside as a terminal may show it: control characters are escaped."""
    text = str(text)
    return text if text.isprintable() else "".join(c if _is_plain(c) else ascii(c)[1:-1] for c in text)


def _is_plain(character: str) -> bool:
    """Whether a character neither moves the cursor nor reorders or hides others (Unicode's control classes)."""
    return character in JOINERS or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def cut(text: str, longest: int) -> str:
    """Return a text of at most `longest` characters: its beginning and its end, where the remedy stands."""
    if len(text) <= longest:
        return text
    end = longest // 4
    return f"{text[: longest - end - 5]} ... {text[-end:]}"


class _Short(reprlib.Repr):
    """Shows a few items of a few levels, so that a value of any size costs little."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 3, 100, 100


_short = _Short()


def shown(value: object) -> str:
    """Return a short, printable `repr` of a value that comes from outside."""
    return cut(printable(_short.repr(value)), 200)


@dataclasses.dataclass(frozen=True)
class Range:
    """Bounds of a finite number, or of a tuple's length.

    Attributes:
        ends: the brackets of an interval; a round one leaves its bound out.
    """

    low: float
    high: float = math.inf
    ends: str = "[]"

    def __contains__(self, value: Any) -> bool:
        low = self.low < value if self.ends[0] == "(" else self.low <= value
        high = value < self.high if self.ends[1] == ")" else value <= self.high
        return low and high and value < math.inf  # false for nan

    def __str__(self) -> str:
        if self.high < math.inf:
            return f"within {self.ends[0]}{self.low}, {self.high}{self.ends[1]}"
        return f"{'above' if self.ends[0] == '(' else 'at least'} {self.low}"


Positive = Annotated[int, Range(1)]
Depth = Annotated[int, Range(1, 1000)]  # of modules that are made one by one
Natural = Annotated[int, Range(0)]
SEEDS = Range(0, 2**63 - 1)
Seed = Annotated[int, SEEDS]
Share = Annotated[float, Range(0, 1)]
Rate = Annotated[float, Range(0, 1, "[)")]  # of a dropout or a decay, of which 1 would leave nothing
Weight = Annotated[float, Range(0)]
Scale = Annotated[float, Range(0, ends="()")]
Shift = Annotated[float, Range(1e-3, 1e3)]  # of a path's times
Temperature = Annotated[float, Range(0, 100, "(]")]  # a factor of noise, which is to stay finite
Steps = Annotated[int, Range(1, 10_000)]  # of a solver, planned one by one


def check(config: Any, where: str = "") -> None:
    """Raises `UserError` for the first value of a config, or of one inside it, of another type or out of its range.

    Args:
        where: what stands before the names of its fields, such as `optim`.
    """
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        name, value = f"{where}.{field.name}".lstrip("."), getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            check(value, name)
        elif not _fits(hints[field.name], value):
            raise UserError(f"{name} is {shown(value)}; it must be {_words(hints[field.name])}")
        else:
            _check_value(hints[field.name], value, name)


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value may be of this type, as far as numbers, choices and unions of them go."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fits(args[0], value)
    if origin in (Union, UnionType):
        return any(_fits(kind, value) for kind in args)
    if origin is Literal:
        return value in args
    of = {int: Integral, float: Real, bool: bool, NoneType: NoneType}.get(hint)  # NumPy's numbers too
    return of is None or isinstance(value, of)


def _words(hint: Any) -> str:
    """Such a type in words."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _words(args[0])
    if origin in (Union, UnionType, Literal):
        return " or ".join(map(str, args) if origin is Literal else map(_words, args))
    plain = {int: "a whole number", float: "a number", bool: "true or false", NoneType: "None"}
    return plain.get(hint) or str(getattr(hint, "__name__", hint))


def _check_value(hint: Any, value: Any, name: str) -> None:
    args = get_args(hint)
    if get_origin(hint) is tuple:
        if isinstance(value, tuple):
            kinds = args[:1] * len(value) if ... in args else args
            for i, (kind, item) in enumerate(zip(kinds, value, strict=True)):
                _check_value(kind, item, f"{name}[{i}]")
        return
    number: Any = len(value) if isinstance(value, tuple) else value
    what = "the number of its values" if isinstance(value, tuple) else "it"
    for part in args:  # of an annotation or a union
        if not isinstance(part, Range):
            _check_value(part, value, name)
        elif isinstance(number, Real) and number not in part:
            finite = "" if number < math.inf else "finite and "
            raise UserError(f"{name} is {cut(str(value), 100)}; {what} must be {finite}{part}")
