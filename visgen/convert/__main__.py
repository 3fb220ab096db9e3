"""`python -m visgen.convert ORIGIN IN OUT [options]`; `--help` after ORIGIN lists its options.

`python -m visgen.convert check FILE` replays recorded vectors instead: a file whose Config has no `out` needs IN alone.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Sequence

from visgen.config import UserError, kinds, load, run_program

USAGE = "usage: python -m visgen.convert ORIGIN IN OUT [options], or: python -m visgen.convert check FILE"


def main(argv: Sequence[str]) -> None:
    origins = sorted(kinds("visgen.convert"), key=lambda kind: kind == "check")  # which is no origin, hence last
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\norigins: {', '.join(origins)}")
        return
    if argv[0] not in origins:
        raise UserError(f"unknown origin '{argv[0]}'; allowed: {', '.join(origins)}")
    module = importlib.import_module(f"visgen.convert.{argv[0]}")
    flags = [f"--{f.name}" for f in dataclasses.fields(module.Config) if f.name in ("source", "out")]
    paths = [word for word in argv[1 : 1 + len(flags)] if not word.startswith("-")]
    options = list(argv[1 + len(paths) :])
    if len(paths) != len(flags) and not {"-h", "--help"} & set(options):
        raise UserError(f"{'IN and OUT are' if len(flags) > 1 else 'FILE is'} needed; {USAGE}")
    named = [word for pair in zip(flags, paths, strict=False) for word in pair]
    print(module.convert(load(module.Config, [*named, *options], prog=f"visgen.convert {argv[0]}")))


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
