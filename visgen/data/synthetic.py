"""Coloured shapes drawn from a seed: data without files, for debug configs and tests.

Sample i is a function of (seed, split, i) alone. The label is the kind of shape; colour, place, size, turn and the
background's gradient vary freely, so a tokenizer has something to learn within a minute.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from visgen.config import UserError
from visgen.data import Data, Split

Plane = np.ndarray  # [S, S] float


@dataclass(frozen=True)
class Config:
    image_size: int = 32
    """Side of the square images in pixels."""
    classes: int = 4
    """Kinds of shapes: the first of disc, square, triangle, ring, cross, star, crescent, hexagon."""
    n: int = 8192
    """Training images."""
    n_held_out: int = 1024
    seed: int = 0
    """Another seed, other images."""


class Synthetic(Data):
    """Sample i has label i mod `classes`; it is never augmented."""

    def __init__(self, config: Config, split: Split) -> None:
        if not 1 <= config.classes <= len(SHAPES):
            raise UserError(f"data.classes {config.classes} must lie in 1..{len(SHAPES)}: {', '.join(SHAPES)}")
        if config.image_size < 8:
            raise UserError(f"data.image_size {config.image_size} is too small for a shape; at least 8")
        self.config, self.split = config, split
        self.classes = list(SHAPES)[: config.classes]
        self.image_size = (config.image_size, config.image_size)
        self._n = config.n if split == "train" else config.n_held_out
        if self._n < 1:
            raise UserError(f"data.{'n' if split == 'train' else 'n_held_out'} {self._n} must be at least 1")
        if config.seed < 0:
            raise UserError(f"data.seed {config.seed} must not be negative")
        self.labels = torch.arange(self._n) % config.classes

    def __len__(self) -> int:
        return self._n

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        if not 0 <= index < self._n:
            raise IndexError(f"sample {index} of {self._n}")
        label = index % len(self.classes)
        own = np.random.default_rng((self.config.seed, self.split == "held_out", index))
        image = draw(SHAPES[self.classes[label]], self.config.image_size, own)
        return {"pixels": torch.from_numpy(image.transpose(2, 0, 1)[None].copy()), "label": label}


def draw(shape: Callable[[Plane, Plane], Plane], size: int, rng: np.random.Generator) -> np.ndarray:
    """One picture, uint8 [S, S, 3]: a lit shape with a soft shadow on a two-colour gradient."""
    centre, turn, radius = rng.uniform(-0.25, 0.25, 2), rng.uniform(-0.6, 0.6), rng.uniform(0.4, 0.62)
    hue, shade = rng.uniform(), rng.uniform(0.75, 1)
    ground = [_colour(rng.uniform(), 0.35, value) for value in rng.uniform(0.35, 0.95, 2)]
    slope = rng.uniform(-1, 1, 2)

    axis = (np.arange(size) + 0.5) * 2 / size - 1
    y, x = np.meshgrid(axis, axis, indexing="ij")  # the picture is [-1, 1] x [-1, 1]

    def cover(dx: float, dy: float, softness: float) -> Plane:
        """Coverage in [0, 1] of the shape moved by (dx, dy), its edge `softness` wide."""
        u, v = (x - centre[0] - dx) / radius, (y - centre[1] - dy) / radius
        cos, sin = np.cos(turn), np.sin(turn)
        return np.clip(0.5 - shape(cos * u + sin * v, cos * v - sin * u) * radius / softness, 0, 1)

    blend = np.clip(0.5 + 0.5 * (slope[0] * x + slope[1] * y), 0, 1)[..., None]
    image = ground[0] * blend + ground[1] * (1 - blend)
    image = image * (1 - 0.4 * cover(0.08, 0.1, 0.25)[..., None])
    light = np.clip(1 - 0.25 * (x + y - centre.sum()), 0.6, 1.3)[..., None]
    mask = cover(0, 0, 2 / size)[..., None]
    image = image * (1 - mask) + np.clip(_colour(hue, 0.8, shade) * light, 0, 1) * mask
    return np.round(image * 255).astype(np.uint8)


def _colour(hue: float, saturation: float, value: float) -> np.ndarray:
    return np.array(colorsys.hsv_to_rgb(hue, saturation, value))


def _disc(x: Plane, y: Plane) -> Plane:
    return np.hypot(x, y) - 0.9


def _square(x: Plane, y: Plane) -> Plane:
    return np.maximum(abs(x), abs(y)) - 0.75


def _triangle(x: Plane, y: Plane) -> Plane:
    return np.maximum(abs(x) * 0.866 - y * 0.5, y) - 0.55


def _ring(x: Plane, y: Plane) -> Plane:
    return abs(np.hypot(x, y) - 0.7) - 0.22


def _cross(x: Plane, y: Plane) -> Plane:
    return np.maximum(np.minimum(abs(x), abs(y)) - 0.28, np.maximum(abs(x), abs(y)) - 0.95)


def _star(x: Plane, y: Plane) -> Plane:
    return np.hypot(x, y) - 0.68 - 0.3 * np.cos(5 * np.arctan2(x, -y))


def _crescent(x: Plane, y: Plane) -> Plane:
    return np.maximum(np.hypot(x, y) - 0.95, 0.8 - np.hypot(x - 0.5, y))


def _hexagon(x: Plane, y: Plane) -> Plane:
    return np.maximum(abs(x) * 0.866 + abs(y) * 0.5, abs(y)) - 0.8


# Distance to the edge of each shape of radius about 1, negative inside.
SHAPES: dict[str, Callable[[Plane, Plane], Plane]] = {
    "disc": _disc,
    "square": _square,
    "triangle": _triangle,
    "ring": _ring,
    "cross": _cross,
    "star": _star,
    "crescent": _crescent,
    "hexagon": _hexagon,
}
