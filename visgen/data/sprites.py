"""Moving sprites: pictures of another data set that bounce, fall, circle and swing over one another; made from a seed.

After Moving MNIST (Srivastava et al. 2015, arXiv 1502.04681, section 3.1), with several kinds of motion, which are the
classes. A plain clip is a function of (seed, split, index) alone; each training access draws another one of its class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import cv2
import numpy as np
import torch
from PIL import Image

from visgen.checks import Natural, Positive
from visgen.config import UserError, build, plugin
from visgen.data import Data, Split

Path = np.ndarray  # [T, 2] (x, y) of a sprite's upper left corner


@dataclass(frozen=True)
class Config:
    """Moving sprites.

    Attributes:
        pictures: where the sprites come from; held-out clips show its held-out pictures.
        ground: the pictures' background, which becomes see-through, and the clips'.
        image_size: side of the square clips in pixels.
        frames: of a clip.
        sprite: side of a sprite in pixels.
        sprites: of a clip; the later ones pass in front.
        motions: kinds of motion, of bounce, fall, circle, swing: the first so many are the classes.
        n, n_held_out: clips.
        seed: another seed, other clips.
    """

    pictures: Any = plugin("visgen.data", "fashion_mnist")
    ground: Literal["black", "white"] = "black"
    image_size: Positive = 32
    frames: Positive = 16
    sprite: Positive = 16
    sprites: Positive = 2
    motions: Positive = 4
    n: Positive = 20_000
    n_held_out: Positive = 2_048
    seed: Natural = 0


class Sprites(Data):
    """Clip i has class i modulo `motions`."""

    config: Config

    def __init__(self, config: Config, split: Split) -> None:
        if config.motions > len(MOTIONS):
            raise UserError(f"data.motions {config.motions} must lie in 1..{len(MOTIONS)}: {', '.join(MOTIONS)}")
        if config.sprite >= config.image_size:
            raise UserError(
                f"data.sprite {config.sprite} px leaves no room to move in {config.image_size} px; make it smaller"
            )
        self.config, self.split = config, split
        self.pictures: Data = build(config.pictures, split)
        self.classes = list(MOTIONS)[: config.motions]
        self.image_size, self.frames = (config.image_size, config.image_size), config.frames
        self._n = config.n if split == "train" else config.n_held_out
        self.labels = torch.arange(self._n) % config.motions

    def __len__(self) -> int:
        return self._n

    def get(self, index: int, rng: np.random.Generator | None = None) -> dict[str, Any]:
        if not 0 <= index < self._n:
            raise IndexError(f"clip {index} of {self._n}")
        label = index % self.config.motions
        if rng is None or self.split == "held_out":
            rng = np.random.default_rng((self.config.seed, self.split == "held_out", index))
        clip = self._draw(MOTIONS[self.classes[label]], rng)
        return {"pixels": torch.from_numpy(clip.transpose(0, 3, 1, 2).copy()), "label": label}

    def _draw(self, motion: Callable[[int, float, np.random.Generator], Path], rng: np.random.Generator) -> np.ndarray:
        """uint8 [T, S, S, 3]."""
        size, room = self.config.image_size, float(self.config.image_size - self.config.sprite)
        ground = 0.0 if self.config.ground == "black" else 255.0
        clip = np.full((self.config.frames, size, size, 3), ground, np.float32)
        for _ in range(self.config.sprites):
            colour, cover = self._sprite(int(rng.integers(len(self.pictures))))
            sprite = np.concatenate([colour * cover, cover], -1)
            path = motion(len(clip), room, rng)
            moved = np.stack([cv2.warpAffine(sprite, np.array([[1, 0, x], [0, 1, y]]), (size, size)) for x, y in path])
            clip *= 1 - moved[..., 3:]
            clip += moved[..., :3]
        return np.clip(np.rint(clip), 0, 255).astype(np.uint8)

    def _sprite(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(colours [s, s, 3], cover [s, s, 1] in [0, 1]) of a picture, float32."""
        pixels = self.pictures.get(index)["pixels"][0].permute(1, 2, 0).numpy()
        side = self.config.sprite
        colour = np.asarray(Image.fromarray(pixels).resize((side, side), Image.Resampling.BOX), np.float32)
        away = colour.max(-1) if self.config.ground == "black" else 255 - colour.min(-1)
        return colour, np.clip(away / 48, 0, 1)[..., None]


# ------------------------------------------------------------------------ motions: (frames, room, rng) -> positions


def _folded(x: np.ndarray, room: float) -> np.ndarray:
    """A straight walk, thrown back by walls at 0 and `room`."""
    return room - abs(x % (2 * room) - room)


def _bounce(frames: int, room: float, rng: np.random.Generator) -> Path:
    """Straight, thrown back by the walls."""
    turn, speed = rng.uniform(0, 2 * math.pi), room * rng.uniform(0.06, 0.16)
    way = speed * np.arange(frames)[:, None] * [math.cos(turn), math.sin(turn)]
    return _folded(rng.uniform(0, room, 2) + way, room)


def _fall(frames: int, room: float, rng: np.random.Generator) -> Path:
    """Thrown, pulled down, and thrown back by the floor with four fifths of its speed."""
    pull, height, speed = room * 0.015, rng.uniform(0, room / 2), room * rng.uniform(-0.05, 0.05)
    x = _folded(rng.uniform(0, room) + room * rng.uniform(-0.08, 0.08) * np.arange(frames), room)
    y = np.empty(frames)
    for i in range(frames):
        y[i] = height
        speed += pull
        height += speed
        if height > room:
            height, speed = 2 * room - height, -0.8 * speed
        height = min(max(height, 0.0), room)
    return np.stack([x, y], 1)


def _circle(frames: int, room: float, rng: np.random.Generator) -> Path:
    """Round and round, either way."""
    radius = room / 2 * rng.uniform(0.4, 1)
    centre = rng.uniform(radius, room - radius, 2)
    angle = rng.uniform(0, 2 * math.pi) + rng.choice([-1, 1]) * rng.uniform(0.2, 0.45) * np.arange(frames)
    return centre + radius * np.stack([np.cos(angle), np.sin(angle)], 1)


def _swing(frames: int, room: float, rng: np.random.Generator) -> Path:
    """A pendulum that hangs from the middle of the ceiling."""
    length, wide = room * rng.uniform(0.5, 0.95), rng.uniform(0.3, 0.5)
    wide = min(wide, math.asin(min(1.0, room / 2 / length)))
    phase = rng.uniform(0, 2 * math.pi) + rng.uniform(0.3, 0.6) * np.arange(frames)
    angle = wide * np.sin(phase)
    return np.stack([room / 2 + length * np.sin(angle), length * np.cos(angle)], 1)


MOTIONS: dict[str, Callable[[int, float, np.random.Generator], Path]] = {
    "bounce": _bounce,
    "fall": _fall,
    "circle": _circle,
    "swing": _swing,
}
