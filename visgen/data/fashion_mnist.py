"""Fashion-MNIST (Xiao et al. 2017, arXiv:1708.07747, MIT): 60,000 training and 10,000 test images, 10 classes.

The 28 x 28 grey images are zero-padded by 2 to 32 x 32 and repeated to RGB. Read from the idx files of Debian's
`dataset-fashion-mnist` or of torchvision's download, gzipped or plain.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visgen.config import UserError
from visgen.data import Data, Split
from visgen.files import from_home

SEARCHED = (Path("/usr/share/datasets/fashion-mnist"), Path("~/.cache/visgen/fashion_mnist"))
CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
PAD = 2


@dataclass(frozen=True)
class Config:
    root: Path | None = None
    """Folder of the idx files, or of torchvision's download; by default the Debian package's, then the cache's."""
    download: bool = False
    """Fetch the files through torchvision into root (default ~/.cache/visgen/fashion_mnist) when they are missing."""
    hflip: bool = False
    """Mirror half of the training images."""
    shift: int = 0
    """Move training images by up to this many pixels in x and y, at most 2 (the padding)."""


class FashionMNIST(Data):
    """Held in memory; `held_out` is the test set. Augmentation applies to the train split only."""

    def __init__(self, config: Config, split: Split) -> None:
        if not 0 <= config.shift <= PAD:
            raise UserError(f"data.shift {config.shift} must lie in 0..{PAD}, the padding around the 28 x 28 image")
        self.config, self.split = config, split
        self.classes, self.image_size = list(CLASSES), (32, 32)
        images, labels = (_find(config, name) for name in _files(split))
        raw = read_idx(images, dimensions=3)
        self.labels = torch.from_numpy(read_idx(labels, dimensions=1).astype(np.int64))
        if raw.shape[1:] != (28, 28):
            raise UserError(f"{images} holds images of {raw.shape[1]} x {raw.shape[2]}, Fashion-MNIST's are 28 x 28")
        if len(raw) != len(self.labels):
            raise UserError(f"{images} holds {len(raw)} images but {labels} {len(self.labels)} labels; reinstall them")
        if len(self.labels) and int(self.labels.max()) >= len(CLASSES):
            raise UserError(f"{labels} holds label {int(self.labels.max())}, Fashion-MNIST's are 0..9")
        self._grey = torch.from_numpy(np.pad(raw, ((0, 0), (PAD, PAD), (PAD, PAD))))  # [n, 32, 32]

    def __len__(self) -> int:
        return len(self.labels)

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        grey = self._grey[index]
        if rng is not None and self.split == "train":
            if self.config.shift:
                grey = torch.roll(grey, tuple(rng.integers(-self.config.shift, self.config.shift + 1, 2)), (0, 1))
            if self.config.hflip and rng.random() < 0.5:
                grey = grey.flip(-1)
        return {"pixels": grey.repeat(1, 3, 1, 1), "label": int(self.labels[index])}

    def get_many(self, indices: Sequence[int]) -> dict[str, Tensor]:
        chosen = torch.as_tensor(indices)
        return {"pixels": self._grey[chosen][:, None, None].repeat(1, 1, 3, 1, 1), "label": self.labels[chosen]}


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """uint8 array of an idx file (big-endian header: magic 0x08 and the number of dimensions, then each size).

    Raises:
        UserError: another magic number, or fewer or more bytes than the header says.
    """
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (EOFError, zlib.error, OSError) as error:
        raise UserError(f"{path} cannot be read ({error}); it is truncated or damaged, {_remedy()}") from None
    magic = 0x800 + dimensions
    found = int.from_bytes(data[:4])
    if len(data) < 4 * (1 + dimensions) or found != magic:
        raise UserError(f"{path} begins with {found:#06x}, an idx file of its kind with {magic:#06x}; {_remedy()}")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", dimensions, 4))
    body = np.frombuffer(data, np.uint8, offset=4 * (1 + dimensions))
    if body.size != int(np.prod(shape)):
        raise UserError(f"{path} holds {body.size} bytes of {shape}: truncated or damaged; {_remedy()}")
    return body.reshape(shape)


def _files(split: Split) -> tuple[str, str]:
    stem = "train" if split == "train" else "t10k"
    return f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"


def _find(config: Config, name: str) -> Path:
    roots = [from_home(path) for path in ([config.root] if config.root else SEARCHED)]
    found = _look(roots, name)
    if found is None and config.download:
        _download(roots[-1])
        found = _look(roots, name)
    if found is None:
        where = " or ".join(map(str, roots))
        raise UserError(f"Fashion-MNIST: no {name}(.gz) in {where}; {_remedy()}")
    return found


def _look(roots: Sequence[Path], name: str) -> Path | None:
    tried = (
        r / inner / f"{name}{suffix}" for r in roots for inner in ("", "FashionMNIST/raw") for suffix in ("", ".gz")
    )
    return next((path for path in tried if path.is_file()), None)


def _download(root: Path) -> None:
    from torchvision.datasets import FashionMNIST as Download

    try:
        root.mkdir(parents=True, exist_ok=True)
        Download(str(root), download=True)
    except (OSError, RuntimeError) as error:  # no network, no permission, checksum
        reason = " ".join(str(error).split())
        raise UserError(f"Fashion-MNIST cannot be downloaded to {root} ({reason}); {_remedy()}") from None


def _remedy() -> str:
    return "`apt install dataset-fashion-mnist`, or pass --data.download, or --data.root with the idx files"
