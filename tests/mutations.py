"""Apply small wrong changes, one at a time, and expect the tests named beside each to fail: `make test-mutations`.

`mutations.yaml` lists them. Each is tried in a copy of visgen/, eval/ and tests/ into which the rest of the repository
is linked.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
COPIED = ("visgen", "eval", "tests")
TIMEOUT = 600  # seconds; a change after which a test does not end is caught
PASSED, FAILED = 0, 1  # exit codes of pytest; any other says that nothing was tested


@dataclass(frozen=True)
class Mutation:
    """A wrong change of `file`, where `text` occurs once, and the tests that must fail under it."""

    id: str
    file: str
    text: str
    replacement: str
    tests: list[str]
    why: str

    def changed(self) -> str:
        """The file after the change.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        source = (ROOT / self.file).read_text()
        if (count := source.count(self.text)) != 1:
            raise ValueError(f"{self.id}: its text occurs {count} times in {self.file}, not once")
        return source.replace(self.text, self.replacement)


def read() -> list[Mutation]:
    """All mutations of the list."""
    return [Mutation(**entry) for entry in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())]


def run(tests: list[str], mutation: Mutation | None = None) -> tuple[int, str]:
    """The exit code of tests in a copy of the tree, after the change if one is given, and what failed or was said."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-p", "no:cacheprovider", "-o", "addopts=", *tests]
    with tempfile.TemporaryDirectory(prefix="mutations_") as name:
        for path in ROOT.iterdir():
            if path.name in COPIED:
                shutil.copytree(path, Path(name) / path.name)
            elif not path.name.startswith((".", "out")):
                (Path(name) / path.name).symlink_to(path)
        if mutation is not None:
            (Path(name) / mutation.file).write_text(mutation.changed())
        paths = os.pathsep.join([name, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(command, cwd=name, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return FAILED, "it does not end"
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or [""]
    return done.returncode, next((line for line in lines if line.startswith(("FAILED", "ERROR"))), lines[-1])


def survives(mutation: Mutation) -> bool:
    """Tries one change; False where a test fails under it. A change that keeps the tests from starting is no use."""
    code, line = run(mutation.tests, mutation)
    said = {PASSED: "SURVIVED", FAILED: "caught"}.get(code, "BROKEN")
    print(f"{said:8} {mutation.id}: {mutation.why if code == PASSED else line}", flush=True)
    return code != FAILED


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="these alone")
    parser.add_argument("-j", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    asked = parser.parse_args()
    chosen = [m for m in read() if asked.only is None or m.id in asked.only]
    if len(chosen) < len(asked.only or ()):
        parser.error(f"--only {' '.join(asked.only)}: the list has {' '.join(m.id for m in chosen) or 'none'} of these")
    for mutation in chosen:
        mutation.changed()
    tests = sorted({test for mutation in chosen for test in mutation.tests})
    with ThreadPoolExecutor(asked.j) as pool:
        parts = [part for n in range(asked.j) if (part := tests[n :: asked.j])]
        failed = [line for code, line in pool.map(run, parts) if code != PASSED]
        if failed:
            print("without any change:", *failed, sep="\n")
            return 1
        left = sum(pool.map(survives, chosen))
    print(f"{len(chosen) - left} of {len(chosen)} are caught")
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
