"""Plots of reports: a metric against what it costs, with the Pareto front of all samplers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    """Writes a PNG of y against x (logarithmic), error bars of one standard error, and the front as steps.

    Args:
        labels: of x and y.
        marks: values of y to compare with, such as the tokenizer's own, as dotted lines.

    Returns:
        False where matplotlib is not installed: nothing is written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter
    except ImportError:
        return False
    figure = Figure(figsize=(8, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    rows = list(dict.fromkeys(p.row for p in points))
    for i, row in enumerate(rows):
        mine = sorted((p for p in points if p.row == row), key=lambda p: p.x)
        x, y = [p.x for p in mine], [p.y for p in mine]
        shape = "os^Dv<>P*X"[i // 10 % 10]
        style: dict[str, Any] = {"fmt": shape + ("-" if len(mine) > 1 else ""), "color": f"C{i % 10}", "linewidth": 0.7}
        axes.errorbar(x, y, [p.error for p in mine], capsize=2, label=row, markersize=5, **style)
    best = front(points)
    if len(best) > 1:
        axes.step([p.x for p in best], [p.y for p in best], where="post", color="0.6", zorder=0, linewidth=3, alpha=0.5)
    for name, value in (marks or {}).items():
        axes.axhline(value, color="0.4", linestyle=":", linewidth=1)
        axes.annotate(name, (0.005, value), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(LogLocator(subs="all"))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize=10)
    axes.grid(True, which="both", linewidth=0.3)
    axes.legend(fontsize=7, loc="best")
    _name(axes, [*best, *(p for p in points if p not in best)])
    figure.savefig(path, dpi=110)
    return True


def _name(axes: Any, points: Sequence[Point]) -> None:
    """Writes each point's text beside it, but where it would lie on one written before."""
    axes.figure.draw_without_rendering()  # lays out, so that texts know where they are
    taken: list[Any] = []
    for point in points:
        text = axes.annotate(point.text, (point.x, point.y), (4, 4), textcoords="offset points", fontsize=6)
        box = text.get_window_extent()
        if any(box.overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)
