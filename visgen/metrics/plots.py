"""Curves with error bars as a PNG: the figures of programs that measure one thing against another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from visgen.files import publishing

COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#cb912f", "#c14c8a", "#787774")
MARKS = "os^DvPX"


@dataclass
class Panel:
    """One set of axes.

    Attributes:
        x, y: what the axes are.
        curves: name -> [(x, y, standard error or None)].
        logarithmic: of which axes: "", "x", "y" or "xy".
    """

    x: str
    y: str
    curves: dict[str, list[tuple[float, float, float | None]]] = field(default_factory=dict)
    logarithmic: str = ""


def save_panels(panels: Sequence[Panel], path: Path, title: str = "") -> None:
    """Draws the panels side by side.

    Raises:
        UserError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # slow to import, and no part of what is measured

    figure = Figure(figsize=(5 * len(panels), 3.6), dpi=120, layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel)
    if title:
        figure.suptitle(title, fontsize=10)
    with publishing(path) as unfinished:
        figure.savefig(unfinished, format="png", metadata={"Software": None})  # the same bytes for the same numbers


def save_picture(picture: Any, path: Path) -> None:
    """Write a Pillow image as a PNG; see `publishing`."""
    with publishing(path) as unfinished:
        picture.save(unfinished, format="PNG")


def _draw(axes: Any, panel: Panel) -> None:
    ticks = sorted({x for curve in panel.curves.values() for x, _, _ in curve})
    for i, (name, curve) in enumerate(panel.curves.items()):
        x, y, errors = zip(*sorted(curve, key=lambda point: point[0]), strict=True)
        style: dict[str, Any] = {"color": COLOURS[i % len(COLOURS)], "marker": MARKS[i % len(MARKS)], "markersize": 4}
        axes.errorbar(x, y, [e or 0.0 for e in errors], label=name, capsize=2, linewidth=1.3, **style)
    for axis in panel.logarithmic:
        getattr(axes, f"set_{axis}scale")("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
