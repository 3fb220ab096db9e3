"""The data that a checkpoint is scored on: pictures, of its image size, with labels that mean its classes."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visgen import config as configs
from visgen.config import UserError, kind_of
from visgen.data import Data, Split, codes
from visgen.data._classes import match_classes
from visgen.files import from_home
from visgen.generate import Generator
from visgen.launch import say
from visgen.tokenizers import Tokenizer

TOKENS = ("codes", "pairs")  # kinds of data without pixels


def build_pictures(config: Any, split: Split) -> Data:
    """Return a split of the data set to score on.

    Raises:
        UserError: it holds tokens; the message names what a cache was made from, where the cache says so.
    """
    kind = kind_of(config)
    if kind not in TOKENS:
        return configs.build(config, split)
    made = f"one of {', '.join(k for k in configs.kinds('visgen.data') if k not in TOKENS)}"
    with contextlib.suppress(UserError):
        made = codes.read_index(from_home(config.root) / split).source["kind"] if kind == "codes" else made
    raise UserError(
        f"data.kind {kind} ({config.root}) gives tokens, pictures are needed: pass --data.kind and the settings of the "
        f"data that the {kind} were made from ({made})"
    )


def fit_size(config: Any, tokenizer: Tokenizer, argv: Sequence[str]) -> Any:
    """Return the data's config with the tokenizer's image size, unless the user gives `data.image_size`.

    Args:
        argv: words of the command line: YAML files, then flags.
    """
    side = getattr(config, "image_size", None)
    height, width = tokenizer.image_size
    if side in (None, height) or height != width or _says_size(argv):
        return config
    say(f"data.image_size: {height}, that of the checkpoint's tokenizer")
    return dataclasses.replace(config, image_size=height)


def _says_size(argv: Sequence[str]) -> bool:
    if any(re.match(r"--data\.image[-_]size\b", word) for word in argv):
        return True
    files = itertools.takewhile(lambda word: not word.startswith("-"), argv)
    data = [configs.read_yaml(Path(file)).get("data") for file in files]
    return any("image_size" in values for values in data if isinstance(values, dict))


def check_match(
    data: Data, tokenizer: Tokenizer, classes: int | None = None, names: Sequence[str] = (), where: str = "checkpoint"
) -> Tensor:
    """Compare data with a checkpoint before any work; return the checkpoint's label of each class of the data: [C].

    Args:
        classes: number of the checkpoint's classes; None: it is not asked by labels, so classes do not matter.
        names: names of its classes; empty: it records none, and labels are matched by number.
        where: the checkpoint, for messages.

    Raises:
        UserError: another image size, a class that the checkpoint does not have, or no names and another number of
            classes.
    """
    if tuple(data.image_size) != tuple(tokenizer.image_size):
        raise UserError(
            f"the data's image_size is {tuple(data.image_size)}, the checkpoint's {tuple(tokenizer.image_size)}; "
            "score it on the data it was trained on (--data.kind, --data.image-size)"
        )
    if classes is None:
        return torch.arange(len(data.classes))
    if not names:
        if len(data.classes) != classes:
            raise UserError(
                f"the data has {len(data.classes)} classes, the checkpoint {classes} without names; score it on the "
                "data of its training (--data.kind, --data.root)"
            )
        say(f"{where} records no class names: labels are matched by number, 0 is the data's {data.classes[0]!r}")
    return torch.tensor(match_classes(names, data.classes, where))


def check_checkpoint(data: Data, generator: Generator, where: str = "checkpoint") -> Tensor:
    """As `check_match`, for a checkpoint that draws by class labels."""
    return check_match(data, generator.tokenizer, generator.class_count, generator.classes, where)
