"""The list of wrong changes stays usable: each applies, and the tests that must notice it exist."""

from __future__ import annotations

import ast
import collections
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import mutations
import pytest
from mutations import COPIED, ROOT, Mutation

MUTATIONS = mutations.read()


@functools.cache
def functions(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


def faults(mutation: Mutation) -> Iterator[str]:
    """What makes it unusable."""
    if mutation.file.partition("/")[0] not in COPIED or not (ROOT / mutation.file).is_file():
        yield f"there is no {mutation.file} in {', '.join(COPIED)}"
        return
    try:
        changed = mutation.changed()
        if ast.dump(ast.parse(changed)) == ast.dump(ast.parse((ROOT / mutation.file).read_text())):
            yield "its replacement changes nothing"
    except (ValueError, SyntaxError) as error:
        yield str(error)
    if not mutation.tests or not mutation.why:
        yield "it names no tests or no reason"
    for test in mutation.tests:
        name, _, function = test.partition("[")[0].partition("::")
        if not (ROOT / name).is_file() or (function and function not in functions(ROOT / name)):
            yield f"there is no {test}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.id)
def test_a_change_applies_and_its_tests_exist(mutation: Mutation) -> None:
    assert not list(faults(mutation))


def test_the_ids_differ() -> None:
    assert [name for name, count in collections.Counter(m.id for m in MUTATIONS).items() if count > 1] == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("file", "visgen/none.py", "there is no visgen/none.py"),
        ("file", "assets/digits.json", "there is no assets/digits.json"),
        ("text", "no such text", "occurs 0 times"),
        ("text", "self", "times in"),
        ("replacement", MUTATIONS[0].text, "changes nothing"),
        ("replacement", "(", "never closed"),
        ("tests", [], "no tests"),
        ("why", "", "no reason"),
        ("tests", ["tests/none.py"], "there is no tests/none.py"),
        ("tests", ["tests/test_files.py::test_none[1]"], "there is no tests/test_files.py::test_none"),
    ],
)
def test_a_change_that_does_not_apply_is_seen(field: str, value: object, said: str) -> None:
    found = list(faults(dataclasses.replace(MUTATIONS[0], **{field: value})))
    assert len(found) == 1 and said in found[0]
