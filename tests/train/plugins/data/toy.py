"""Tiny random images; the augmentation is additive noise, so a sample depends on (seed, epoch, index)."""

from dataclasses import dataclass

import numpy as np
import torch

from visgen.config import UserError
from visgen.data import Data


@dataclass(frozen=True)
class Config:
    n: int = 40
    bad: int = -1  # index of a sample that cannot be read
    held_out: bool = True


class Toy(Data):
    def __init__(self, config: Config, split: str) -> None:
        if split == "held_out" and not config.held_out:
            raise UserError("data 'toy' has no held-out split")
        self.config, self.split = config, split
        self.classes, self.image_size = ["a", "b"], (4, 4)

    def __len__(self) -> int:
        return self.config.n

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict:
        if index == self.config.bad:
            raise UserError(f"image {index}.png cannot be read; remove it")
        base = np.random.default_rng(index).integers(0, 200, (1, 3, 4, 4))
        noise = 0 if rng is None else rng.integers(0, 50, base.shape)
        return {"pixels": torch.as_tensor((base + noise).astype(np.uint8)), "label": index % 2}
