"""`python -m visgen.convert ORIGIN IN OUT [options]`; `--help` after ORIGIN lists its options."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from visgen.config import UserError, kinds, load, run_program

USAGE = "usage: python -m visgen.convert ORIGIN IN OUT [options]"


def main(argv: Sequence[str]) -> None:
    origins = kinds("visgen.convert")
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\norigins: {', '.join(origins)}")
        return
    if argv[0] not in origins:
        raise UserError(f"unknown origin '{argv[0]}'; allowed: {', '.join(origins)}")
    module = importlib.import_module(f"visgen.convert.{argv[0]}")
    paths = [word for word in argv[1:3] if not word.startswith("-")]
    options = list(argv[1 + len(paths) :])
    if len(paths) != 2 and not {"-h", "--help"} & set(options):
        raise UserError(f"IN and OUT are needed; {USAGE}")
    named = [word for pair in zip(("--source", "--out"), paths, strict=False) for word in pair]
    print(module.convert(load(module.Config, [*named, *options], prog=f"visgen.convert {argv[0]}")))


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
