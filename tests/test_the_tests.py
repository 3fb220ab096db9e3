"""Tests can fail: each asserts something, and none hides a failure behind a skip."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.rglob("test_*.py"))
OPTIONAL = ("triton", "visgen.nn.fused.", "visgen.decode.captured")  # what needs Triton, which not every torch brings


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def functions(module: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))


def called(node: ast.AST) -> str:
    """The last part of the name of a call, or nothing."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def asserts(node: ast.AST, helpers: set[str]) -> bool:
    """Does it contain an assertion, or call something that does?"""
    return any(
        isinstance(inner, ast.Assert)
        or called(inner) in {"raises", "warns", "fail", *helpers}
        or called(inner).startswith("assert_")
        for inner in ast.walk(node)
    )


@cache
def helpers() -> frozenset[str]:
    """Functions of all files below tests/ that assert something themselves."""
    found = {f.name for path in HERE.rglob("*.py") for f in functions(tree(path)) if asserts(f, set())}
    return frozenset(name for name in found if not name.startswith("test"))


def faults(module: ast.Module) -> Iterator[str]:
    for test in functions(module):
        if test.name.startswith("test_") and not asserts(test, set(helpers())):
            yield f"line {test.lineno}: {test.name} asserts nothing"
    for node in ast.walk(module):
        if isinstance(node, ast.ExceptHandler) and any(called(inner) == "skip" for inner in ast.walk(node)):
            yield f"line {node.lineno}: a failure becomes a skip"
        if isinstance(node, ast.Call):
            name, first = called(node), ast.unparse(node.args[0]).strip("'") if node.args else ""
            if name == "xfail":
                yield f"line {node.lineno}: a test that is expected to fail says nothing"
            if name == "raises" and first in ("Exception", "BaseException") and not node.keywords:
                yield f"line {node.lineno}: any error will do"
            if name == "importorskip" and not first.startswith(OPTIONAL):
                yield f"line {node.lineno}: {first} is installed with .[dev]; import it"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(HERE)))
def test_a_file_of_tests_can_fail(file: Path) -> None:
    assert list(faults(tree(file))) == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("def test_a():\n    print(1)", 1),
        ("def test_a():\n    assert 1", 0),
        ("def test_a():\n    with pytest.raises(ValueError):\n        int('a')", 0),
        ("def test_a():\n    with pytest.raises(Exception):\n        int('a')", 1),
        ("def test_a():\n    try:\n        assert int('a')\n    except ValueError:\n        pytest.skip('no')", 1),
        ("def test_a():\n    pytest.importorskip('numpy')\n    assert 1", 1),
        ("def test_a():\n    pytest.importorskip('triton')\n    assert 1", 0),
        ("@pytest.mark.xfail()\ndef test_a():\n    assert 1", 1),
    ],
)
def test_planted_faults_are_seen(source: str, count: int) -> None:
    assert len(list(faults(ast.parse(source)))) == count
