"""Samples with their control maps, which are made where the samples are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visgen.data import Data


class Mapped(Data):
    """The samples of `data`, each with `map` uint8 [T, 3, H, W] of its augmented pixels.

    Args:
        extract: images [B, T, 3, H, W] in [-1, 1] -> maps; CPU work.
    """

    def __init__(self, data: Data, extract: Callable[[Tensor], Tensor]) -> None:
        self.data, self.extract = data, extract
        self.config, self.split, self.classes, self.image_size = data.config, data.split, data.classes, data.image_size

    def __len__(self) -> int:
        return len(self.data)

    @property
    def skipped(self) -> int:  # type: ignore[override]
        return self.data.skipped

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        sample = self.data.get(index, rng)
        return {**sample, "map": self._maps(sample["pixels"].unsqueeze(0))[0]}

    def get_many(self, indices: Sequence[int]) -> dict[str, Tensor]:
        samples = self.data.get_many(indices)
        return {**samples, "map": self._maps(samples["pixels"])}

    def _maps(self, pixels: Tensor) -> Tensor:
        """uint8 [B, T, 3, H, W] -> uint8 maps of that shape."""
        maps = self.extract(pixels.float() / 127.5 - 1)
        return ((maps + 1) * 127.5).round().to(torch.uint8)
