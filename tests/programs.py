"""The thin programs of eval/ as modules."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def program(name: str) -> Any:
    """`eval/NAME.py`, loaded anew."""
    spec = importlib.util.spec_from_file_location(f"program_{name}", ROOT / "eval" / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
