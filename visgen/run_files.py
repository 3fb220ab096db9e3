"""Run directories: which steps a run has, which of them is asked for, and how a step gets its name.

A run directory holds `config.yaml`, `step_0000100/{model.safetensors, state/, meta.json}` and, where its model needs
one, `tokenizer.safetensors`. What the weight files hold is told in `checkpoint.py`.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visgen.config import UserError
from visgen.files import crc32, flush, read_json, write_json

WEIGHTS, TOKENIZER, META = "model.safetensors", "tokenizer.safetensors", "meta.json"
Step = int | str | None  # which step of a run; "best": of its held-out metric; None: the newest


def step_name(step: int) -> str:
    """Directory of the state after `step` steps."""
    return f"step_{step:07d}"


def find_steps(run: Path | str) -> list[Path]:
    """Complete step directories of a run, oldest first."""
    found = [p for p in Path(run).glob("step_*") if is_step(p) and (p / META).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step_")))


def older_steps(step: Path) -> list[Path]:
    """Complete step directories of the same run that come before the directory `step`, oldest first."""
    steps = find_steps(step.parent)
    return steps[: steps.index(step)] if step in steps else []


def find_step(path: Path | str, step: Step = None) -> Path:
    """The directory of step `step` (None: the newest) of a run; a directory that holds weights is its own answer.

    Raises:
        UserError: no such directory, none complete inside, not this step, no best one, or a damaged `meta.json`.
    """
    path = Path(path)
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise UserError(f"checkpoint {path} {what}; pass a run directory or one of its steps")
    if (path / WEIGHTS).is_file():
        if step is not None:
            raise UserError(f"{path} is a step itself; pass its run directory, or leave --step out")
        if (path / META).is_file():
            read_meta(path)
        return path
    steps = {int(p.name.removeprefix("step_")): p for p in path.glob("step_*") if is_step(p) and _is_filled(p)}
    if not steps:
        if is_step(path):
            raise UserError(f"{path / WEIGHTS} is missing; copy the step again")
        if (path / "config.yaml").is_file():
            raise UserError(f"{path} is the directory of a run that has saved no step yet; train it first")
        raise UserError(f"{path} holds no complete checkpoint ({step_name(0)[:5]}*/{META}); pass the run directory")
    if step == "best":
        best = read_best(steps[max(steps)])
        if best is None:
            raise UserError(f"{path} knows no best step: it was trained without loop.keep_best; leave --step out")
        step = best["step"]
    if step is not None and step not in steps:
        raise UserError(
            f"{path} holds no step {step}; it holds {', '.join(map(str, sorted(steps)))}: choose one of them, 'best' "
            "(of a run with loop.keep_best), or none for the newest"
        )
    found = steps[max(steps) if step is None else int(step)]
    read_meta(found)
    return found


def read_meta(step: Path) -> dict[str, Any]:
    """Return what the `meta.json` of a step says.

    Raises:
        UserError: it is missing, was changed, or an entry is not what its name says.
    """
    path, older = step / META, older_steps(step)
    if not path.is_file():
        raise UserError(
            f"{path} is missing, so {step.name} may be half a copy; copy it again, or pass the directory {step} itself"
        )
    remedy = f"copy the step again{f' or use the earlier {older[-1].name}' if older else ''}"
    found = read_json(path, remedy)
    wrong = _wrong_entry(found, step)
    if wrong:
        raise UserError(f"{path} is damaged ({wrong}); {remedy}")
    return found


def write_meta(step: Path, facts: Mapping[str, Any]) -> None:
    """Write the `meta.json` of a step, with its checksum."""
    write_json(step / META, facts)


def read_best(step: Path) -> dict[str, Any] | None:
    """What the metadata of a step say of the best step so far: metric, value, step, since. None: nothing.

    Raises:
        UserError: as `read_meta`.
    """
    return read_meta(step).get("best")


def _wrong_entry(facts: Mapping[str, Any], step: Path) -> str:
    """Say which entry of a step's metadata is not what its name says; "": none."""
    named = int(step.name.removeprefix("step_")) if is_step(step) else None
    if "step" in facts and (not _is_count(facts["step"]) or (named is not None and facts["step"] != named)):
        return f"its step is {facts['step']!r}, its directory is {step.name}"
    for name in ("samples", "processes", "data_samples"):
        if name in facts and not _is_count(facts[name]):
            return f"its {name} is {facts[name]!r}, not a whole number"
    if not isinstance(facts.get("objective", ""), str):
        return f"its objective is {facts['objective']!r}, not a name"
    sums = facts.get("crc32", {})
    if not isinstance(sums, dict) or not all(map(_is_count, sums.values())):
        return "its crc32 does not give a number for each file"
    return _wrong_best(facts["best"]) if facts.get("best") is not None else ""


def _wrong_best(best: Any) -> str:
    if not isinstance(best, dict) or not _is_count(best.get("step")):
        return f"its 'best' is {best!r}, which names no step"
    value = best.get("value", 0.0)
    if not isinstance(best.get("metric", ""), str) or not _is_count(best.get("since", 0)):
        return f"its 'best' is {best!r}, which names no metric or no number of evaluations since"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return f"its 'best' is {best!r}, which has no finite value"
    return ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def unfinished(final: Path) -> Path:
    """Where a directory is written before `publish` gives it its name."""
    return final.with_name(f".{final.name}.tmp")


def publish(final: Path) -> None:
    """Names a complete directory in one rename: a kill leaves none under the final name, or a whole one, and so does a
    power cut, since its files are on the disk before."""
    temporary = unfinished(final)
    for path in (*temporary.rglob("*"), temporary):
        flush(path)
    if final.exists():
        _remove(final)
    os.replace(temporary, final)
    flush(final.parent)


def checksums(folder: Path) -> dict[str, int]:
    """CRC-32 of the files in `folder`, by their paths below it."""
    return {str(path.relative_to(folder)): crc32(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def set_aside(step: Path) -> None:
    """Renames a damaged step, so that it counts no more as one of its run."""
    name = step.with_name(f"damaged_{step.name}")
    shutil.rmtree(name, ignore_errors=True)  # of an earlier time
    os.replace(step, name)


def keep_last(run: Path, keep: int, best: int = 0) -> None:
    """Removes all but the newest `keep` steps of a run and step `best`; 0 keeps all."""
    for path in find_steps(run)[:-keep] if keep else []:
        if path.name != step_name(best):
            _remove(path)


def clean(run: Path) -> None:
    """Removes what a killed process left under temporary names."""
    for path in Path(run).glob(".step_*"):
        shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Takes the name away first, so that no half-removed directory bears it."""
    hidden = path.with_name(f".{path.name}.old")
    os.replace(path, hidden)
    shutil.rmtree(hidden)


def is_step(path: Path) -> bool:
    """Whether a directory is called as a step is."""
    return re.fullmatch(r"step_\d+", path.name) is not None


def _is_filled(step: Path) -> bool:
    return (step / META).is_file() or (step / WEIGHTS).is_file()
