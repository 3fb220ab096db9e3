"""Pareto fronts and their plots."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
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


def test_only_the_front_is_joined_and_every_name_stands_inside_the_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []
    real = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), real(self, *a, **k)))
    rows = {"a": [(1.0, 5.0), (2.0, 1.0), (4.0, 3.0), (9.0, 2.0)], "b": [(1.0, 4.0), (9.0, 0.5)]}
    points = [Point(row, f"a long name {x:g}", x, y) for row, places in rows.items() for x, y in places]
    assert pareto(points, tmp_path / "a.png", ("seconds", "fd"), {"the tokenizer alone": 5.1, "real": 0.5})
    (axes,) = drawn[0].axes
    joined = [line for line in axes.lines if line.get_linestyle() == "-" and len(line.get_xdata()) > 1]
    assert [list(zip(*line.get_data(), strict=True)) for line in joined] == [[(1.0, 4.0), (2.0, 1.0), (9.0, 0.5)]]
    drawn[0].draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert {"a long name 1", "the tokenizer alone", "real"} <= {text.get_text() for text in axes.texts}
    for i, box in enumerate(boxes):
        assert axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
        assert not any(box.overlaps(other) for other in boxes[:i])
