"""Plots of reports: a metric against what it costs, with the Pareto front of all samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from visgen.files import publishing


@dataclass(frozen=True)
class Point:
    """A cell of a sweep in a plot: its row gives the colour, `text` stands beside it."""

    row: str
    text: str
    x: float
    y: float
    error: float = 0.0  # one standard error of y


def front(points: Sequence[Point]) -> list[Point]:
    """The points that no other one beats: smaller x and smaller y are better; by x, one of equals."""
    out: list[Point] = []
    for point in sorted(points, key=lambda p: (p.x, p.y)):
        if not out or point.y < out[-1].y:
            out.append(point)
    return out


def pareto(
    points: Sequence[Point],
    path: Path,
    labels: tuple[str, str],
    marks: Mapping[str, float] | None = None,
    title: str = "",
) -> bool:
    """Write a PNG of y against x (logarithmic): all points with one standard error, those of the front joined.

    Args:
        labels: of x and y.
        marks: values of y to compare with, such as the tokenizer's own, as dotted lines.

    Returns:
        False where matplotlib is not installed: nothing is written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.margins(0.08)
    if len({p.x for p in points}) == 1:
        axes.set_xlim(points[0].x / 2, 2 * points[0].x)
    for i, row in enumerate(dict.fromkeys(p.row for p in points)):
        mine = [p for p in points if p.row == row]
        style: dict[str, Any] = {"fmt": "os^Dv<>P*X"[i // 10 % 10], "color": f"C{i % 10}", "linewidth": 0.7}
        errors = [p.error for p in mine]
        axes.errorbar([p.x for p in mine], [p.y for p in mine], errors, capsize=2, label=row, markersize=5, **style)
    best = front(points)
    axes.plot([p.x for p in best], [p.y for p in best], color="0.6", zorder=0, linewidth=3, alpha=0.5, label="front")
    for value in (marks or {}).values():
        axes.axhline(value, color="0.4", linestyle=":", linewidth=1)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.xaxis.set_minor_locator(LogLocator(subs="all"))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=7, loc="best")
    _name(axes, [*best, *(p for p in points if p not in best)], marks or {})
    with publishing(path) as unfinished:
        figure.savefig(unfinished, dpi=110, format="png")
    return True


def _name(axes: Any, points: Sequence[Point], marks: Mapping[str, float]) -> None:
    """Write the names of marks and points beside them, inside the axes and not on one another; what has no room is left
    out."""
    axes.figure.draw_without_rendering()  # lays out, so that texts know where they are
    taken: list[Any] = []
    left = axes.get_xlim()[0]
    named = [(name, left, value, 7) for name, value in marks.items()]
    for text, x, y, size in [*named, *((p.text, p.x, p.y, 6) for p in points if p.text)]:
        for across, up in ((4, 4), (-4, 4), (4, -4), (-4, -4)):
            sides = {"ha": "left" if across > 0 else "right", "va": "bottom" if up > 0 else "top"}
            written = axes.annotate(text, (x, y), (across, up), textcoords="offset points", fontsize=size, **sides)
            box, room = written.get_window_extent(), axes.bbox
            inside = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            written.remove()
