"""WebDataset shards (local .tar files of `key.jpg` + `key.cls` or `key.json`), read map-style.

Each tar is indexed once: where every member's bytes lie. Samples then have numbers, so shuffling is global and
resuming exact, which a stream cannot offer. Grouping follows webdataset: consecutive members of one key, the key being
the path up to the first dot of its last part.
"""

from __future__ import annotations

import glob
import itertools
import json
import logging
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from visgen.config import UserError
from visgen.data import Split
from visgen.data._images import SUFFIXES
from visgen.data._source import ImageConfig, ImageData, split_by_name

log = logging.getLogger(__name__)

INDEX_VERSION = 1


@dataclass(frozen=True)
class Config(ImageConfig):
    shards: str = "data/train-{000000..000009}.tar"
    """Local .tar files: a path with {000..146}, {a,b}, * or ?."""
    held_out_shards: str = ""
    """The held-out split's files; empty: a share of `shards`, chosen by a hash of each key."""
    label: str = "label"
    """Field of the .json member that holds the label; a .cls member goes before it."""
    class_names: Path | None = None
    """Text file with one class name per line; needed where labels are names."""
    index_cache: bool = False
    """Keep each tar's index beside it as `X.tar.index.json`, if that folder can be written."""


class Sample(NamedTuple):
    key: str
    suffix: str
    offset: int  # of the image's bytes in the tar
    size: int
    label: int | str | None


class WebDataset(ImageData):
    """Samples in the order of the sorted shards, then of their members. Labels are integers from 0, or class names."""

    config: Config

    def __init__(self, config: Config, split: Split) -> None:
        super().__init__(config, split)
        parts = {"train": find_shards(config.shards)}
        if config.held_out_shards:
            parts["held_out"] = find_shards(config.held_out_shards)
        indexed = {part: [_index(path, config) for path in paths] for part, paths in parts.items()}
        names = _class_names(config.class_names)
        labels = {part: _labels(parts[part], samples, names) for part, samples in indexed.items()}
        count = 1 + max(int(found.max()) for found in labels.values())
        self.classes = names or [str(i) for i in range(count)]

        own = split if split in parts else "train"
        self._shards = parts[own]
        flat = [(shard, s) for shard, samples in enumerate(indexed[own]) for s in samples]
        kept: Any = range(len(flat))
        if "held_out" not in parts:
            hashed = [os.fsencode(f"{self._shards[shard].name}/{s.key}") for shard, s in flat]
            kept = split_by_name(hashed, config.held_out_fraction, split, f"data.shards {config.shards}")
        self._where = np.array([(flat[i][0], flat[i][1].offset, flat[i][1].size) for i in kept], dtype=np.int64)
        self._keys = np.array([os.fsencode(f"{flat[i][1].key}.{flat[i][1].suffix}") for i in kept], dtype=np.bytes_)
        self._index(labels[own][list(kept)])

    def _file(self, index: int) -> BytesIO:
        shard, offset, size = map(int, self._where[index])
        with open(self._shards[shard], "rb", buffering=0) as file:
            file.seek(offset)
            data = file.read(size)
        if len(data) < size:
            raise OSError(f"the tar ends after {len(data)} of its {size} bytes")
        return BytesIO(data)

    def _name(self, index: int) -> str:
        return f"{self._shards[int(self._where[index, 0])]}:{os.fsdecode(self._keys[index].item())}"


def find_shards(pattern: str) -> list[Path]:
    """Local files that a pattern with braces and wildcards names, sorted.

    Raises:
        UserError: a URL or pipe, a file that is missing, a pattern that matches nothing.
    """
    if "://" in pattern or pattern.startswith("pipe:"):
        raise UserError(f"data.shards '{pattern}' is not a local path; download the .tar files first and name those")
    found: set[Path] = set()
    for name in _braces(os.path.expanduser(pattern)):
        matches = glob.glob(name) if glob.has_magic(name) else [name] * os.path.isfile(name)
        if not matches:
            raise UserError(f"data.shards '{pattern}': no file {name}; check the path and the range in braces")
        found.update(map(Path, matches))
    return sorted(found)


def _braces(pattern: str) -> list[str]:
    """`a{08..10}b` -> a08b a09b a10b; `a{x,y}` -> ax ay; several groups multiply."""
    parts: list[list[str]] = []
    for i, part in enumerate(re.split(r"\{([^{}]*)\}", pattern)):
        span = re.fullmatch(r"(\d+)\.\.(\d+)", part) if i % 2 else None
        if span:
            numbers = range(int(span[1]), int(span[2]) + 1)
            parts.append([str(n).zfill(len(span[1])) for n in numbers])
        else:
            parts.append(part.split(",") if i % 2 else [part])
    return ["".join(choice) for choice in itertools.product(*parts)]


def _index(path: Path, config: Config) -> list[Sample]:
    """The samples of one tar, from the file beside it if that is of this tar."""
    beside = path.with_name(f"{path.name}.index.json")
    stat = path.stat()
    stamp = [INDEX_VERSION, stat.st_size, stat.st_mtime_ns, config.label]
    if config.index_cache and beside.is_file():
        stored = json.loads(beside.read_text())
        if stored["stamp"] == stamp:
            return [Sample(*s) for s in stored["samples"]]
    samples = list(scan_tar(path, config.label))
    if not samples:
        raise UserError(f"{path} holds no image ({' '.join(sorted(SUFFIXES))})")
    if config.index_cache:
        temporary = beside.with_name(f"{beside.name}.{os.getpid()}.tmp")
        try:
            temporary.write_text(json.dumps({"stamp": stamp, "samples": samples}))
            os.replace(temporary, beside)
        except OSError as error:
            log.warning("the index of %s is not kept beside it (%s)", path, error.strerror)
    return samples


def scan_tar(path: Path, label_field: str = "label") -> Iterator[Sample]:
    """Samples of an uncompressed tar, in order.

    Raises:
        UserError: not a plain tar, truncated, or a sample without image or with an unreadable label.
    """
    try:
        with tarfile.open(path, "r:") as tar:
            members = ((m, *_key(m.name)) for m in tar if m.isreg() and not re.match(r"__[^/]*__($|/)", m.name))
            named = (m for m in members if m[1])
            for key, group in itertools.groupby(named, lambda m: m[1]):
                listed = [(suffix, member) for member, _, suffix in group]
                if len(listed) > len(dict(listed)):
                    raise UserError(f"{path}: sample '{key}' has two members with one suffix; its keys must differ")
                yield _sample(path, tar, key, dict(listed), label_field)
    except (tarfile.TarError, OSError) as error:
        raise UserError(
            f"{path} is not a readable uncompressed .tar file ({error}); unpack or fetch it again"
        ) from None


def _key(name: str) -> tuple[str, str]:
    """Key and lower-case suffix of a member, both empty if it has none."""
    folder, slash, base = name.rpartition("/")
    stem, dot, suffix = base.partition(".")
    return (folder + slash + stem, suffix.lower()) if stem and dot else ("", "")


def _sample(path: Path, tar: tarfile.TarFile, key: str, members: dict[str, Any], label_field: str) -> Sample:
    suffix = next((s for s in members if f".{s}" in SUFFIXES), None)
    if suffix is None:
        raise UserError(f"{path}: sample '{key}' has no image, only {', '.join(members)}")
    label: Any = None
    try:
        if "cls" in members:
            label = _number(tar.extractfile(members["cls"]).read().decode().strip())  # type: ignore[union-attr]
        elif "json" in members:
            label = json.loads(tar.extractfile(members["json"]).read()).get(label_field)  # type: ignore[union-attr]
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: the label of sample '{key}' cannot be read ({error})") from None
    if isinstance(label, bool) or not isinstance(label, int | str | None):
        raise UserError(f"{path}: the label of sample '{key}' is {label!r}; allowed: a whole number or a class name")
    return Sample(key, suffix, members[suffix].offset_data, members[suffix].size, label)


def _number(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _class_names(path: Path | None) -> list[str]:
    if path is None:
        return []
    if not path.is_file():
        raise UserError(f"data.class_names {path} does not exist; it is a text file with one class name per line")
    return [line.strip() for line in path.read_text().splitlines() if line.strip()]


def _labels(shards: list[Path], indexed: list[list[Sample]], names: list[str]) -> np.ndarray:
    """Label numbers of all samples, int64; all 0 where no sample has a label."""
    numbers = {name: i for i, name in enumerate(names)}
    unlabelled = all(s.label is None for samples in indexed for s in samples)
    out: list[int] = []
    for path, samples in zip(shards, indexed, strict=True):
        for s in samples:
            label = numbers.get(s.label, s.label) if isinstance(s.label, str) else s.label
            label = 0 if unlabelled else label
            if not isinstance(label, int):
                remedy = "list the names in data.class_names" if label else "add .cls or .json, see data.label"
                raise UserError(f"{path}: sample '{s.key}' has label {label!r}, which is no number; {remedy}")
            if label < 0 or (names and label >= len(names)):
                allowed = f"0..{len(names) - 1} (data.class_names)" if names else "numbers from 0"
                raise UserError(f"{path}: sample '{s.key}' has label {label}; allowed: {allowed}")
            out.append(label)
    return np.array(out, dtype=np.int64)
