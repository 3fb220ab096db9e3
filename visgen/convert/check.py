"""Replays recorded vectors of a reference through our model: `python -m visgen.convert check FILE`.

FILE is a safetensors file with `state.*` (the reference's weights), `in.*` and `out.*`; its metadata name the `origin`
and the reference's `config` (JSON). Origin `llamagen_gpt` is replayed by the function `replay_gpt` of
`convert/llamagen.py`, origin `mar` by `replay` of `convert/mar.py`: `replay(config, state, inputs, wanted)` returns at
least the outputs named in `wanted`, without `out.`. A new origin is such a function; nothing is registered here.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from visgen.config import UserError, kinds
from visgen.tensors import read

TOLERANCE = 1e-4  # of max(1, largest |recorded value| of the row)


@dataclass(frozen=True)
class Config:
    source: str = ""  # the recorded vectors


def convert(config: Config) -> str:
    """One line per output; prints them and exits with code 1 where one differs."""
    lines, passed = check(Path(config.source))
    if not passed:
        print("\n".join(lines))
        raise SystemExit(1)
    return "\n".join(lines)


def check(path: Path) -> tuple[list[str], bool]:
    """What to print of a file, and whether all of its outputs agree."""
    tensors, metadata = _read(path)
    origin = metadata.get("origin", "")
    if not origin:
        raise UserError(f"{path} names no origin, so it holds no recorded vectors; pass such a file, as tests/data has")
    replay = find(origin)
    parts: dict[str, dict[str, Tensor]] = {"state": {}, "in": {}, "out": {}}
    for key, tensor in tensors.items():
        part, _, name = key.partition(".")
        parts.setdefault(part, {})[name] = tensor
    if not parts["out"]:
        raise UserError(f"{path} holds no outputs (out.*) to compare with")
    state = {k: v.float() if v.is_floating_point() else v for k, v in parts["state"].items()}
    try:
        settings = json.loads(metadata.get("config", "{}"))
        with torch.inference_mode():
            made = replay(settings, state, parts["in"], list(parts["out"]))
    except (KeyError, TypeError, json.JSONDecodeError, RecursionError) as error:
        raise UserError(f"{path} lacks what {origin} needs: {error}; record it again") from None
    lines, passed = [f"{path.name}: {origin}, fp32"], True
    for name, recorded in sorted(parts["out"].items()):
        line, same = compare(made.get(name), recorded)
        lines.append(f"  {name:<16} {line}  {'ok' if same else 'DIFFERS'}")
        passed &= same
    lines.append("passed" if passed else f"failed: allowed is {TOLERANCE:g} * max(1, largest value of the row)")
    return lines, passed


def compare(made: Tensor | None, recorded: Tensor) -> tuple[str, bool]:
    """(what to say, do they agree?): whole numbers exactly, others row by row of the last dimension."""
    if made is None:
        return "not replayed", False
    if made.shape != recorded.shape:
        return f"shape {list(made.shape)} instead of {list(recorded.shape)}", False
    if not recorded.is_floating_point():
        wrong = int((made != recorded).sum())
        return f"{wrong} of {recorded.numel()} differ", wrong == 0
    error = (made.double() - recorded.double()).abs()
    allowed = TOLERANCE * recorded.double().abs().amax(-1, keepdim=True).clamp(min=1)
    share = error / allowed
    worst = int(share.nan_to_num(nan=torch.inf).argmax())
    told = f"largest error {error.flatten()[worst]:.2e} of {allowed.expand_as(error).flatten()[worst]:.2e} allowed"
    return told, bool((share <= 1).all())  # not-a-number disagrees


def find(origin: str) -> Callable[..., dict[str, Tensor]]:
    """The replay of an origin.

    Raises:
        UserError: no converter has it; names those that there are.
    """
    supported = {}
    for kind in kinds("visgen.convert"):
        for name, value in vars(importlib.import_module(f"visgen.convert.{kind}")).items():
            if name == "replay" or name.startswith("replay_"):
                supported[kind + name.removeprefix("replay")] = value
    if origin not in supported:
        raise UserError(f"origin '{origin}' cannot be checked; supported: {', '.join(sorted(supported))}")
    return supported[origin]


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise UserError(f"{path} {what}; pass a file of recorded vectors")
    return read(path, "copy it again", finite=False)
