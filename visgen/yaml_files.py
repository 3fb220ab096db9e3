"""YAML files with their `base:` parents, and how one mapping is laid over another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from visgen.checks import UserError
from visgen.installed import if_shipped


class _Loader(yaml.SafeLoader):
    """Safe YAML in which a key that stands twice is an error instead of a silent loss of the first."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"key '{key.value}' stands twice", problem_mark=key.start_mark)
                seen.add(key.value)
        return node


def layers(path: Path, seen: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """The mappings of a YAML file and of its `base:` parents, the eldest first."""
    if not path.is_file():
        named = f" (base of {seen[-1]})" if seen else ""
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(
            f"config {path}{named} {what}; pass the path of a YAML file{if_shipped('configs', ', see configs/')}"
        )
    if path.resolve() in seen:
        raise UserError(f"config {path}: its `base:` chain comes back to itself")
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader) or {}
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not UTF-8, or a date such as 2024-13-01
        raise UserError(f"config {path} is not valid YAML: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise UserError(f"config {path} cannot be read: {error.strerror}") from None
    if not isinstance(values, dict):
        raise UserError(f"config {path} must hold `key: value` lines, found {type(values).__name__}")
    base = values.pop("base", None)
    if base is None:
        return [values]
    if not isinstance(base, str):
        raise UserError(f"config {path}: `base:` must be the path of one YAML file, got {base!r}")
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
