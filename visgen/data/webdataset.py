"""WebDataset shards (local .tar files of `key.jpg` + `key.cls` or `key.json`), read map-style.

Each tar is indexed once: where every member's bytes lie. Samples then have numbers, so shuffling is global and
resuming exact, which a stream cannot offer. Grouping follows webdataset: consecutive members of one key, the key being
the path up to the first dot of its last part. A tar that is cut short is refused, and so are tars that `cat` has put
together, since all but the first would be lost; `tar --concatenate` makes one tar of several.
"""

from __future__ import annotations

import glob
import itertools
import json
import logging
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from visgen.checks import shown
from visgen.config import UserError
from visgen.data import Split
from visgen.data._folders import composed, missing
from visgen.data._source import ImageConfig, ImageData, split_by_name
from visgen.files import CHUNK, write_text
from visgen.image_files import SUFFIXES, warn_once

log = logging.getLogger(__name__)

INDEX_VERSION = 2
END = 2 * tarfile.BLOCKSIZE  # bytes of zeros that end a tar
MOST_CLASSES = 1_000_000  # a label beyond is an error, and one name for each would fill the memory
MOST_SHARDS = 1_000_000
LARGEST_LABEL = 1 << 24  # bytes of a member that holds a label


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
        if split == "train" and (bare := missing(self.classes, set(labels["train"].tolist()))):
            log.warning("%s: class %s has no sample, yet counts; labels count from 0", config.shards, bare)

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

    def _sources(self, indices: Sequence[int]) -> Iterable[Path]:
        return self._shards

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
        matches = [m for m in (glob.glob(name) if glob.has_magic(name) else [name]) if os.path.isfile(m)]
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
            if len(numbers) > MOST_SHARDS:
                raise UserError(f"data.shards '{pattern}' names {len(numbers)} files; at most {MOST_SHARDS} are read")
            parts.append([str(n).zfill(len(span[1])) for n in numbers])
        else:
            parts.append(part.split(",") if i % 2 else [part])
    return ["".join(choice) for choice in itertools.product(*parts)]


def _index(path: Path, config: Config) -> list[Sample]:
    """The samples of one tar, from the file beside it if that is of this tar.

    Raises:
        UserError: see `scan_tar`; a tar that is cut short is warned of where `on_error` is `skip`.
    """
    beside = path.with_name(f"{path.name}.index.json")
    stat = path.stat()
    stamp = [INDEX_VERSION, stat.st_size, stat.st_mtime_ns, config.label]
    if config.index_cache and (stored := _stored(beside, stamp)) is not None:
        return stored
    samples, fault = scan_tar(path, config.label)
    if fault and config.on_error == "stop":
        raise UserError(f"{path} is not whole: {fault}; fetch it again, or pass --data.on-error skip")
    if not samples:
        raise UserError(f"{path} holds no image ({' '.join(sorted(SUFFIXES))}){f': {fault}' if fault else ''}")
    if fault:
        warn_once(f"{path} is not whole: {fault}; only the {len(samples)} samples before that are used")
    elif config.index_cache:
        try:
            write_text(beside, json.dumps({"stamp": stamp, "samples": samples}))
        except UserError as error:
            log.warning("the index of %s is not kept beside it: %s", path, error)
    return samples


def _stored(beside: Path, stamp: list[Any]) -> list[Sample] | None:
    """The samples of an index that was kept with this stamp; None if there is none, or a damaged one."""
    try:
        stored = json.loads(beside.read_text())
        return [Sample(*s) for s in stored["samples"]] if stored["stamp"] == stamp else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def scan_tar(path: Path, label_field: str = "label") -> tuple[list[Sample], str]:
    """Samples of an uncompressed tar, in order, and what is wrong with its end; "" if it is whole.

    A tar ends with two blocks of zeros. Where they are missing, or a member reaches beyond the file, the tar is cut
    short or damaged, and the sample that stands last before that is left out, for it may lack members.

    Raises:
        UserError: not a plain tar, or a sample without image or with an unreadable label.
    """
    samples: list[Sample] = []
    try:
        with tarfile.open(path, "r:") as tar:
            members: list[tarfile.TarInfo] = []
            fault, ended = _members(tar, path.stat().st_size, members)
            kept = [(m, *_key(m.name)) for m in members if m.isreg() and not re.match(r"__[^/]*__($|/)", m.name)]
            groups = [(key, list(group)) for key, group in itertools.groupby((m for m in kept if m[1]), lambda m: m[1])]
            for key, group in groups if ended else groups[:-1]:
                listed = {suffix: member for member, _, suffix in group}
                if len(group) > len(listed):
                    raise UserError(f"{path}: sample '{key}' has two members with one suffix; its keys must differ")
                samples.append(_sample(path, tar, key, listed, label_field))
    except (tarfile.TarError, OSError) as error:
        raise UserError(
            f"{path} is not a readable uncompressed .tar file ({error}); unpack or fetch it again"
        ) from None
    return samples, fault


def _members(tar: tarfile.TarFile, size: int, members: list[tarfile.TarInfo]) -> tuple[str, bool]:
    """Appends the whole members of a tar of so many bytes to a list; returns what is wrong with it, or "", and whether
    its end was found."""
    try:
        while (member := tar.next()) is not None:
            if not 0 <= member.offset_data <= member.offset_data + member.size <= size:
                return f"member '{member.name}' of {member.size} bytes reaches beyond its end", False
            members.append(member)
    except Exception as error:  # whatever tarfile raises for a damaged header
        if not members:
            raise
        return f"after {len(members)} members it cannot be read ({error})", False
    file: Any = tar.fileobj
    file.seek(tar.offset)
    end = file.read(END)
    if any(end):
        return f"after {len(members)} members stands no header", False
    if len(end) < END:
        return f"it stops after {len(members)} members, without the zeros that end a tar", False
    while rest := file.read(CHUNK):
        if any(rest):
            return f"after the end of its {len(members)} members stand other data, perhaps another tar", True
    return "", True


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
            label = _number(_content(tar, members["cls"]).decode().strip())
        elif "json" in members:
            label = json.loads(_content(tar, members["json"])).get(label_field)
    except (ValueError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: the label of sample '{key}' cannot be read ({error})") from None
    if isinstance(label, bool) or not isinstance(label, int | str | None):
        raise UserError(
            f"{path}: the label of sample '{key}' is {shown(label)}; allowed: a whole number or a class name"
        )
    return Sample(key, suffix, members[suffix].offset_data, members[suffix].size, label)


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > LARGEST_LABEL:
        raise ValueError(f"its {member.size} bytes are more than {LARGEST_LABEL}")
    return tar.extractfile(member).read()  # type: ignore[union-attr]


def _number(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _class_names(path: Path | None) -> list[str]:
    if path is None:
        return []
    if not path.is_file():
        raise UserError(f"data.class_names {path} does not exist; it is a text file with one class name per line")
    try:
        names = [composed(line.strip()) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"data.class_names {path} cannot be read as text ({error}); save it as UTF-8") from None
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise UserError(f"data.class_names {path} holds '{twice}' twice; each class needs a name of its own")
    return names


def _labels(shards: list[Path], indexed: list[list[Sample]], names: list[str]) -> np.ndarray:
    """Label numbers of all samples, int64; all 0 where no sample has a label."""
    numbers = {name: i for i, name in enumerate(names)}
    unlabelled = all(s.label is None for samples in indexed for s in samples)
    out: list[int] = []
    for path, samples in zip(shards, indexed, strict=True):
        for s in samples:
            label = numbers.get(composed(s.label), s.label) if isinstance(s.label, str) else s.label
            label = 0 if unlabelled else label
            if not isinstance(label, int):
                remedy = "list the names in data.class_names" if label else "add .cls or .json, see data.label"
                raise UserError(f"{path}: sample '{s.key}' has label {shown(label)}, which is no number; {remedy}")
            if not 0 <= label < (len(names) or MOST_CLASSES):
                allowed = (
                    f"0..{len(names) - 1} (data.class_names)" if names else f"numbers from 0 to {MOST_CLASSES - 1}"
                )
                raise UserError(f"{path}: sample '{s.key}' has label {shown(label)}; allowed: {allowed}")
            out.append(label)
    return np.array(out, dtype=np.int64)
