"""Names from outside, of files, classes and cells, reach no terminal as they are."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from visgen.program import run_program
from visgen.train.log import report

NAME = "[/x] :smile: \x1b[2J\x9b\u202e\n\udcff"
SHOWN = r"[/x] :smile: \x1b[2J\x9b\u202e"


def test_what_a_program_prints_is_escaped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.stdout
    run_program(lambda: print(f"| {NAME} |\n| b |"))
    assert capsys.readouterr().out == f"| {SHOWN}\n\\udcff |\n| b |\n" and sys.stdout is before
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    run_program(lambda: print("\x1b[1mhelp"))
    assert capsys.readouterr().out == "\x1b[1mhelp\n"


def test_what_a_training_says_is_escaped_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from visgen.launch import console

    report(console(), [("net [/x]", "1", "2", "[red]")], {"data": NAME})
    said = capsys.readouterr().err
    assert SHOWN + r"\n\udcff" in said and "net [/x]" in said and "[red]" in said and "\x1b" not in said


def test_warnings_of_others_keep_their_lines() -> None:
    assert logging.lastResort is not None
    run_program(lambda: None)
    shown: Any = logging.lastResort
    other = logging.LogRecord("other", 30, "", 0, "two\nlines", None, None)
    ours = logging.LogRecord("visgen.x", 30, "", 0, "two\nlines", None, None)
    assert [shown.format(r) for r in (other, ours)] == ["two\nlines", r"two\nlines"]
