"""Configuration: one parser for YAML and flags, plugins by file name, one-line errors that name the remedy."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from visgen import config as configs
from visgen.config import UserError, build, dump, kind_of, kinds, load, plugin, plugin_config, read_yaml, run_program

PLUGINS = {
    "toys/__init__.py": """
        from abc import ABC, abstractmethod
        class Toy(ABC):
            @abstractmethod
            def play(self): ...
    """,
    "toys/_shared.py": "",
    "toys/ball.py": """
        from dataclasses import dataclass
        from toys import Toy
        @dataclass(frozen=True)
        class Config:
            size: int = 1
            colour: str = "red"
        class Helper: ...
        class Ball(Toy):
            def __init__(self, config, owner, name=""):
                self.config, self.owner, self.name = config, owner, name
            def play(self): ...
    """,
    "toys/car.py": """
        from dataclasses import dataclass
        from typing import Any
        from toys import Toy
        from visgen.config import plugin
        @dataclass(frozen=True)
        class Config:
            size: int = 2
            speed: float = 1.5
            part: Any = plugin("parts", "wheel")
        class Car(Toy):
            def play(self): ...
        class Truck(Toy):
            def play(self): ...
    """,
    "parts/__init__.py": "",
    "parts/none.py": """
        from dataclasses import dataclass
        @dataclass(frozen=True)
        class Config:
            why: str = "a file may be called none"
    """,
    "parts/wheel.py": """
        from dataclasses import dataclass
        @dataclass(frozen=True)
        class Config:
            radius: float = 1.0
            spokes: tuple[int, ...] = (3, 4)
    """,
}


@pytest.fixture(scope="module", autouse=True)
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two plugin packages on disk: toys (ball, car) and parts (none, wheel)."""
    root = tmp_path_factory.mktemp("plugins")
    for name, text in PLUGINS.items():
        (root / name).parent.mkdir(exist_ok=True)
        indent = len(text.lstrip("\n")) - len(text.lstrip("\n").lstrip())
        (root / name).write_text("\n".join(line[indent:] for line in text.splitlines()))
    sys.path.insert(0, str(root))
    yield
    sys.path.remove(str(root))
    for name in [m for m in sys.modules if m.split(".")[0] in ("toys", "parts")]:
        del sys.modules[name]


@dataclass(frozen=True)
class Inner:
    """Inner.

    Attributes:
        rate, flag, seeds, pair, mode, name, path, limit: of every type there is.
    """

    rate: float = 1.0
    flag: bool = False
    seeds: tuple[int, ...] = ()
    pair: tuple[float, float] = (0.0, 1.0)
    mode: Literal["fast", "slow"] = "fast"
    name: str | None = None
    path: Path | None = None
    limit: int | None = 5


@dataclass(frozen=True)
class Top:
    """Top.

    Attributes:
        count: how many.
        text, active, long_name, words: plain fields.
        inner, toy, spare: parts.
    """

    count: int = 1
    text: str = ""
    active: bool = True
    long_name: int = 3
    words: tuple[str, ...] = ("a",)
    inner: Inner = field(default_factory=Inner)
    toy: Any = plugin("toys", "ball")
    spare: Any = plugin("toys", None)


@dataclass(frozen=True)
class Kinded:
    """A part that is no plugin but has a `kind` of its own."""

    kind: str = "x"
    size: int = 1


@dataclass(frozen=True)
class Holder:
    """Holder."""

    part: Kinded = field(default_factory=Kinded)


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(text: str, name: str = "a.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def ball(**values: Any) -> Any:
    return plugin_config("toys", "ball", **values)


def car(**values: Any) -> Any:
    return plugin_config("toys", "car", **values)


def refused(*argv: str, values: Any = None, cls: type = Top) -> str:
    with pytest.raises(UserError) as caught:
        load(cls, argv, values)
    message = str(caught.value)
    assert "\n" not in message and message.strip() == message and len(message) > 10
    return message


# ------------------------------------------------------------------------------------------------- values by flag

FLAGS = [
    (["--count=-1"], {"count": -1}),
    (["--count", "-1"], {"count": -1}),
    (["--count", "2", "--count", "3"], {"count": 3}),
    (["--inner.rate", "1e-4"], {"inner.rate": 1e-4}),
    (["--inner.rate", "-1e-4"], {"inner.rate": -1e-4}),
    (["--inner.rate=-.5"], {"inner.rate": -0.5}),
    (["--inner.rate", "3"], {"inner.rate": 3.0}),
    (["--inner.rate", "inf"], {"inner.rate": float("inf")}),
    (["--inner.seeds", "-1", "-2"], {"inner.seeds": (-1, -2)}),
    (["--inner.seeds=-1"], {"inner.seeds": (-1,)}),
    (["--inner.seeds"], {"inner.seeds": ()}),
    (["--inner.seeds", "1", "2", "--inner.seeds", "3"], {"inner.seeds": (3,)}),
    (["--inner.pair", "-1e-3", "2"], {"inner.pair": (-1e-3, 2.0)}),
    (["--words", "ankle boot", "-1", ""], {"words": ("ankle boot", "-1", "")}),
    (["--words"], {"words": ()}),
    (["--text", "a b  c"], {"text": "a b  c"}),
    (["--text="], {"text": ""}),
    (["--text", ""], {"text": ""}),
    (["--text=a=b"], {"text": "a=b"}),
    (["--text=-abc"], {"text": "-abc"}),
    (["--text=--count"], {"text": "--count"}),
    (["--text=x_y.kind"], {"text": "x_y.kind"}),
    (["--text", "None"], {"text": "None"}),
    (["--inner.name", "None"], {"inner.name": None}),
    (["--inner.name", "n"], {"inner.name": "n"}),
    (["--inner.path", "a/b c"], {"inner.path": Path("a/b c")}),
    (["--inner.limit", "None"], {"inner.limit": None}),
    (["--inner.mode", "slow"], {"inner.mode": "slow"}),
    (["--long-name", "4"], {"long_name": 4}),
    (["--long_name", "4"], {"long_name": 4}),
    (["--long_name=4"], {"long_name": 4}),
    (["--inner.flag"], {"inner.flag": True}),
    (["--inner.flag", "--count", "2"], {"inner.flag": True, "count": 2}),
    (["--inner.flag", "True"], {"inner.flag": True}),
    (["--inner.flag=False"], {"inner.flag": False}),
    (
        ["--inner.flag", "true", "--active", "false", "--text", "false"],
        {"inner.flag": True, "active": False, "text": "false"},
    ),
    (["--inner.flag=true", "--active=false", "--text=true"], {"inner.flag": True, "active": False, "text": "true"}),
    (["--inner.flag", "--text", "true"], {"inner.flag": True, "text": "true"}),
    (["--inner.flag", "True", "--words", "x", "true"], {"inner.flag": True, "words": ("x", "true")}),
    (["--no-active"], {"active": False}),
    (["--no_active", "--count", "2"], {"active": False, "count": 2}),
    (["--inner.flag", "--inner.no-flag"], {"inner.flag": False}),
    (["--toy.size", "5"], {"toy": {"size": 5}}),
    (["--toy.kind", "car", "--toy.speed", "2"], {"toy": car, "toy.speed": 2.0}),
    (["--toy.speed=2", "--toy.kind=car"], {"toy": car, "toy.speed": 2.0}),
    (["--spare.kind", "none"], {"spare": None}),
    (["--spare.kind", "car", "--spare.part.kind", "none"], {"spare": car, "spare.part": "none"}),
    (["--toy.kind", "car", "--toy.part.radius", "3"], {"toy": car, "toy.part.radius": 3.0}),
]


def _set(config: Any, key: str, value: Any) -> Any:
    head, _, rest = key.partition(".")
    old = getattr(config, head)
    if rest:
        return dataclasses.replace(config, **{head: _set(old, rest, value)})
    if callable(value):
        value = value()
    elif isinstance(value, dict):
        value = dataclasses.replace(old, **value)
    elif key == "part" and value == "none":
        value = plugin_config("parts", "none")
    return dataclasses.replace(config, **{head: value})


@pytest.mark.parametrize(("argv", "expected"), FLAGS, ids=[" ".join(a) for a, _ in FLAGS])
def test_flags(argv: list[str], expected: dict[str, Any]) -> None:
    config = Top()
    for key, value in expected.items():
        config = _set(config, key, value)
    found = load(Top, argv)
    assert found == config
    assert repr(found) == repr(config), "True == 1: types too"


def test_defaults_and_types() -> None:
    config = load(Top)
    assert config == Top() and type(config) is Top and type(config.inner) is Inner
    assert type(config.toy) is type(ball()) and config.spare is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.count = 2


def test_help_lists_the_fields_and_their_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        load(Top, ["--toy.kind", "car", "--help"], prog="draw.py")
    shown = capsys.readouterr().out
    assert stop.value.code == 0
    for text in ("draw.py", "how many", "--count", "--inner.rate", "--toy.speed", "--toy.part.radius"):
        assert text in shown


def test_help_shows_the_kinds_of_a_part_that_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Top, ["--help"], prog="draw.py")
    shown = capsys.readouterr().out
    assert "--spare.kind {none,ball,car}" in shown and "--spare {None}" not in shown


def test_a_part_with_its_own_kind_is_no_plugin() -> None:
    assert load(Holder, ["--part.kind", "z"]) == Holder(Kinded("z"))
    assert load(Holder, values={"part": {"kind": "z", "size": 2}}) == Holder(Kinded("z", 2))
    assert load(Holder, values=dump(Holder(Kinded("q", 3)))) == Holder(Kinded("q", 3))


# -------------------------------------------------------------------------------------------------------- YAML

YAML = """
count: 7
text: "-dash and: colon"
active: no
long_name: 9
words: [x, 1, "y z"]
inner:
  rate: 1e-4
  flag: true
  seeds: [-1, 2]
  pair: [0.25, 1]
  mode: slow
  name: null
  path: a/b
toy: {kind: car, speed: 3, part: {kind: wheel, spokes: []}}
"""


def test_yaml_fills_every_kind_of_field(write: Any) -> None:
    inner = Inner(1e-4, True, (-1, 2), (0.25, 1.0), "slow", None, Path("a/b"))
    toy = car(speed=3.0, part=plugin_config("parts", "wheel", spokes=()))
    assert load(Top, [write(YAML)]) == Top(7, "-dash and: colon", False, 9, ("x", "1", "y z"), inner, toy)


def test_flags_win_over_values_over_later_files_over_earlier_files(write: Any) -> None:
    first, second = write("count: 1\nlong_name: 1\ntext: one"), write("count: 2\nlong_name: 2", "b.yaml")
    assert load(Top, [first, second]) == Top(2, "one", long_name=2)
    assert load(Top, [first, second], {"count": 3}) == Top(3, "one", long_name=2)
    assert load(Top, [first, second, "--count", "4"], {"count": 3}) == Top(4, "one", long_name=2)


def test_a_flag_replaces_a_list_and_reverts_a_boolean(write: Any) -> None:
    path = write("words: [x, y, z]\ninner: {flag: true, seeds: [1, 2]}")
    assert load(Top, [path, "--words", "q", "--inner.no-flag", "--inner.seeds"]) == Top(words=("q",))


def test_empty_yaml_is_the_default(write: Any) -> None:
    assert load(Top, [write("# nothing\n")]) == Top()


def test_base_chains_merge_deeply_and_relative_to_the_file(write: Any, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write("count: 1\ninner: {rate: 2, mode: slow}\nwords: [a, b]", "grand.yaml")
    write("base: ../grand.yaml\ncount: 2\ninner: {seeds: [4]}", "deep/parent.yaml")
    child = write("base: deep/parent.yaml\ninner: {rate: 3}\nwords: [c]")
    expected = Top(2, words=("c",), inner=Inner(3.0, seeds=(4,), mode="slow"))
    assert load(Top, [child]) == expected
    assert read_yaml(Path(child)) == {"count": 2, "inner": {"rate": 3, "mode": "slow", "seeds": [4]}, "words": ["c"]}


def test_anchors_and_merge_keys_of_yaml_work(write: Any) -> None:
    text = "inner: &i {rate: 2, flag: true}\n"
    assert load(Top, [write(text + "toy: {kind: ball}")]).inner == Inner(2.0, True)
    assert read_yaml(Path(write("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}"))) == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
    }


# ----------------------------------------------------------------------------------------------------- plugins


def test_switching_the_kind_drops_the_parents_keys(write: Any) -> None:
    path = write("toy: {kind: car, size: 9, speed: 3}")
    assert load(Top, [path, "--toy.kind", "ball"]).toy == ball()
    child = write("base: a.yaml\ntoy: {kind: ball, colour: blue}", "b.yaml")
    assert load(Top, [child]).toy == ball(colour="blue")
    assert load(Top, [path], {"toy": {"kind": "ball"}}).toy == ball()
    assert load(Top, [path, "--toy.kind", "ball", "--toy.size", "4"]).toy == ball(size=4)
    assert load(Top, [write("spare: {kind: car, size: 9}"), "--spare.kind", "none"]).spare is None


def test_naming_the_same_kind_again_keeps_them(write: Any) -> None:
    path = write("toy: {kind: car, size: 9}")
    assert load(Top, [path, "--toy.kind", "car"]).toy == car(size=9)
    assert load(Top, [write("base: a.yaml\ntoy: {kind: car, speed: 2}", "b.yaml")]).toy == car(size=9, speed=2.0)
    assert load(Top, [path, "--toy.speed", "2"]).toy == car(size=9, speed=2.0)


def test_a_kind_left_to_its_default_counts_as_named(write: Any) -> None:
    """`size` was meant for the default kind `ball`; `car` has a field of that name by accident."""
    path = write("toy: {size: 9, colour: blue}")
    assert load(Top, [path]).toy == ball(size=9, colour="blue")
    assert load(Top, [path, "--toy.kind", "car"]).toy == car()
    assert load(Top, [write("base: a.yaml\ntoy: {kind: car}", "b.yaml")]).toy == car()
    assert load(Top, [path, "--toy.kind", "ball"]).toy == ball(size=9, colour="blue")


def test_a_kind_may_be_given_by_name_alone(write: Any) -> None:
    path = write("toy: car")
    assert load(Top, [path]).toy == car()
    assert load(Top, [write("base: a.yaml\ntoy: {speed: 2}", "b.yaml")]).toy == car(speed=2.0)
    assert load(Top, [write("toy: {kind: car, speed: 2}")], {"toy": "car"}).toy == car(speed=2.0)
    assert load(Top, [path], {"toy": "ball"}).toy == ball()


def test_nested_kinds_switch_alone(write: Any) -> None:
    path = write("toy: {kind: car, speed: 3, part: {kind: wheel, radius: 4}}")
    switched = load(Top, [path, "--toy.part.kind", "none"]).toy
    assert switched == car(speed=3.0, part=plugin_config("parts", "none"))


@pytest.mark.parametrize("empty", ["none", "None", None, {"kind": "none"}, {"kind": None}])
def test_a_plugin_may_be_none(empty: Any) -> None:
    assert load(Top, values={"spare": empty}) == Top()
    with pytest.raises(UserError, match=r"toy\.kind is none, but one is needed; allowed: ball, car"):
        load(Top, values={"toy": empty})


def test_none_may_be_a_file() -> None:
    assert load(Top, values={"toy": {"kind": "car", "part": "none"}}).toy == car(part=plugin_config("parts", "none"))
    with pytest.raises(UserError, match=r"toy\.part\.kind is none, but one is needed; allowed: none, wheel"):
        load(Top, values={"toy": {"kind": "car", "part": None}})


def test_kinds_are_the_files_of_the_package() -> None:
    assert kinds("toys") == ["ball", "car"]
    assert kind_of(ball()) == "ball"


def test_build_finds_the_one_implementation() -> None:
    built = build(ball(size=3), "me", name="b")
    assert (type(built).__name__, built.config.size, built.owner, built.name) == ("Ball", 3, "me", "b")
    with pytest.raises(TypeError, match=r"toys\.car must define exactly one implementation.*Car.*Truck"):
        build(car())


# -------------------------------------------------------------------------------------------------- round trip

plain = st.builds(
    Top,
    count=st.integers(-(2**40), 2**40),
    text=st.text(max_size=12),
    active=st.booleans(),
    words=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="-"), max_size=6), max_size=3).map(tuple),
    inner=st.builds(
        Inner,
        rate=st.floats(allow_nan=False),
        flag=st.booleans(),
        seeds=st.lists(st.integers(-99, 99), max_size=3).map(tuple),
        pair=st.tuples(st.floats(-1, 1), st.floats(allow_nan=False)),
        mode=st.sampled_from(["fast", "slow"]),
        name=st.none() | st.text(max_size=6).filter(lambda s: s != "None"),
        path=st.none() | st.sampled_from([Path("a"), Path("/b c/-d"), Path("-e")]),
        limit=st.none() | st.integers(),
    ),
)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(config=plain, data=st.data())
def test_dump_and_load_round_trip(config: Top, data: st.DataObject) -> None:
    wheel = data.draw(
        st.builds(lambda r, s: plugin_config("parts", "wheel", radius=r, spokes=s), st.floats(-9, 9), st.tuples())
    )
    toys = st.builds(ball, size=st.integers(), colour=st.text(max_size=5)) | st.just(car(part=wheel))
    config = dataclasses.replace(config, toy=data.draw(toys), spare=data.draw(st.none() | toys))
    assert load(Top, values=yaml.safe_load(yaml.safe_dump(dump(config)))) == config


def test_dump_is_plain_and_names_kinds() -> None:
    dumped = dump(Top(inner=Inner(path=Path("x")), toy=car()))
    assert dumped["toy"] == {
        "kind": "car",
        "size": 2,
        "speed": 1.5,
        "part": {"kind": "wheel", "radius": 1.0, "spokes": [3, 4]},
    }
    assert dumped["inner"]["path"] == "x" and dumped["spare"] is None and dumped["words"] == ["a"]


# ------------------------------------------------------------------------------------------------------ errors

BAD_FLAGS = [
    (["--cout", "2"], ["--cout", "did you mean '--count'", "--help"]),
    (["--inner.rat", "2"], ["--inner.rat", "'--inner.rate'"]),
    (["--toy.speed", "2"], ["--toy.speed", "--toy.kind car has it"]),
    (["--toy.sized", "2"], ["--toy.sized", "'--toy.size'"]),
    (["--count", "x"], ["--count", "'x'", "int"]),
    (["--count", "2.5"], ["--count", "'2.5'"]),
    (["--count"], ["--count", "Missing value"]),
    (["--count", "--active"], ["--count", "Missing value"]),
    (["--inner.mode", "quick"], ["--inner.mode", "'quick'", "'fast'", "'slow'"]),
    (["--inner.flag", "maybe"], ["--inner.flag", "'maybe'", "'True'"]),
    (["--no-active=False"], ["--no-active", "takes no value", "'False'"]),
    (["--no-active", "True"], ["--no-active", "takes no value", "'True'"]),
    (["--active", "false", "false"], ["false"]),
    (["--no-count"], ["--no-count"]),
    (["--inner.pair", "1"], ["--inner.pair", "2 values, apart by spaces"]),
    (["--toy.kind", "bal"], ["toy.kind", "'bal'", "did you mean 'ball'", "allowed: ball, car"]),
    (["--toy.kind", "_shared"], ["toy.kind", "'_shared'", "allowed: ball, car"]),
    (["--toy.kind", "../ball"], ["toy.kind", "allowed: ball, car"]),
    (["--toy.kind"], ["--toy.kind needs a value"]),
    (["--toy.kind", "car", "--toy.part.kind", "x"], ["toy.part.kind", "'x'", "allowed: none, wheel"]),
    (["--tyo.kind", "car"], ["'tyo'", "did you mean 'toy", "allowed here"]),
    (["--count.kind", "car"], ["'count'", "int"]),
    (["--inner", "3"], ["--inner"]),
    (["--spare.size", "3"], ["--spare.size"]),
    (["--count", "1", "more.yaml"], ["more.yaml", "YAML files stand before the flags"]),
    (["--"], ["--"]),
    (["-c"], ["-c"]),
    ([""], ["is a directory"]),
    (["missing.yaml"], ["missing.yaml does not exist", "configs/"]),
]


@pytest.mark.parametrize(("argv", "named"), BAD_FLAGS, ids=[" ".join(a) for a, _ in BAD_FLAGS])
def test_bad_flags_name_the_thing_and_the_remedy(argv: list[str], named: list[str]) -> None:
    message = refused(*argv)
    assert all(text in message for text in named), message


BAD_YAML = [
    ("cout: 2", ["'cout'", "did you mean 'count'", "allowed here: count"]),
    ("inner: {rat: 2}", ["'inner.rat'", "did you mean 'inner.rate'", "allowed here: rate"]),
    ("toy: {speed: 2}", ["'toy.speed'", "allowed here", "colour"]),
    ("1: 2", ["'1'"]),
    ("count: many", ["count", "'many'"]),
    ("count: [1]", ["'count' must be int", "[1]"]),
    ("count: {a: 1}", ["'count' must be int", "{'a': 1}"]),
    ("count: null", ["count", "None"]),
    ("count: true", ["count", "True"]),
    ("active: 3", ["active", "'3'", "'True'"]),
    ("text: [a, b]", ["'text' must be str"]),
    ("words: [[a], [b]]", ["'words' must be tuple[str, ...]"]),
    ("inner: 3", ["'inner' must be a mapping with keys rate", "3"]),
    ("inner: [1]", ["'inner' must be a mapping"]),
    ("inner: {pair: [1, 2, 3]}", ["'inner.pair' must be tuple[float, float]", "[1, 2, 3]"]),
    ("inner: {mode: quick}", ["inner.mode", "'quick'", "'slow'"]),
    ("inner: {limit: [1]}", ["'inner.limit' must be", "int", "None"]),
    ("toy: 3", ["toy.kind must be a name", "3", "allowed: ball, car"]),
    ("toy: {kind: [car]}", ["toy.kind must be a name", "allowed: ball, car"]),
    ("toy: {kind: boat}", ["toy.kind", "'boat'", "allowed: ball, car"]),
    ("toy: boat", ["toy.kind", "'boat'", "allowed: ball, car"]),
    ("spare: {size: 3}", ["'spare' is none", "spare.kind"]),
    ("spare: {kind: none, size: 3}", ["'spare' is none", "spare.kind"]),
    ("count: 1\ncount: 2", ["not valid YAML", "'count' stands twice"]),
    ("inner: {rate: 1, rate: 2}", ["not valid YAML", "'rate' stands twice"]),
    ("a: [1", ["not valid YAML", "line"]),
    ("a: b: c", ["not valid YAML"]),
    ("count: 2024-13-41", ["not valid YAML"]),
    ("- 1", ["must hold `key: value` lines", "list"]),
    ("word", ["must hold `key: value` lines", "str"]),
    ("base: [b.yaml]", ["`base:` must be the path of one YAML file"]),
    ("base: 3", ["`base:` must be the path of one YAML file", "3"]),
    ("base: gone.yaml", ["gone.yaml", "(base of", "a.yaml", "does not exist"]),
    ("base: a.yaml", ["chain comes back to itself"]),
]


@pytest.mark.parametrize(("text", "named"), BAD_YAML, ids=[t.replace("\n", " ") for t, _ in BAD_YAML])
def test_bad_yaml_names_the_thing_and_the_remedy(write: Any, text: str, named: list[str]) -> None:
    message = refused(write(text))
    assert all(part in message for part in named), message


def nested(key: str, first: str, rest: str) -> str:
    """A line for each letter, whose value is nine times that of the line before."""
    lines = [f"b: &b {first}"]
    for old, new in itertools.pairwise("bcdefghi"):
        lines.append(f"{new}: &{new} {rest.format(', '.join([f'*{old}'] * 9))}")
    return "\n".join([*lines, f"{key}: *i"])


ABSURD_YAML = {
    "anchors of lists": (nested("count", "[x, x]", "[{}]"), "more than 100,000 values"),
    "anchors of mappings": (nested("count", "{x: 1}", "{{<<: [{}]}}"), "more than 100,000 values"),
    "a value within itself": ("count: &a [*a]", "contains itself"),
    "deep lists": ("count: " + "[" * 5000, "more than 50 deep"),
    "deep mappings": ("count: " + "{a: " * 5000, "more than 50 deep"),
    "deep blocks": ("- " * 5000, "more than 50 deep"),
    "many values": (f"count: [{'x, ' * 50_000}]", "'count' must be int"),
    "a long text": (f"count: {'x' * 1_000_000}", "count must be an int"),
    "a long kind": (f"toy: {'x' * 1_000_000}", "toy.kind"),
    "a long key": (f"? {'x' * 100_000}\n: 1", "unknown key"),
    "a long number": (f"count: 0x{'f' * 5000}", "a number has 5002 digits"),
    "control characters": ('"\\e[2J\\u202e\\n[/x]": 1', r"unknown key '\x1b[2J\u202e [/x]'"),
    "control characters in a value": ('count: "\\e[2J[/x]"', r"'\x1b[2J[/x]'"),
}


@pytest.mark.parametrize("kind", ABSURD_YAML)
def test_absurd_yaml_is_one_short_line(write: Any, kind: str) -> None:
    text, named = ABSURD_YAML[kind]
    message = refused(write(text))
    assert named in message and len(message) < 1000 and message.isprintable()


def test_a_long_chain_of_bases_is_refused(write: Any) -> None:
    for i in range(60):
        write(f"base: {i + 1}.yaml", f"{i}.yaml")
    assert "longer than 50 files" in refused(write("base: 0.yaml"))


def test_a_longer_loop_of_bases_is_found(write: Any) -> None:
    write("base: b.yaml", "c.yaml")
    write("base: c.yaml", "b.yaml")
    assert "comes back to itself" in refused(write("base: b.yaml"))


def test_files_that_are_no_text(tmp_path: Path, write: Any) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"count: \xff\xfe")
    assert "is not valid YAML" in refused(str(tmp_path / "bytes.yaml"))
    assert "is a directory" in refused(str(tmp_path))
    if os.geteuid() != 0:
        (tmp_path / "secret.yaml").write_text("count: 1")
        (tmp_path / "secret.yaml").chmod(0)
        assert "cannot be read" in refused(str(tmp_path / "secret.yaml"))


def test_a_value_refused_by_its_class_is_a_user_error() -> None:
    from visgen.sample import SampleConfig

    assert "guidance.scale -1.0 must be" in refused("--guidance.scale", "-1", cls=SampleConfig)
    assert "top_p 0.0 must be" in refused("--warp.top-p", "0", cls=SampleConfig)


def test_programs_print_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> None:
        raise UserError("two\nlines")

    with pytest.raises(SystemExit) as stop:
        run_program(fail)
    assert stop.value.code == 2 and capsys.readouterr().err == "error: two lines\n"
    assert run_program(lambda: 7) == 7
    with pytest.raises(KeyError):
        run_program(lambda: {}["a bug stays a traceback"])


def test_names_from_outside_reach_no_terminal_raw() -> None:
    """In a process of its own, since a test's logging is not that of a program."""
    program = (
        "import logging; from visgen.config import UserError, run_program\n"
        "def main():\n"
        "    logging.getLogger('visgen.data.x').warning('class %s', '\\x1b[2J\\n[/x]' * 1000)\n"
        "    logging.getLogger('other').warning('two\\nlines')\n"
        "    raise UserError('folder \\x1b]0;x\\x07\\u202e\\x85\\udcff')\n"
        "run_program(main)"
    )
    left = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    ours, first, second, last = left.stderr.splitlines()
    assert left.returncode == 2 and (first, second) == ("two", "lines")
    assert ours.isprintable() and ours.startswith(r"class \x1b[2J\n[/x]") and len(ours) <= 2000
    assert last == r"error: folder \x1b]0;x\x07\u202e \udcff"


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["at the end", "at once"])
def test_who_stops_reading_gets_no_traceback(unbuffered: str) -> None:
    program = "import time; from visgen.config import run_program; time.sleep(0.5); run_program(lambda: print('line'))"
    left = subprocess.run(
        ["bash", "-c", '"$0" -c "$1" | true; exit "${PIPESTATUS[0]}"', sys.executable, program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    assert (left.returncode, left.stderr) == (141, "")


def test_another_broken_pipe_stays_a_traceback() -> None:
    def fail() -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run_program(fail)


# ------------------------------------------------------------------------------------------------------- fuzzing

WORDS = (
    "--count --count=3 --inner.rate --inner.flag --no-active --inner.no-flag --toy.kind --toy.kind=car --toy.part.kind "
    "--long_name=1 --toy.speed --words --inner.pair ball car none 1 -1 1e-4 True false x --spare.kind --spare.size=1 "
    "--inner.seeds --text -- - -1e --= --. --no- --inner. --toy.kind= --.kind=x --a..kind --inner.kind "
    "--inner.mode=slow"
)
words = st.sampled_from([*WORDS.split(), "\n", ""]) | st.text(max_size=4)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(argv=st.lists(words, max_size=6))
def test_any_command_line_is_read_or_refused(argv: list[str]) -> None:
    if "-h" in argv:
        return
    try:
        config = load(Top, argv)
    except UserError:
        return
    assert type(config) is Top and load(Top, values=dump(config)) == config


trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.sampled_from(["car", "none", "", "-1", "x", "--active"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["kind", "size", "speed", "part", "toy", "inner", "count", "words", "rate", "pair", "spare", "z"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
keys = st.sampled_from(["count", "text", "active", "words", "inner", "toy", "spare", "long_name", "zz"])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(first=st.dictionaries(keys, trees, max_size=4), second=st.dictionaries(keys, trees, max_size=2))
def test_any_tree_of_values_is_read_or_refused(first: dict[str, Any], second: dict[str, Any]) -> None:
    layers = [configs._nest(key, value) for key, value in second.items()]
    try:
        config = load(Top, values=first)
        for layer in layers:
            config = load(Top, values={**dump(config), **layer})
    except UserError:
        return
    assert type(config) is Top


def test_ctrl_c_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        run_program(main)
    assert left.value.code == 130 and capsys.readouterr().err == "interrupted\n"
