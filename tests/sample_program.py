"""What the tests of `sample.py` share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from visgen.sample import main


def run(run_dir: Path, out: Path, *argv: str) -> None:
    main(["--checkpoint", str(run_dir), "--out", str(out), "--engine.device", "cpu", *argv])


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The program's one line of error, without `error: `."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    printed = capsys.readouterr()
    assert stop.value.code == 2 and printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1, printed.err
    return printed.err.removeprefix("error: ")


def settings_of(path: Path) -> dict[str, Any]:
    with Image.open(path) as picture:
        return json.loads(picture.info["visgen"])
