"""Images with captions: a file of JSON lines, and the captions' text features by `python -m visgen.captions`.

A line is `{"image": "a/0.jpg", "text": "a red bird"}`; paths are relative to the file's folder. `text` may be a list,
of which training draws one (LlamaGen's images have a long and a short caption; arXiv 2406.06525, section 3.2), and
`map` may name a control map. Features lie in a folder, once for each caption, unpadded: `features_00000.npy` float16
[sum of n, C], `lengths_00000.npy` [captions], `keys_00000.npy` uint8 [captions, 16], hashes of the captions. Opening
the folder compares every file with the checksum that it carries (`arrays.py`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visgen import arrays
from visgen.checks import shown
from visgen.config import UserError
from visgen.data import Split, _index
from visgen.data._source import ImageConfig, ImageData, split_by_name
from visgen.files import from_home

VERSION = 1
_REMEDY = "delete the folder and run `python -m visgen.captions` again"


@dataclass(frozen=True)
class Config(ImageConfig):
    file: Path = Path("data/captions.jsonl")
    """JSON lines of images and captions."""
    held_out_file: Path | None = None
    """Those that are held out; without it a share of `file` is, by a hash of the images' paths."""
    features: Path | None = Path("data_cache/captions")
    """Folder that `python -m visgen.captions --out` wrote; None: samples without text, as a tokenizer wants them."""


@dataclass(frozen=True)
class Index:
    """`index.json` of a folder of features: what they are of.

    Attributes:
        encoder, clean: the T5, and whether captions were cleaned before it.
        tokens: a caption's features at most, the number P of slots that samples are padded to.
        channels: width C.
    """

    encoder: str
    clean: bool
    tokens: int
    channels: int
    version: int = VERSION

    def __post_init__(self) -> None:
        if not (self.tokens and self.channels):
            raise ValueError(f"its tokens are {self.tokens}, its channels {self.channels}")


@dataclass(frozen=True)
class Line:
    """A line of a file of captions."""

    image: str
    texts: tuple[str, ...]
    map: str | None


class Captions(ImageData):
    """Samples have `pixels`, label 0, and of one caption `text` float16 [P, C], left-padded, and `text_mask` [P] bool.

    Attributes:
        features: of the captions, or None.
    """

    config: Config

    def __init__(self, config: Config, split: Split) -> None:
        super().__init__(config, split)
        self.classes = ["all"]
        held_out = config.held_out_file if split == "held_out" else None
        path = from_home(held_out or config.file)
        lines = read_lines(path)
        if config.held_out_file is None:
            names = [line.image.encode() for line in lines]
            lines = [lines[i] for i in split_by_name(names, config.held_out_fraction, split, f"data.file {path}")]
        with_map = sum(line.map is not None for line in lines)
        if 0 < with_map < len(lines):
            raise UserError(f"data.file {path}: {with_map} of {len(lines)} lines have a `map`; give all one, or none")
        self._folder, self.has_maps = path.parent, with_map > 0
        self._paths = np.array([line.image.encode() for line in lines], dtype=np.bytes_)  # one block, as in `folder`
        self._map_paths = np.array([(line.map or "").encode() for line in lines], dtype=np.bytes_)
        self.features = None if config.features is None else Features(from_home(config.features))
        if self.features is not None:
            self._starts = np.cumsum([0] + [len(line.texts) for line in lines])  # of each image's captions in `_rows`
            self._rows = self.features.rows([text for line in lines for text in line.texts], str(path))
        self._index(np.zeros(len(lines), np.int64))

    def _file(self, index: int) -> Path:
        return self._folder / self._paths[index].item().decode()

    def _name(self, index: int) -> str:
        return str(self._file(index))

    def _map_file(self, index: int) -> Path:
        return self._folder / self._map_paths[index].item().decode()

    def _more(self, index: int, augment: np.random.Generator | None) -> dict[str, Any]:
        if self.features is None:
            return {}
        first, end = self._starts[index], self._starts[index + 1]
        text, mask = self.features.get(int(self._rows[first if augment is None else augment.integers(first, end)]))
        return {"text": text, "text_mask": mask}


def read_lines(path: Path) -> list[Line]:
    """The lines of a file of captions.

    Raises:
        UserError: missing, empty, or a line that is no such object; it names the line.
    """
    if not path.is_file():
        raise UserError(f'data.file {path} does not exist; pass JSON lines {{"image": PATH, "text": CAPTION}}')
    lines = []
    for number, text in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n"), 1):
        if not text.strip():
            continue
        try:
            found = json.loads(text)
            json.dumps(found, ensure_ascii=False).encode()  # half a character, as in "\ud83d", cannot be hashed
        except (ValueError, RecursionError) as error:
            raise UserError(f"{path}, line {number} is no JSON ({error}); mend it") from None
        lines.append(_line(found, f"{path}, line {number}"))
    if not lines:
        raise UserError(f'data.file {path} holds no line; pass JSON lines {{"image": PATH, "text": CAPTION}}')
    return lines


def _line(found: Any, where: str) -> Line:
    image, texts, control = (found.get(k) if isinstance(found, dict) else None for k in ("image", "text", "map"))
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(image, str) or not image:
        raise UserError(f"{where}: `image` is {shown(image)}; it must be the path of an image")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: `text` is {shown(texts)}; it must be a caption, or a list of captions")
    if control is not None and not isinstance(control, str):
        raise UserError(f"{where}: `map` is {shown(control)}; it must be the path of a control map")
    return Line(image, tuple(texts), control)


# ---------------------------------------------------------------------------------------------------- features


class Features:
    """A folder of captions' features.

    Attributes:
        index: what they are of.
        keys: [captions, 16] uint8.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, read_index(folder)
        numbers = shard_numbers(folder)
        none = np.zeros((0, 16), np.uint8)
        self.keys = np.concatenate([none, *(_keys(folder, number) for number in numbers)])
        lengths = [_lengths(folder, number, self.index) for number in numbers]
        self._shard = np.repeat(np.arange(len(numbers)), [len(each) for each in lengths])  # of every caption
        self._end = np.concatenate([np.zeros(0, np.int64), *(each.cumsum() for each in lengths)])  # in its shard
        self._length = np.concatenate([np.zeros(0, np.int64), *lengths])
        self._numbers, self._open = numbers, [int(each.sum()) for each in lengths]
        self._maps = self._mapped()
        if len(self.keys) != len(self._length):
            raise UserError(f"{folder} has {len(self.keys)} keys and {len(self._length)} lengths; {_REMEDY}")
        size = sum(each.nbytes for each in self._maps)
        arrays.once_a_host(self._verify, range(len(numbers)), folder, size)

    def __len__(self) -> int:
        return len(self.keys)

    def rows(self, captions: Sequence[str], where: str) -> np.ndarray:
        """The number of each caption, int64.

        Raises:
            UserError: captions that have no features here.
        """
        known = {key.tobytes(): i for i, key in enumerate(self.keys)}
        found = [known.get(key_of(text), -1) for text in captions]
        missing = [text for text, row in zip(captions, found, strict=True) if row < 0]
        if missing:
            raise UserError(
                f"{len(missing)} of the {len(captions)} captions of {where} have no features in {self.folder}, the "
                f"first being '{missing[0]}'; run `python -m visgen.captions --files {where} --out {self.folder}`"
            )
        return np.array(found, np.int64)

    def get(self, row: int) -> tuple[Tensor, Tensor]:
        """(features [P, C] float16, padding first, mask [P] bool) of a caption."""
        if not self._maps:
            self._maps = self._mapped()
        end, count = self._end[row], self._length[row]
        text = np.zeros((self.index.tokens, self.index.channels), np.float16)
        text[self.index.tokens - count :] = self._maps[self._shard[row]][end - count : end]
        return torch.from_numpy(text), torch.arange(self.index.tokens) >= self.index.tokens - int(count)

    def _mapped(self) -> list[np.ndarray]:
        maps = [_load(self.folder, number, "features") for number in self._numbers]
        for number, found, rows in zip(self._numbers, maps, self._open, strict=True):
            if found.shape != (rows, self.index.channels) or found.dtype != np.float16:
                raise UserError(
                    f"{shard_path(self.folder, number, 'features')} holds {found.dtype} {found.shape}, not float16 "
                    f"{(rows, self.index.channels)}; {_REMEDY}"
                )
        return maps

    def _verify(self, place: int) -> None:
        """Compare the files of a shard with their checksums; all features must be finite."""
        for part in ("features", "lengths", "keys"):
            path = shard_path(self.folder, self._numbers[place], part)
            arrays.verify(path, _load(self.folder, self._numbers[place], part), _REMEDY)
        if not arrays.is_finite(self._maps[place]):
            path = shard_path(self.folder, self._numbers[place], "features")
            raise UserError(f"{path} holds a value that is not finite; {_REMEDY}")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": []}  # a mapped file would be pickled as a copy of its bytes


def key_of(caption: str) -> bytes:
    return hashlib.blake2b(caption.encode(), digest_size=16).digest()


def shard_path(folder: Path, number: int, part: str) -> Path:
    return folder / f"{part}_{number:05d}.npy"


def shard_numbers(folder: Path) -> list[int]:
    """Numbers of the shards that are whole: their keys are written last."""
    return sorted(int(path.stem.removeprefix("keys_")) for path in folder.glob("keys_*.npy"))


def read_index(folder: Path) -> Index:
    """Reads `index.json`.

    Raises:
        UserError: missing, not JSON, or of another version.
    """
    absent = (
        f"no features of captions at {folder}; write them with `python -m visgen.captions --files CAPTIONS.jsonl "
        f"--out {folder}`, or set data.features None for samples without text"
    )
    return _index.read_index(folder, Index, VERSION, absent, "encode the captions again", _REMEDY)


def write_index(folder: Path, index: Index) -> None:
    _index.write_index(folder, index)


def write_shard(folder: Path, number: int, captions: Sequence[str], features: Iterable[np.ndarray]) -> None:
    """Write the features float16 [n, C] of captions, so that they are there whole or not at all."""
    parts = list(features)
    keys = np.frombuffer(b"".join(map(key_of, captions)), np.uint8).reshape(-1, 16)
    lengths = np.array([len(part) for part in parts], np.uint16)
    for part, array in (("features", np.concatenate(parts)), ("lengths", lengths), ("keys", keys)):
        arrays.write(shard_path(folder, number, part), array)


def _load(folder: Path, number: int, part: str) -> np.ndarray:
    return arrays.read(shard_path(folder, number, part), _REMEDY, _REMEDY, mapped=True)


def _keys(folder: Path, number: int) -> np.ndarray:
    keys = _load(folder, number, "keys")
    if keys.dtype != np.uint8 or keys.shape[1:] != (16,):
        raise UserError(f"{shard_path(folder, number, 'keys')} holds {keys.dtype} {keys.shape}; {_REMEDY}")
    return keys


def _lengths(folder: Path, number: int, index: Index) -> np.ndarray:
    """Return the numbers of features of a shard's captions, int64 [captions]."""
    lengths, path = _load(folder, number, "lengths"), shard_path(folder, number, "lengths")
    if lengths.dtype.kind not in "iu" or lengths.ndim != 1:
        raise UserError(f"{path} holds {lengths.dtype} {lengths.shape}; {_REMEDY}")
    if lengths.size and not 0 < lengths.min() <= lengths.max() <= index.tokens:
        raise UserError(f"{path} holds lengths {lengths.min()} to {lengths.max()}, not 1 to {index.tokens}; {_REMEDY}")
    return lengths.astype(np.int64)
