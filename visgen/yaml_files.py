"""YAML files with their `base:` parents, and how one mapping is laid over another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from visgen.checks import UserError, cut, shown
from visgen.installed import if_shipped

DEEPEST = 50  # values within values
MOST = 100_000  # values of one file, an alias counted as all that it stands for
LONGEST_NUMBER = 400  # digits
LONGEST_CHAIN = 50  # files that are each other's base


class _Loader(yaml.SafeLoader):
    """Safe YAML of bounded depth and size, in which a key that stands twice is an error instead of a silent loss of the
    first."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.depth = 0
        self.sizes: dict[yaml.Node, int] = {}  # of finished nodes

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        self.depth += 1
        node = super().compose_node(parent, index) if self.depth <= DEEPEST else None
        self.depth -= 1
        problem = ""
        if node is None:
            problem = f"values lie more than {DEEPEST} deep"
        elif not isinstance(event, yaml.AliasEvent):
            self.sizes[node] = 1 + sum(self.sizes[part] for part in _parts(node))
            if self.sizes[node] > MOST:
                problem = f"there are more than {MOST:,} values"
            elif node.tag.endswith(":int") and len(node.value) > LONGEST_NUMBER:
                problem = f"a number has {len(node.value)} digits"
        elif node not in self.sizes:
            problem = "a value contains itself"
        if problem:
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key '{key.value}' stands twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


def _parts(node: yaml.Node) -> list[yaml.Node]:
    """The nodes that lie directly in a node."""
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return node.value if isinstance(node, yaml.SequenceNode) else []


def layers(path: Path, seen: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """The mappings of a YAML file and of its `base:` parents, the eldest first."""
    if not path.is_file():
        named = f" (base of {seen[-1]})" if seen else ""
        what = "does not exist" if not path.exists() else "is a directory" if path.is_dir() else "is no regular file"
        raise UserError(
            f"config {path}{named} {what}; pass the path of a YAML file{if_shipped('configs', ', see configs/')}"
        )
    if path.resolve() in seen:
        raise UserError(f"config {path}: its `base:` chain comes back to itself")
    if len(seen) > LONGEST_CHAIN:
        raise UserError(f"config {path}: its `base:` chain is longer than {LONGEST_CHAIN} files; merge some of them")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date such as 2024-13-01
        raise UserError(f"config {path} is not valid YAML: {cut(' '.join(str(error).split()), 500)}") from None
    except OSError as error:
        raise UserError(f"config {path} cannot be read: {error.strerror}") from None
    if not isinstance(values, dict):
        raise UserError(f"config {path} must hold `key: value` lines, found {type(values).__name__}")
    base = values.pop("base", None)
    if base is None:
        return [values]
    if not isinstance(base, str):
        raise UserError(f"config {path}: `base:` must be the path of one YAML file, got {shown(base)}")
    return [*layers(path.parent / base, (*seen, path.resolve())), values]


def merge(parent: dict[str, Any], child: dict[str, Any]) -> dict[str, Any]:
    """Deep merge, child wins; a child that changes a plugin's `kind` drops the parent's other keys of that plugin."""
    out = dict(parent)
    for key, value in child.items():
        old = out.get(key)
        if isinstance(old, dict) and isinstance(value, str):  # `sampler: sjd` is short for `sampler: {kind: sjd}`
            value = {"kind": value}
        if isinstance(value, dict) and isinstance(old, dict):
            changed = "kind" in value and value["kind"] != old.get("kind", value["kind"])
            out[key] = dict(value) if changed else merge(old, value)
        else:
            out[key] = value
    return out
