"""Configuration: frozen dataclasses filled by YAML and the command line through one parser (tyro).

A YAML file is flattened into flags that stand ahead of the user's flags, so both meet the same parser, the same
checks and the same `--help`. A *plugin* field (`sampler: Any = plugin("visgen.samplers", "ar")`) is filled by the
`Config` of the file that its `kind` names: `kind: sjd` means `visgen/samplers/sjd.py`. There is no registry.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import pkgutil
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import tyro

from visgen import __version__
from visgen.checks import UserError, check, cut, shown
from visgen.installed import REPOSITORY as REPOSITORY  # relative paths of what it ships are looked up here too
from visgen.parser import parse
from visgen.program import run_program as run_program
from visgen.yaml_files import layers, merge

T = TypeVar("T")

BOOLEANS = (bool, bool | None)
_hints: Callable[[Any], dict[str, Any]] = functools.cache(get_type_hints)


def plugin(package: str, kind: str | None) -> Any:
    """A dataclass field that holds the `Config` of one file of `package`; with `kind=None` it may be, and is, empty."""
    return dataclasses.field(
        default_factory=(lambda: None) if kind is None else (lambda: plugin_config(package, kind)),
        metadata={"plugin": package, "kind": kind},
    )


def kinds(package: str) -> list[str]:
    """Names of the implementations in a plugin package: its files, read from disk."""
    found = importlib.import_module(package)
    return sorted(m.name for m in pkgutil.iter_modules(found.__path__) if not m.name.startswith("_"))


def kind_of(config: Any) -> str:
    """The `kind` of a plugin's config: the name of the file that defines it."""
    return type(config).__module__.rpartition(".")[2]


def _plugin_module(package: str, kind: str, where: str = "kind") -> types.ModuleType:
    allowed = kinds(package)
    if kind not in allowed:
        raise UserError(
            f"{where}: unknown kind '{cut(kind, 100)}'{_suggest(kind, allowed)}; allowed: {', '.join(allowed)}"
        )
    return importlib.import_module(f"{package}.{kind}")


def plugin_config(package: str, kind: str, **values: Any) -> Any:
    """The `Config` of `package/kind.py` with the given fields."""
    return _plugin_module(package, kind).Config(**values)


def build(config: Any, *objects: Any, **named: Any) -> Any:
    """Constructs the one class of a plugin file that implements its package's contract: `cls(config, *objects)`.

    Raises:
        UserError: a value is out of its range.
    """
    check(config, type(config).__module__.split(".")[-2].removesuffix("s"))
    return implementation(config)(config, *objects, **named)


def implementation(config: Any) -> type:
    """The one class of a plugin file, of whose `Config` this is, that implements its package's contract."""
    module = sys.modules[type(config).__module__]
    package = importlib.import_module(module.__name__.rpartition(".")[0])
    contracts = tuple(v for v in vars(package).values() if inspect.isabstract(v) and v.__module__ == package.__name__)
    found = [
        v
        for v in vars(module).values()
        if isinstance(v, type) and v.__module__ == module.__name__ and issubclass(v, contracts)
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__name__} must define exactly one implementation of its contract, found {found}")
    return found[0]


# ---------------------------------------------------------------------------------------------- load and dump


def load(cls: type[T], argv: Sequence[str] = (), values: dict[str, Any] | None = None, prog: str | None = None) -> T:
    """Fills `cls` from leading YAML paths in `argv`, then `values`, then the flags of `argv` (later ones win). `--help`
    and `--version` print and exit.

    Raises:
        UserError: an unknown key, a value of the wrong type or out of its range, an unknown `kind` or an unreadable
            YAML file.
    """
    argv = list(argv)
    if argv[:1] == ["--version"]:
        print(f"visgen {__version__}")
        raise SystemExit(0)
    files: list[dict[str, Any]] = []
    while argv and not argv[0].startswith("-"):
        files += layers(Path(argv.pop(0)))
    chosen, argv = _take_kinds(argv)
    merged: dict[str, Any] = {}
    for layer in (*files, values or {}, *(_nest(key, {"kind": kind}) for key, kind in chosen.items())):
        merged = merge(_name_kinds(merged, _concretise(cls, merged, "")), layer)
    concrete = _concretise(cls, merged, "")
    leaves = dict(_leaves(concrete, ""))
    flags = _flatten(merged, concrete, leaves, "") + _check_flags(argv, leaves, concrete)
    config = _plain(parse(concrete, flags, prog), cls)
    check(config)
    return config


def dump(config: Any) -> Any:
    """Nested plain values of a config, `kind` included: `load(type(config), values=dump(config)) == config`."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        out: dict[str, Any] = {}
        for field in dataclasses.fields(config):
            value = getattr(config, field.name)
            if field.metadata.get("plugin"):
                out[field.name] = None if value is None else {"kind": kind_of(value), **dump(value)}
            else:
                out[field.name] = dump(value)
        return out
    if isinstance(config, tuple | list):
        return [dump(v) for v in config]
    if isinstance(config, Path):
        return str(config)
    return config


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Values by dotted name of what `dump` nests."""
    if not isinstance(values, dict):
        return {prefix: values}
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{prefix}.{key}" if prefix else key)
    return out


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping with its `base:` parents (paths relative to the file) merged beneath it."""
    merged: dict[str, Any] = {}
    for layer in layers(Path(path)):
        merged = merge(merged, layer)
    return merged


# -------------------------------------------------------------------------------------------------- internals


def _suggest(name: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(name[:100], allowed, n=1)  # its time grows with the square of the length
    return f", did you mean '{close[0]}'?" if close else ""


def _name_kinds(values: dict[str, Any], concrete: type) -> dict[str, Any]:
    """Writes out the `kind` of every plugin in `values` that is left to its default or given by name alone."""
    hints, out = _hints(concrete), dict(values)
    for field in dataclasses.fields(concrete):
        hint, value = hints[field.name], values.get(field.name)
        if dataclasses.is_dataclass(hint) and isinstance(value, dict):
            out[field.name] = value = _name_kinds(value, hint)  # type: ignore[arg-type]
        if field.metadata.get("plugin") and dataclasses.is_dataclass(hint) and isinstance(value, dict | str):
            out[field.name] = {"kind": hint.kind, **(value if isinstance(value, dict) else {})}  # type: ignore[union-attr]
    return out


def _nest(dotted: str, value: Any) -> dict[str, Any]:
    for part in reversed(dotted.split(".")):
        value = {part: value}
    return value


def _take_kinds(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Splits `--a.b.kind X` off the flags: kinds decide which fields exist, so they are read first."""
    chosen: dict[str, str] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        match = re.fullmatch(r"--([\w.-]+)\.kind(?:=(.*))?", word)
        if not match:
            rest.append(word)
            continue
        key = match[1].replace("-", "_")
        kind = match[2] if match[2] is not None else next(words, None)
        if kind is None:
            raise UserError(f"--{match[1]}.kind needs a value")
        chosen[key] = kind
    return chosen, rest


def _concretise(cls: type, values: dict[str, Any], prefix: str) -> type:
    """A subclass of `cls` whose plugin fields have the type that their `kind` in `values` names."""
    hints = _hints(cls)
    fields: list[tuple[str, Any, str | None]] = []
    for field in dataclasses.fields(cls):
        given, where = values.get(field.name), f"{prefix}{field.name}"
        package = field.metadata.get("plugin")
        if package:
            kind = given.get("kind", field.metadata["kind"]) if isinstance(given, dict) else given
            if given is None and field.name not in values:
                kind = field.metadata["kind"]
            if kind is None or (kind in ("none", "None") and "none" not in kinds(package)):
                if field.metadata["kind"] is not None:
                    raise UserError(f"{where}.kind is none, but one is needed; allowed: {', '.join(kinds(package))}")
                nothing: Any = Annotated[None, tyro.conf.arg(name=f"{field.name}.kind", metavar=_choices(package))]
                fields.append((field.name, nothing, None))
                continue
            if not isinstance(kind, str):
                raise UserError(f"{where}.kind must be a name, got {shown(kind)}; allowed: {', '.join(kinds(package))}")
            config = _plugin_module(package, kind, f"{where}.kind").Config
            inner = _concretise(config, given if isinstance(given, dict) else {}, f"{where}.")
            kind_type: Any = Literal[tuple(kinds(package))]
            fields.append((field.name, _subclass(inner, (("kind", kind_type, kind),)), None))
        elif dataclasses.is_dataclass(hints[field.name]):
            inner = _concretise(hints[field.name], given if isinstance(given, dict) else {}, f"{where}.")
            if inner is not hints[field.name]:
                fields.append((field.name, inner, None))
    return _subclass(cls, tuple(fields)) if fields else cls


def _choices(package: str) -> str:
    """The kinds of a package as `--help` shows them where there is none yet."""
    return f"{{none,{','.join(k for k in kinds(package) if k != 'none')}}}"


@functools.cache  # making a class takes milliseconds, and the parser's own work on it more
def _subclass(cls: type, fields: tuple[tuple[str, Any, str | None], ...]) -> type:
    """`cls` with other types of fields: (name, type, default); a dataclass is its own default."""
    made: list[tuple[str, Any, Any]] = []
    for name, kind, default in fields:
        known = cls.__dataclass_fields__.get(name)  # type: ignore[attr-defined]
        given: Any = {"default_factory": kind} if dataclasses.is_dataclass(kind) else {"default": default}
        made.append((name, kind, dataclasses.field(**given, metadata=known.metadata if known else None)))
    out = dataclasses.make_dataclass(cls.__name__, made, bases=(cls,), frozen=True)
    out.__module__, out.__doc__ = cls.__module__, cls.__doc__
    return out


def _leaves(cls: type, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = _hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        if dataclasses.is_dataclass(kind):
            yield from _leaves(kind, f"{prefix}{field.name}.")  # type: ignore[arg-type]
        else:
            yield f"{prefix}{field.name}", kind


def _flatten(values: dict[str, Any], cls: type, leaves: dict[str, Any], prefix: str) -> list[str]:
    hints = _hints(cls)
    out: list[str] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        hint = hints.get(str(key))
        if hint is None:
            names = [*leaves, *(f"{prefix}{k}" for k in hints)]
            raise UserError(f"unknown key '{cut(name, 200)}'{_suggest(name, names)}; allowed here: {', '.join(hints)}")
        if dataclasses.is_dataclass(hint):
            if isinstance(value, dict):
                out += _flatten(value, hint, leaves, f"{name}.")  # type: ignore[arg-type]
            elif "kind" not in _hints(hint):
                raise UserError(f"'{name}' must be a mapping with keys {', '.join(_hints(hint))}, got {shown(value)}")
        elif hint is type(None):
            if isinstance(value, dict) and set(value) - {"kind"}:
                raise UserError(f"'{name}' is none, so it has no keys; set {name}.kind, got {shown(value)}")
        elif isinstance(value, list | tuple):
            if not _holds(hint, value):
                raise UserError(f"'{name}' must be {_type_name(hint)}, got {shown(list(value))}")
            out += [f"--{name}", *map(str, value)]
        elif isinstance(value, dict):
            raise UserError(f"'{name}' must be {_type_name(hint)}, got {shown(value)}")
        else:
            out.append(f"--{name}={value}")  # one word, so that a text may begin with a dash
    return out


def _holds(hint: Any, value: Sequence[Any]) -> bool:
    """May a field of type `hint` hold a list of this length? (The parser checks its items.)"""
    if any(isinstance(item, dict | list | tuple) for item in value):
        return False
    kinds_of = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    tuples = [get_args(kind) for kind in kinds_of if get_origin(kind) in (tuple, list)]
    return any(... in items or len(items) == len(value) for items in tuples)


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _check_flags(argv: list[str], leaves: dict[str, Any], cls: type) -> list[str]:
    """Names unknown flags; makes the values of boolean fields explicit: `--flag`, `--no-flag`, `--flag true`."""
    known = {name.replace("_", "-"): name for name in leaves}
    out: list[str] = []
    boolean = False  # is the word before a boolean flag that waits for its value?
    for i, word in enumerate(argv):
        if not word.startswith("--") or word == "--help":
            out.append(_boolean(word) if boolean else word)
            boolean = False
            continue
        given, equals, value = word.partition("=")
        name = given[2:].replace("_", "-")
        parent, dot, last = name.rpartition(".")
        positive = parent + dot + last.removeprefix("no-")
        following = argv[i + 1] if i + 1 < len(argv) else "--"
        boolean = leaves.get(known.get(name, "")) in BOOLEANS
        if name in known:
            bare = boolean and not equals and following.startswith("--")
            value = _boolean(value) if boolean else value
            out.append(f"--{known[name]}=True" if bare else f"--{known[name]}{equals}{value}")
        elif leaves.get(known.get(positive, "")) not in BOOLEANS:
            others = _kinds_with(cls, known.get(name, name.replace("-", "_")).split("."))
            hint = f": {others} has it" if others else _suggest(given, [f"--{option}" for option in known])
            raise UserError(f"unknown option '{cut(given, 200)}'{hint}; see --help")
        elif equals or not following.startswith("--"):
            raise UserError(f"{given} takes no value, got {shown(value or following)}")
        else:
            out.append(f"--{known[positive]}=False")
        boolean = boolean and not equals
    return out


def _kinds_with(cls: type, path: list[str]) -> str:
    """The kinds of the plugin at `path` that have the field at its end, as flags; "" where there are none."""
    *parents, last = path
    package = ""
    for name in parents:
        field = getattr(cls, "__dataclass_fields__", {}).get(name)
        if field is None:
            return ""
        package, cls = field.metadata.get("plugin", ""), _hints(cls)[name]
    allowed = kinds(package) if package else []
    having = (kind for kind in allowed if last in _plugin_module(package, kind).Config.__dataclass_fields__)
    return " or ".join(f"--{'.'.join(parents)}.kind {kind}" for kind in having)


def _boolean(word: str) -> str:
    """`true` and `false`, which YAML says, as the parser says them."""
    return word.capitalize() if word in ("true", "false") else word


def _plain(config: Any, cls: type[T]) -> T:
    """The parsed instance as an instance of the classes that the source files define."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            package = field.metadata.get("plugin")
            target = (
                importlib.import_module(type(value).__module__).Config
                if package
                else _dataclass_of(_hints(cls)[field.name])
            )
            value = _plain(value, target)
        out[field.name] = value
    return cls(**out)


def _dataclass_of(hint: Any) -> type:
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(a for a in get_args(hint) if dataclasses.is_dataclass(a))
    return hint
