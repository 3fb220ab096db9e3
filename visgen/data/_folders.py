"""Folders of samples: which sub-folder is which split, one class per sub-folder, the files of each.

The held-out part is a sub-folder beside `train/` that has one of the names of `HELD_OUT`, in any letter case.
"""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from visgen.checks import cut
from visgen.config import UserError
from visgen.data import Split
from visgen.image_files import find_files, holds, leads_up, scan, warn_once

log = logging.getLogger(__name__)

TRAIN = ("train", "training")
HELD_OUT = (  # the first of these that is there is used, the others are named in a warning
    *("heldout", "holdout", "val", "valid", "validation", "eval", "evaluation", "dev", "test", "testing"),
)


@dataclass
class Samples:
    """The samples of one split.

    Attributes:
        folder: what the paths are relative to.
        classes: names, in Unicode's composed form (NFC), whatever the file system's.
        paths: of the files, in the order of classes, then of paths.
        labels: of the files.
        shared: whether the other split lies in the same folder, so that names decide.
    """

    folder: Path
    classes: list[str]
    paths: list[bytes]
    labels: list[int]
    shared: bool


def find_samples(root: Path, split: Split, suffixes: Collection[str], what: str) -> Samples:
    """List the samples of a split: one class per sub-folder of its part, or one class without sub-folders.

    Args:
        what: one sample in the words of a message.

    Raises:
        UserError: the parts cannot be told apart, a class that training does not have, or no sample.
    """
    parts = _parts(root)
    folder, shared = parts[split], parts["train"] == parts["held_out"]
    classes = _folders_of(parts["train"])
    here = _folders_of(folder)
    unknown = sorted(set(here) - set(classes)) if classes else []
    if unknown:
        raise UserError(f"{folder}: class '{unknown[0]}' is not among the {len(classes)} classes of the train folder")

    found = find_files(folder, suffixes)
    label_of = {os.fsencode(name): list(classes).index(form) for form, name in here.items()} if classes else {}
    firsts = [path.partition(b"/")[0] for path in found.paths] if classes else []
    labels = [label_of.get(first, -1) for first in firsts] if classes else [0] * len(found.paths)
    taken = sorted((label, path) for label, path in zip(labels, found.paths, strict=True) if label >= 0)
    beside = len(labels) - len(taken)
    told = f"; {found.told}" if found.left_out else ""
    if not taken:
        hint = f"the {beside} beside its sub-folders must move into one" if beside else "check data.root"
        raise UserError(f"{folder} holds no {what} ({' '.join(sorted(suffixes))}){told}; {hint}")
    if told:
        warn_once(f"{folder}: {found.told}")
    if beside and (split == "train" or not shared):  # said once
        log.warning("%s: %d %ss beside its class folders are ignored; move them into one", folder, beside, what)
    if split == "train" and (bare := missing(list(classes), [label for label, _ in taken])):
        log.warning("%s: class %s holds no %s, yet counts; delete the folder", folder, bare, what)
    return Samples(folder, list(classes) or ["all"], [p for _, p in taken], [label for label, _ in taken], shared)


def composed(name: str) -> str:
    """A class's name in Unicode's composed form: file systems spell accents in different ways."""
    return unicodedata.normalize("NFC", name)


def missing(classes: Sequence[str], labels: Collection[int]) -> str:
    """The classes that no sample has, in the words of a message; empty if there are none."""
    bare = sorted(set(range(len(classes))) - set(labels))
    return cut(", ".join(classes[label] for label in bare[:100]), 300) + (", ..." if len(bare) > 100 else "")


def _parts(root: Path) -> dict[Split, Path]:
    """The folder of each split; both are the same one where the split goes by name.

    Raises:
        UserError: it cannot be said which folder is which part.
    """
    names = list(_folders_of(root).values())
    train = [name for name in names if _letters(name) in TRAIN]
    held_out = sorted((n for n in names if _letters(n) in HELD_OUT), key=lambda n: HELD_OUT.index(_letters(n)))
    if not train:
        return {"train": root, "held_out": root}
    if len(train) > 1 and held_out:
        raise UserError(f"{root} holds {train[0]}/ and {train[1]}/; keep the one that is to be trained on")
    if held_out:
        if unused := [name for name in names if name not in (train[0], held_out[0])]:
            used = f"{train[0]}/ is trained on, {held_out[0]}/ is held out"
            warn_once(f"{root}: {used}, {cut(', '.join(f'{n}/' for n in unused), 300)} not used")
        return {"train": root / train[0], "held_out": root / held_out[0]}
    if len(names) == 1:
        return {"train": root / train[0], "held_out": root / train[0]}
    inside = _folders_of(root / train[0])
    for other in (name for name in names if name != train[0]):
        if both := sorted(inside.keys() & _folders_of(root / other)):
            raise UserError(
                f"{root}: {train[0]}/ and {other}/ hold the same class folders, '{both[0]}' among them; call {other}/ "
                f"held_out/ if it is held out, else move it away"
            )
    warn_once(f"{root}: {train[0]}/ is taken as a class, since no folder beside it is called held_out/, val/ or test/")
    return {"train": root, "held_out": root}


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name.casefold())


def _folders_of(folder: Path) -> dict[str, str]:
    """{name in Unicode's composed form: name on disk} of the sub-folders, sorted by name on disk.

    Raises:
        UserError: two names that look alike.
    """
    above = [os.path.realpath(os.fsencode(folder))]
    names: dict[str, str] = {}
    entries = [
        e for e in scan(os.fsencode(folder)) if holds(e.is_dir) and not leads_up(os.path.realpath(e.path), above)
    ]
    for name in sorted(os.fsdecode(entry.name) for entry in entries):
        other = names.setdefault(composed(name), name)
        if other != name:
            raise UserError(
                f"{folder} has two folders called '{name}', which differ only in how Unicode spells them; merge them"
            )
    return names
