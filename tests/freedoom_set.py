"""Tiny Freedoom sets without the game: views as they were rendered, one of each subject, and clips of noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from visgen.controls.seg import colours
from visgen.data import freedoom as sets
from visgen.prepare import _freedoom_engine as engine
from visgen.prepare import _freedoom_frames as frames

VIEWS = Path(__file__).parent / "data" / "freedoom_views.npz"


def views(count: int) -> dict[str, np.ndarray]:
    """Rendered views and what is known about them, each [n, 1, ...]."""
    stored = np.load(VIEWS)
    return {name: stored[name][:count, None] for name in ("pixels", "depth", "seg", "label", "pose")}


def clips(count: int, length: int, side: int) -> dict[str, np.ndarray]:
    """Clips of noise, each [n, length, ...]."""
    rng = np.random.default_rng(count)
    shape = (count, length, side, side)
    return {
        "pixels": rng.integers(0, 256, (*shape, 3), np.uint8),
        "depth": rng.integers(0, 256, shape, np.uint8),
        "seg": rng.integers(0, len(frames.PARTS), shape, np.uint8),
        "label": rng.integers(0, 3, shape[:2]),
        "action": rng.integers(0, len(engine.ACTIONS), shape[:2]),
        "pose": rng.normal(size=(*shape[:2], 4)),
    }


def make_index(values: dict[str, np.ndarray], split: sets.Part, shard: int, **changed: Any) -> sets.Index:
    """The index of a set of these values."""
    count, length, height, width, _ = values["pixels"].shape
    settings: dict[str, Any] = {
        "split": split,
        "kind": "clips" if "action" in values else "views",
        "samples": count,
        "frames": length,
        "image_size": [height, width],
        "has_maps": True,
        "classes": list(frames.SCENERY if "action" in values else frames.SUBJECTS),
        "parts": list(frames.PARTS),
        "colours": colours()[: len(frames.PARTS)].tolist(),
        "actions": list(engine.ACTIONS),
        "levels": ["MAP05" if split == "held_out" else "MAP07"],
        "seed": 0,
        "shard_samples": shard,
        "settings": {},
    }
    return sets.Index(**{**settings, **changed})


def write(root: Path, split: sets.Part, values: dict[str, np.ndarray], shard: int = 5, **changed: Any) -> sets.Index:
    """Write a complete set."""
    index = make_index(values, split, shard, **changed)
    folder = root / split
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(index.shard_count):
        rows = list(index.shard(number))
        about = np.zeros((len(rows), index.frames), sets.about_type())
        for name in values.keys() & set(about.dtype.names or ()):
            about[name] = values[name][rows]
        arrays = {name: values[name][rows] for name in ("pixels", "depth", "seg")}
        index.shards.append(sets.write_shard(folder, index, number, {**arrays, "about": about}))
    index.complete = True
    sets.write_index(folder, index)
    return index
