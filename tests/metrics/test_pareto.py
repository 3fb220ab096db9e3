"""Pareto fronts and their plots."""

from pathlib import Path

import numpy as np
from PIL import Image

from visgen.metrics.pareto import Point, front, pareto


def test_the_front_holds_what_no_point_beats() -> None:
    points = [
        Point("r", name, x, y) for name, x, y in [("a", 1, 5), ("b", 2, 3), ("c", 2, 4), ("d", 3, 3), ("e", 4, 1)]
    ]
    assert [p.text for p in front(points)] == ["a", "b", "e"]
    assert front([]) == [] and front(points[:1]) == points[:1]


def test_a_plot_shows_its_points_and_marks(tmp_path: Path) -> None:
    points = [
        Point("ar", "", 1.0, 2.0, 0.1),
        Point("sjd", "window 8", 0.1, 2.1, 0.2),
        Point("sjd", "window 16", 0.2, 1.9),
    ]
    assert pareto(points, tmp_path / "a.png", ("seconds", "fd"), {"floor": 0.5})
    assert pareto(points[:1], tmp_path / "b.png", ("seconds", "fd"))
    a, b = (np.asarray(Image.open(tmp_path / name)) for name in ("a.png", "b.png"))
    assert a.shape == b.shape and (a != b).any() and 0.5 < (a > 250).mean() < 0.99
