import unicodedata

import pytest

from visgen.config import UserError
from visgen.data._classes import match_classes, same_classes


def same(trained, given):
    return same_classes(trained, given, "runs/a", "put them back")


def test_equal_names_are_the_same_in_any_unicode_form():
    assert same(["ant", "é"], ["ant", unicodedata.normalize("NFD", "é")]) is None
    assert same([], ["ant"]) is None, "nothing is recorded"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["zebra", "bee"], ["'ant' then", "'zebra' now"]),
        (["bee"], ["'ant' then"]),
        (["ant", "bee", "cow"], ["'cow' now"]),
        (["bee", "ant"], ["label 0 was 'ant'", "'bee' now"]),
        (["ant", "ant", "bee"], ["2 then, 3 now"]),
    ],
)
def test_other_classes_are_refused_by_name(given, named):
    with pytest.raises(UserError) as found:
        same(["ant", "bee"], given)
    assert all(part in str(found.value) for part in ["runs/a", "put them back", *named])


def test_labels_are_matched_by_name():
    assert match_classes(["ant", "bee", "cow"], ["cow", "ant"], "m") == [2, 0]
    assert match_classes(["é", "ant"], ["ant", unicodedata.normalize("NFD", "é")], "m") == [1, 0]
    assert match_classes([], ["cow", "ant"], "m") == [0, 1]


@pytest.mark.parametrize(
    ("trained", "given", "named"),
    [(["ant", "bee"], ["ant", "zebra"], "'zebra'"), (["a", "a"], ["a"], "'a'"), (["a"], ["\x1b[2J"], r"'\x1b[2J'")],
)
def test_labels_that_cannot_be_matched_are_refused(trained, given, named):
    with pytest.raises(UserError) as found:
        match_classes(trained, given, "runs/a")
    assert named in str(found.value) and "\x1b" not in str(found.value)
