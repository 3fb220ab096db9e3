"""From one state of the engine to a small picture with depth, segmentation and label; and what makes a view unfit.

All sums here are of whole numbers that a float holds exactly, so the bytes depend neither on the processor nor on the
version of a library.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

RENDERED = (240, 320)  # height and width of the engine's frames
FAR = 127  # walls and sprites saturate at this level of depth in frames of this size; one level is about 7.1 map units
MONSTERS = {  # the engine's name -> Freedoom's
    "Zombieman": "zombie",
    "ShotgunGuy": "shotgun zombie",
    "ChaingunGuy": "minigun zombie",
    "DoomImp": "serpentipede",
    "Demon": "flesh worm",
    "LostSoul": "hatchling",
    "Cacodemon": "trilobite",
    "HellKnight": "pain bringer",
    "BaronOfHell": "pain lord",
    "Revenant": "dark soldier",
    "Fatso": "combat slug",
    "Arachnotron": "technospider",
    "PainElemental": "matribite",
    "Archvile": "necromancer",
    "Cyberdemon": "assault tripod",
}
SCENERY = ("outdoors", "hall", "room")
SUBJECTS = (*MONSTERS.values(), *SCENERY)
PARTS = ("sky", "wall", "floor", "ceiling", "monster", "item", "decor", "effect", "weapon")
SKY, WALL, FLOOR, CEILING = range(4)
WEAPON = PARTS.index("weapon")  # its depth is 0
CATEGORIES = {  # the engine's category of an object -> its part
    **dict.fromkeys(("Monster", "Player"), "monster"),
    **dict.fromkeys(("Health", "Armor", "Ammo", "Weapon", "Key", "Powerup", "Item"), "item"),
    **dict.fromkeys(("Projectile", "Explosive", "SFX", "Effect"), "effect"),
    "Self": "weapon",
}  # all others are decor
GAMMA = 1.4  # the frames are too dark to be seen at 64 pixels
BRIGHTER = np.array([round(255 * (i / 255) ** (1 / GAMMA)) for i in range(256)], np.uint8)
NEAR_UNIT = 256
NEAR = np.array([round(255 * NEAR_UNIT * (1 - math.log1p(d) / math.log(FAR + 1))) for d in range(FAR + 1)], np.float64)
FILTERS = {  # why a shot is refused
    "void": "the place lies outside the map",
    "close": "a wall fills the picture: median depth below 5, 90th percentile below 14, or a quarter at depth 0 or 1",
    "torn": "depth is missing: 40 pairs of neighbours of depth <= 1 and >= 12, or near wall free of both edges",
    "wrapped": "0.2 % of floor or ceiling whose depth has wrapped around",
    "dark": "mean brightness of at most 14 of 255, or a standard deviation of at most 10",
    "plain": "one part alone",
    "mixed": "no monster is the subject: two of a size, or one of 0.8 to 3 % of the picture",
    "surplus": "there are enough of its subject",
    "dull": "a wall fills more than a quarter of the frames of a clip",
    "lost": "a clip that leaves the map",
}


@dataclass(frozen=True)
class Object:
    """What the engine says about the pixels of one value in its buffer of labels."""

    value: int
    name: str
    category: str


class Frame:
    """One state of the engine, cropped to the aspect of `size`; reduced to that size when it is asked for.

    Args:
        rgb: uint8 [240, 320, 3].
        depth, labels: uint8 [240, 320].
        objects: what the values of `labels` stand for.

    Attributes:
        levels: uint8 [H, W], the depth, mended and cut at `FAR`.
        parts: uint8 [H, W], numbers of `PARTS`.
        wrapped: share of pixels whose depth has wrapped around.
        monsters: share of the picture of each species in it, by the engine's name.
    """

    def __init__(
        self,
        rgb: np.ndarray,
        depth: np.ndarray,
        labels: np.ndarray,
        objects: Sequence[Object],
        size: tuple[int, int],
    ) -> None:
        crop = centre(depth.shape, size)
        self.size, self._rgb, labels = size, rgb[crop], labels[crop]
        self.levels, self.parts, self.wrapped = mended(depth[crop], labels, objects)
        counts = np.bincount(labels.ravel(), minlength=256)
        self.monsters: dict[str, float] = {}
        for each in objects:
            if each.name in MONSTERS:
                share = self.monsters.get(each.name, 0.0) + float(counts[each.value]) / labels.size
                self.monsters[each.name] = share

    @functools.cached_property
    def pixels(self) -> np.ndarray:
        """uint8 [h, w, 3]."""
        return BRIGHTER[averaged(self._rgb, self.size)]

    @functools.cached_property
    def depth(self) -> np.ndarray:
        """uint8 [h, w]; near is bright, see `near`."""
        return averaged(NEAR[self.levels][..., None], self.size, NEAR_UNIT)[..., 0]

    @functools.cached_property
    def seg(self) -> np.ndarray:
        """uint8 [h, w], numbers of `PARTS`."""
        return voted(self.parts, self.size)

    def fault(self) -> str | None:
        """Return the name in `FILTERS` of what makes the view unfit, or None."""
        levels = self.levels
        if is_close(levels, 5, 14) or (levels <= 1).mean() >= 0.25:
            return "close"
        if tears(np.where(self.parts == WEAPON, 6, levels)) >= 40 or hanging_strip(levels, self.parts):
            return "torn"
        if self.wrapped >= 0.002:
            return "wrapped"
        values = self.pixels.astype(np.int64)
        total, n = int(values.sum()), values.size
        spread = n * int((values * values).sum()) - total * total  # n^2 times the variance
        if total <= 14 * n or spread <= 100 * n * n:
            return "dark"
        return "plain" if self.parts.min() == self.parts.max() else None

    def subject(self) -> int | None:
        """Return the number in `SUBJECTS` of what stands in front: the largest monster, else the kind of scenery.
        None where a monster is too small to be the subject and too large to be none, or another is of its size."""
        ranked = sorted(self.monsters.items(), key=lambda item: (-item[1], item[0]))
        if ranked and ranked[0][1] >= 0.008:
            rival = ranked[1][1] if len(ranked) > 1 else 0.0
            clear = ranked[0][1] >= 0.03 and rival < 0.4 * ranked[0][1]
            return list(MONSTERS).index(ranked[0][0]) if clear else None
        return len(MONSTERS) + self.scenery()

    def scenery(self) -> int:
        """Return the number in `SCENERY` of a view, whatever stands in it."""
        if (self.parts == SKY).mean() > 0.06:
            return 0
        return 1 if percentile(self.levels, 0.9) > 55 else 2


# ------------------------------------------------------------------------------------------------ depth and parts


def mended(depth: np.ndarray, labels: np.ndarray, objects: Sequence[Object]) -> tuple[np.ndarray, np.ndarray, float]:
    """Return depth and parts of a frame [H, W], and the share of pixels whose depth has wrapped around.

    The engine's buffer of labels has 0 for wall and sky, 1 for floor and ceiling, and larger values for objects.
    Saturated wall is sky, but below the horizon it is a riser without texture, whose depth is that of the pixel beneath
    it. A floor or ceiling far from the horizon is near; a large depth there has wrapped around, and becomes 0.
    """
    height = len(depth)
    row = np.arange(height)[:, None] - (height - 1) / 2  # from the horizon, downwards
    bare, flat = (labels == 0) & (depth >= FAR), labels == 1
    riser = bare & (row > 0.05 * height)
    parts = np.full(depth.shape, WALL, np.uint8)
    parts[bare & ~riser] = SKY
    parts[flat & (row > 0)] = FLOOR
    parts[flat & (row <= 0)] = CEILING
    part_of = np.full(256, PARTS.index("decor"), np.uint8)
    for each in objects:
        part_of[each.value] = PARTS.index(CATEGORIES.get(each.category, "decor"))
    things = labels > 1
    parts[things] = part_of[labels[things]]
    levels = depth.copy()
    if riser.any():
        for i in range(height - 2, height // 2, -1):
            levels[i] = np.where(riser[i], levels[i + 1], levels[i])
    around = flat & (levels >= 190) & (np.abs(row) > 0.15 * height)
    levels[around] = 0
    return np.minimum(levels, FAR), parts, float(around.mean())


def percentile(levels: np.ndarray, share: float) -> int:
    """Return the smallest level that at least `share` of the pixels do not exceed."""
    below = np.bincount(levels.ravel(), minlength=FAR + 1).cumsum()
    return int(np.searchsorted(below, share * levels.size))


def is_close(levels: np.ndarray, median: int, far: int) -> bool:
    """Return whether a wall fills the picture: its median depth or its 90th percentile is small."""
    return percentile(levels, 0.5) < median or percentile(levels, 0.9) < far


def middle(levels: np.ndarray) -> np.ndarray:
    """Return the middle third of the columns."""
    third = levels.shape[1] // 3
    return levels[:, third:-third]


def tears(levels: np.ndarray) -> int:
    """Count neighbours in a row of depth <= 1 and >= 12: a fence from afar, whose depth the engine does not write."""
    near, far = levels <= 1, levels >= 12
    return int((near[:, :-1] & far[:, 1:]).sum() + (far[:, :-1] & near[:, 1:]).sum())


def hanging_strip(levels: np.ndarray, parts: np.ndarray) -> bool:
    """Return whether columns of near wall touch neither the left nor the right edge: again a fence from afar."""
    near = ((levels <= 1) & (parts == WALL)).mean(0) > 0.1
    open_columns = np.flatnonzero(~near)
    return not len(open_columns) or bool(near[open_columns[0] : open_columns[-1]].any())


# ----------------------------------------------------------------------------------------------------- reduction


def centre(full: tuple[int, ...], size: tuple[int, int]) -> tuple[slice, slice]:
    """Return the largest centred crop of a full frame that has the aspect of `size` (both [height, width])."""
    height, width = full[0], full[1]
    if width * size[0] > height * size[1]:
        width = height * size[1] // size[0]
    else:
        height = width * size[0] // size[1]
    top, left = (full[0] - height) // 2, (full[1] - width) // 2
    return slice(top, top + height), slice(left, left + width)


@functools.cache
def overlaps(full: int, small: int) -> np.ndarray:
    """Return [small, full] whole numbers: how much of each full pixel lies in each small one. Rows have equal sums."""
    unit = math.gcd(full, small)
    long, short = small // unit, full // unit  # lengths of a full and of a small pixel
    starts, ends = np.arange(full) * long, np.arange(1, full + 1) * long
    low, high = np.arange(small)[:, None] * short, np.arange(1, small + 1)[:, None] * short
    return (np.minimum(ends, high) - np.maximum(starts, low)).clip(min=0).astype(np.float64)


def summed(values: np.ndarray, size: tuple[int, int], largest: int) -> tuple[np.ndarray, int]:
    """Return weighted sums [h, w, k] of whole numbers [H, W, k] over each small pixel, and the sum of the weights.

    Args:
        largest: the largest value, which says in which type the sums are exact.
    """
    rows, columns = overlaps(values.shape[0], size[0]), overlaps(values.shape[1], size[1])
    weight = int(rows[0].sum() * columns[0].sum())
    exact = "f4" if weight * largest < 1 << 24 else "f8"
    tall: np.ndarray = rows.astype(exact) @ values.astype(exact).reshape(len(values), -1)  # [h, W k]
    tall = tall.reshape(size[0], *values.shape[1:]).transpose(0, 2, 1)  # [h, k, W]
    return np.matmul(tall, columns.T.astype(exact)).transpose(0, 2, 1), weight


def averaged(values: np.ndarray, size: tuple[int, int], unit: int = 1) -> np.ndarray:
    """Return the mean over each small pixel, rounded: uint8 [h, w, k] of values [H, W, k] in [0, 255 unit]."""
    sums, weight = summed(values, size, 255 * unit)
    weight *= unit
    return ((sums.astype(np.int64) + weight // 2) // weight).astype(np.uint8)


def voted(parts: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the commonest part in each small pixel: uint8 [h, w] of parts [H, W]; the first of equal ones."""
    present = np.flatnonzero(np.bincount(parts.ravel()))
    votes, _ = summed(parts[..., None] == present, size, 1)  # [h, w, k]
    return present[votes.argmax(-1)].astype(np.uint8)


def near(level: np.ndarray) -> np.ndarray:
    """Return the brightness 0..255 of levels of depth: 255 (1 - ln(1 + d) / ln 128), the same for all pictures."""
    return NEAR[np.minimum(level, FAR)] / NEAR_UNIT


def level_of(brightness: np.ndarray) -> np.ndarray:
    """Return the level of depth of a brightness: the inverse of `near`."""
    return np.expm1((1 - brightness / 255) * math.log(FAR + 1))


def settings() -> Mapping[str, object]:
    """Return what an index says about this file."""
    return {"gamma": GAMMA, "far": FAR, "rendered": list(RENDERED), "filters": FILTERS}
