"""What a sweep found, for people: `report.json`, `report.md`, pictures of equal seeds, and Pareto plots.

The files are the product; W&B mirrors them (`train/mirror.py`).
"""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from visgen.files import write_text
from visgen.metrics.frechet import Comparison, compare
from visgen.metrics.intervals import holm
from visgen.metrics.pareto import Point, pareto
from visgen.metrics.plots import save_picture
from visgen.metrics.protocol import finite
from visgen.metrics.report import diagnose, environment, number, plus_minus
from visgen.pictures import grid
from visgen.sweep import Found, Target

SCHEMA = 1
SEEDS_SHOWN = 8  # columns of same_seeds.png


@dataclass
class SweepReport:
    """All cells under one protocol.

    Attributes:
        title: heading of `report.md`.
        settings: resolved config of the program, as plain values.
        target: protocol, plan, headline and marks.
        found: the cells; the first is the baseline.
        command: what reproduces it.
    """

    title: str
    settings: dict[str, Any]
    target: Target
    found: Sequence[Found]
    command: str = ""
    env: dict[str, Any] = field(default_factory=environment)
    created_utc: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    @property
    def headline(self) -> str:
        return self.target.headline

    def compared(self) -> list[Comparison | None]:
        """Each cell less the baseline, paired; none for the baseline, or where scores have no groups."""
        first = self.found[0].scores[self.headline]
        scores = [found.scores[self.headline] for found in self.found[1:]]
        return [None, *(compare(s, first) if s.leave_out and first.leave_out else None for s in scores)]

    def to_dict(self) -> dict[str, Any]:
        compared = self.compared()
        adjusted = iter(holm([c.p for c in compared if c is not None]))
        cells = []
        for found, c in zip(self.found, compared, strict=True):
            warnings = diagnose(found.scores, found.checks)
            cells.append(
                {
                    "name": found.cell.name,
                    "row": found.cell.row,
                    "at": found.cell.at,
                    "about": finite(found.about),
                    "metrics": {name: score.to_dict() for name, score in found.scores.items()},
                    "less_baseline": None if c is None else {**asdict(c), "p_holm": next(adjusted)},
                    "same_images_as_baseline": self.same(found),
                    "nfe_per_image": nfe_of(found),
                    "speed": finite(found.speed),
                    "checks": finite(found.checks),
                    "seconds": found.seconds,
                    "warnings": warnings,
                    "pictures": f"grid_{found.cell.slug}.png",
                }
            )
        return {
            "schema_version": SCHEMA,
            "kind": "sweep",
            "status": "ok",
            "title": self.title,
            "created_utc": self.created_utc,
            "command": self.command,
            "settings": self.settings,
            "protocol": self.target.protocol.to_dict(),
            "plan": {"hash": self.target.plan.hash, "n": self.target.plan.n, "seed": self.target.plan.seed},
            "headline": self.headline,
            "baseline": self.found[0].cell.name,
            "marks": finite(self.target.marks),
            "env": finite(self.env),
            "cells": cells,
        }

    def same(self, found: Found) -> float:
        """Share of images that are the baseline's, byte by byte."""
        return float((found.keys == self.found[0].keys).double().mean())

    def write(self, out: Path) -> dict[str, Any]:
        """Writes all files into `out`; returns what `report.json` holds."""
        plots = self.plot(out)
        for found in self.found:
            picture = Image.fromarray(grid(found.pixels, max(1, round(len(found.pixels) ** 0.5))))
            save_picture(picture, out / f"grid_{found.cell.slug}.png")
        some = torch.cat([found.pixels[:SEEDS_SHOWN] for found in self.found])
        rows = Image.fromarray(grid(some, min(SEEDS_SHOWN, len(self.found[0].pixels))))
        save_picture(rows, out / "same_seeds.png")
        values = {**self.to_dict(), "plots": plots}
        write_text(out / "report.json", json.dumps(values, indent=1, sort_keys=True, default=str) + "\n")
        write_text(out / "report.md", self.markdown(values))
        return values

    def plot(self, out: Path) -> list[str]:
        """Writes one Pareto plot for NFE and one for each batch size; returns their file names, none without
        matplotlib."""
        costs = {"pareto_nfe.png": ("backbone evaluations an image", [nfe_of(f)["mean"] for f in self.found])}
        for i, lap in enumerate(self.found[0].speed):
            seconds = [f.speed[i]["seconds"] / f.speed[i]["images"] for f in self.found]
            costs[f"pareto_batch_{lap['batch']}.png"] = (f"seconds an image, batch {lap['batch']}", seconds)
        written = []
        for name, (label, values) in costs.items():
            scores = [f.scores[self.headline] for f in self.found]
            points = [
                Point(f.cell.row, f.cell.at, x, s.value, s.se or 0.0)
                for f, x, s in zip(self.found, values, scores, strict=True)
            ]
            if pareto(points, out / name, (label, self.headline), self.target.marks, self.title):
                written.append(name)
        return written

    def markdown(self, values: Mapping[str, Any]) -> str:
        """`report.md` of what `to_dict` and `plot` gave."""
        batches = [lap["batch"] for lap in self.found[0].speed]
        names = list(self.found[0].scores)
        heads = ["", *names, f"{self.headline} less baseline", "p (Holm)", "same images", "NFE an image"]
        heads += [f"s an image, batch {b}" for b in batches]
        lines = [f"# {self.title}", ""]
        warnings = _once(values["cells"])
        lines += [f"> **Warning:** {text}" for text in warnings] + [""] * bool(warnings)
        lines += ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        for found, cell, c in zip(self.found, values["cells"], self.compared(), strict=True):
            row = [found.cell.name, *(plus_minus(found.scores[n]) for n in names)]
            row += ["", ""] if c is None else [_signed(c), f"{cell['less_baseline']['p_holm']:.2g}"]
            row += [f"{cell['same_images_as_baseline']:.1%}", f"{cell['nfe_per_image']['mean']:.1f}"]
            row += [_seconds(lap, base) for lap, base in zip(found.speed, self.found[0].speed, strict=True)]
            lines.append("| " + " | ".join(row) + " |")
        lines += ["", *(f"{name}: {self.headline} {number(v)}." for name, v in self.target.marks.items())]
        floor = self.found[0].scores[self.headline].floor
        lines += [f"Noise floor of a perfect model at this N: {number(floor)}."] * (floor is not None)
        lines += ["", _reading(self.found[0].cell.name, self.target.plan.n)]
        for name in (*values["plots"], "same_seeds.png"):
            lines += ["", f"![{name.removesuffix('.png')}]({name})"]
        lines += ["", "Rows of `same_seeds.png`, from above: " + "; ".join(f.cell.name for f in self.found) + "."]
        lines += ["", "All pictures: " + ", ".join(f"[{f.cell.name}](grid_{f.cell.slug}.png)" for f in self.found)]
        p = self.target.protocol
        lines += ["", f"Protocol `{p.id}` (`{p.hash}`): `{p.canonical}`", "", _facts("Env", self.env)]
        if self.command:
            lines += ["", "Reproduce:", "", "```", self.command, "```"]
        return "\n".join(lines) + "\n"


def nfe_of(found: Found) -> dict[str, float]:
    """Mean, median and most evaluations until an image of the plan was complete."""
    counts = found.nfe.tolist()
    return {"mean": statistics.fmean(counts), "median": float(statistics.median(counts)), "most": float(max(counts))}


def _once(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the warnings of all cells, each once with the cells that it is about; those that differ in their numbers
    alone are one."""
    found: dict[str, list[tuple[str, str]]] = {}
    for cell in cells:
        for text in cell["warnings"]:
            found.setdefault(re.sub(r"\d[\d.e+-]*", "#", text), []).append((cell["name"], text))
    lines = []
    for named in found.values():
        where = "all cells" if len(named) == len(cells) > 1 else ", ".join(name for name, _ in named)
        first = "" if len({text for _, text in named}) == 1 else f" (the numbers are of {named[0][0]})"
        lines.append(f"{where}: {named[0][1]}{first}")
    return lines


def _signed(c: Comparison) -> str:
    return f"{c.difference:+.2g} ± {c.se:.1g}"


def _seconds(lap: Mapping[str, Any], base: Mapping[str, Any]) -> str:
    mine, first = (x["seconds"] / x["images"] for x in (lap, base))
    return f"{mine:.4g}" if lap is base else f"{mine:.4g} ({first / mine:.2f} x)"


def _reading(baseline: str, n: int) -> str:
    return (
        f"± is one standard error. All cells draw the same {n} labels and seeds; *less {baseline}* is paired, so its "
        "error is smaller than that of two separate numbers, and its p is adjusted for the number of cells. A "
        "lossless sampler has the baseline's law, so its difference is noise. *Same images* are equal byte by byte. "
        "Seconds are medians of whole decodes without the tokenizer; in plots the grey line joins the Pareto front, "
        "dotted lines what the text above names."
    )


def _facts(name: str, values: Mapping[str, Any]) -> str:
    return f"{name}: " + ", ".join(f"{k} {v}" for k, v in values.items())
