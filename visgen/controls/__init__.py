"""Controls: maps that say where things shall be. One file per kind: how a map is made of an image, or read from a file.

What turns maps into additions to the transformer is common to all kinds: `nn/control.py`, built by the model from the
fields of `ControlConfig`, which every kind's `Config` has. A control holds no weights of the model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from visgen.checks import Depth, Rate
from visgen.config import kind_of, plugin
from visgen.data._images import read_picture
from visgen.nn.control import EncoderConfig, Resize


@dataclass(frozen=True)
class ControlConfig:
    """What every kind of control says of a model.

    Attributes:
        encoder: the ViT that reads the maps.
        injections: J, the number of layers before which control is added.
        resize: how a map comes to the encoder's size (ControlAR: nearest for canny and seg, else bicubic).
        dropout: probability that training drops the control alone, beside the dropping of label and control together.
            Above 0 it teaches what a separate `guidance.control` needs: the label without the control.
        beside: another kind of map that the same encoder is trained on, half of the time; its own encoder, injections,
            resize and dropout are not looked at.
    """

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    injections: Depth = 3
    resize: Resize = "bicubic"
    dropout: Rate = 0.0
    beside: Any = plugin("visgen.controls", None)


class Control(nn.Module, ABC):
    """Built as `Control(config)`, which reads no file.

    Attributes:
        in_worker: whether `extract` is cheap CPU work that belongs into the processes that read data.
        background: what shows through the transparent parts of a given map.
    """

    in_worker: bool = False
    background: str = "black"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def ready(self) -> None:
        """Loads what `extract` needs.

        Raises:
            UserError: it is not there, or this kind has only given maps; says what would help.
        """

    @abstractmethod
    def extract(self, pixels: Tensor) -> Tensor:
        """Images [B, T, 3, H, W] in [-1, 1] -> their maps, same shape and range. `ready` comes first."""

    def read(self, path: Path, invert: bool = False, flag: str = "--control.map") -> Tensor:
        """A map from a file, uint8 [3, H, W].

        Args:
            invert: take the negative, for a file of the other polarity.

        Raises:
            UserError: missing, unreadable, or not such a map; names `flag`.
        """
        picture = read_picture(path, flag, self.background, "map")
        return self.checked(255 - as_map(picture) if invert else as_map(picture), f"{flag} {path}")

    def checked(self, values: Tensor, name: str) -> Tensor:
        """A given map uint8 [3, H, W] as the model knows them; raises `UserError` for what is no such map."""
        return values


def as_map(picture: Image.Image) -> Tensor:
    """RGB picture -> uint8 [3, H, W]."""
    return torch.from_numpy(np.array(picture).transpose(2, 0, 1).copy())


def chain(config: Any) -> Iterator[Any]:
    """The configs of all kinds that a model of this control was trained on."""
    while config is not None:
        yield config
        config = config.beside


def kinds_of(config: Any) -> dict[str, Any]:
    """{kind: config} of `chain`."""
    return {kind_of(each): each for each in chain(config)}
