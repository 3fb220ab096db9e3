"""What `import visgen` does before anything else: how OpenMP's threads wait."""

from __future__ import annotations

import ast
import importlib
import os
import sys
from pathlib import Path

import pytest

import visgen

ROOT = Path(__file__).parents[1]
PROGRAMS = [ROOT / "train.py", ROOT / "sample.py", *sorted((ROOT / "eval").glob("*.py"))]
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@pytest.mark.parametrize("chosen", [None, *WAITING])
def test_threads_wait_asleep_unless_the_user_says_otherwise(
    chosen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WAITING:
        monkeypatch.setenv(name, "")  # so that it is restored afterwards, also where it is not set now
        monkeypatch.delenv(name)
    if chosen:
        monkeypatch.setenv(chosen, "mine")
    importlib.reload(visgen)
    found = {name: os.environ[name] for name in WAITING if name in os.environ}
    assert found == ({chosen: "mine"} if chosen else {"OMP_WAIT_POLICY": "passive", "KMP_BLOCKTIME": "0"})


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
def test_every_program_imports_visgen_before_torch(program: Path) -> None:
    """OpenMP reads its settings when torch loads."""
    nodes = [n for n in ast.parse(program.read_text()).body if isinstance(n, ast.Import | ast.ImportFrom)]
    names = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in nodes]
    foreign = [name.split(".")[0] for name in names if name.split(".")[0] not in sys.stdlib_module_names]
    assert "visgen" in foreign and "torch" not in foreign[: foreign.index("visgen")]
