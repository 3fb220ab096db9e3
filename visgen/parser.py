"""The parser of flags (tyro), and what it says of a fault in our words."""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any, TypeVar

import tyro

from visgen.checks import UserError, printable

T = TypeVar("T")

PLAINLY = (  # what the parser says, and how we say it
    (r"no type matching (.*?) could be instantiated from \['(.*)'\]\..*", r"\1 must be \2, got '\3'"),
    (r"Could not find valid parse for arguments: \[(.*)\]", r"\1 takes values of its type, apart by spaces; got \2"),
    (r"invalid literal for int\(\) with base 10: (.*)", r"\1 must be an int, got \2"),
    (r"could not convert string to float: (.*)", r"\1 must be a float, got \2"),
)
MISSING = r"Missing value for argument '\1', which takes \2 values, apart by spaces, without brackets or commas"


def parse(cls: type[T], flags: list[str], prog: str | None) -> T:
    """An instance of the dataclass `cls` filled by `flags`; `--help` prints and exits.

    Raises:
        UserError: what the parser says, in one line.
    """
    options: Any = {"args": flags, "prog": prog, "config": (tyro.conf.FlagConversionOff,)}
    if "--help" in flags or "-h" in flags:
        return tyro.cli(cls, **{**options, "args": [printable(flag) for flag in flags]})
    options["config"] += (tyro.conf.HelptextFromCommentsOff,)  # nobody reads them now, and finding them takes long
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured), contextlib.redirect_stdout(captured):
            return tyro.cli(cls, **options)
    except SystemExit:
        text = re.sub(r"\x1b\[[0-9;]*m", "", captured.getvalue())
        text = re.sub(r"\u256d.*?\u256e|^ \S.*\n -{5,}", " ", text, flags=re.MULTILINE)  # tyro's headings
        text = " ".join(re.sub(r"[\u2500-\u257f]|-{5,}", " ", text).split())
        text = re.sub(r"For full helptext.*|Argument helptext:.*", "", text).strip()
        for said, plainly in PLAINLY:
            text = re.sub(rf"Error parsing (\S+): {said}", plainly, text)
        text = re.sub(r" must be \{None\}\|\{?([^{}|]+?)\}?, got ", r" must be \1 or None, got ", text)
        text = re.sub(r"Missing value for argument '(\S+)'\. Expected ([2-9]) values\.", MISSING, text)
        hint = "; YAML files stand before the flags" if re.search(r"Unrecognized.*\.ya?ml", text) else ""
        raise UserError((text or "the options could not be read; see --help") + hint) from None
