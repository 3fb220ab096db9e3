"""How visgen was installed and how a program was called, for what messages and help say."""

from __future__ import annotations

import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]  # the clone; of an installed wheel, the folder of all packages


def if_shipped(path: str, text: str) -> str:
    """Return `text`, which names the file or folder `path` of a clone; "" where there is none, as beside a wheel."""
    return text if (REPOSITORY / path).exists() else ""


def program(script: str) -> str:
    """Return how the program was called: by its command, such as `visgen-sample`, or as `script` of a clone."""
    name = Path(sys.argv[0]).name
    return name if name.startswith("visgen-") else script
