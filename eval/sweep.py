"""A setting of sampling against quality: a program of eval/ for every checkpoint and value, as a table and a plot.

python eval/sweep.py --checkpoints runs/fashion32_acdit_1 runs/fashion32_acdit runs/fashion32_acdit_16 \\
    --names "1 block" "4 blocks" "16 blocks" --flag sampler.steps --values 5 10 25 50 \\
    --given="--data.kind fashion_mnist --n 10000 --sampler.kind blockwise --guidance.scale 1.5" \\
    --out out/eval/blocks_fashion32
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from visgen import config as configs
from visgen.checks import Range
from visgen.config import UserError
from visgen.launch import writable
from visgen.metrics.plots import Panel, save_panels
from visgen.metrics.protocol import EvalProtocol, Score, require_same

HERE = Path(os.path.relpath(Path(__file__).parent))
Program = Literal["fid", "small", "fvd", "control"]


@dataclass(frozen=True)
class SweepConfig:
    """Runs eval/PROGRAM.py once for each checkpoint and value, and writes OUT/sweep.{json,md,png}. A run of the same
    command whose report is there already is not repeated.

    Attributes:
        program: fid, small, fvd or control.
        checkpoints: run directories, each a row of the table and a curve.
        names: of the rows, as many; default the directories' names.
        flag: what varies, such as sampler.steps or guidance.scale.
        values: of it.
        given: all other flags of the program, as one string: --given="--n 10000".
        metrics: names of scores to show; default fd and kid, as far as the reports have them.
        out: directory of the reports, OUT/NAME/FLAG_VALUE, and of the result.
    """

    program: Program = "fid"
    checkpoints: Annotated[tuple[str, ...], Range(1)] = ("assets/fashion32",)
    names: tuple[str, ...] = ()
    flag: str = "sampler.steps"
    values: Annotated[tuple[str, ...], Range(1)] = ("5", "10", "25", "50")
    given: str = ""
    metrics: tuple[str, ...] = ()
    out: Path = Path("out/eval/sweep")


def main() -> None:
    settings = configs.load(SweepConfig, sys.argv[1:], prog="eval/sweep.py")
    names = names_of(settings)
    out = writable(settings.out, "--out")
    cells: dict[str, dict[str, Any]] = {}
    for name, checkpoint in zip(names, settings.checkpoints, strict=True):
        for value in settings.values:
            folder = out / slug(name) / f"{settings.flag}_{value}"
            cells.setdefault(name, {})[value] = report_of(settings, checkpoint, value, folder)
    reports = {f"{name} {value}": report for name, row in cells.items() for value, report in row.items()}
    require_same({name: EvalProtocol.from_dict(report["protocol"]) for name, report in reports.items()})
    metrics = metrics_of(settings, list(reports.values()))
    text = "\n\n".join(table(settings, cells, metric) for metric in metrics)
    command = shlex.join(["python", *sys.argv])
    found = {
        "command": command,
        "flag": settings.flag,
        "scores": {n: {v: scores_of(r, metrics) for v, r in row.items()} for n, row in cells.items()},
        "img_per_s": {n: {v: r["speed"].get("img_per_s") for v, r in row.items()} for n, row in cells.items()},
        "commands": {name: report["command"] for name, report in reports.items()},
    }
    (out / "sweep.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "sweep.md").write_text(f"```\n{command}\n```\n\n{text}\n\n![{settings.flag}](sweep.png)\n")
    save_panels([panel(settings, cells, metric) for metric in metrics], out / "sweep.png")
    print(text)


def names_of(settings: SweepConfig) -> tuple[str, ...]:
    """The names of the rows.

    Raises:
        UserError: too few or the same ones, or values of which no curve can be drawn.
    """
    names = settings.names or tuple(Path(c).name for c in settings.checkpoints)
    if len(names) != len(settings.checkpoints) or len({slug(name) for name in names}) != len(names):
        raise UserError(
            f"{len(settings.checkpoints)} checkpoints are called {', '.join(names)}; give each a name of its own by "
            "--names"
        )
    for value in settings.values:
        try:
            float(value)
        except ValueError:
            raise UserError(f"--values {value} is no number, so there is no curve to draw over it") from None
    return names


def slug(name: str) -> str:
    """The name as that of a folder."""
    return "".join(c if c.isalnum() or c in "-_." else "_" for c in name)


def report_of(settings: SweepConfig, checkpoint: str, value: str, folder: Path) -> dict[str, Any]:
    """The report of one run, which is made unless it is there."""
    path = folder / ("report.json" if settings.program == "small" else "generated/report.json")
    given = ["--checkpoint", checkpoint, f"--{settings.flag}", value, *shlex.split(settings.given)]
    command = [str(HERE / f"{settings.program}.py"), *given, "--out", str(folder)]
    if not path.is_file() or json.loads(path.read_text())["command"] != shlex.join(["python", *command]):
        print(shlex.join(["python", *command]), file=sys.stderr)
        ended = subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL).returncode
        if ended or not path.is_file():
            raise UserError(
                f"eval/{settings.program}.py ended with {ended} for {checkpoint}, --{settings.flag} {value}; what it "
                "said stands above"
            )
    return json.loads(path.read_text())


def metrics_of(settings: SweepConfig, reports: list[dict[str, Any]]) -> list[str]:
    """Names of the scores that are shown, which all reports have."""
    known = [name for name in reports[0]["metrics"] if all(name in report["metrics"] for report in reports)]
    wanted = settings.metrics or [name for name in ("fd", "kid") if name in known]
    missing = [name for name in wanted if name not in known]
    if missing or not wanted:
        raise UserError(f"--metrics {' '.join(missing)}: the reports have {', '.join(known)}; name some of these")
    return list(wanted)


def scores_of(report: dict[str, Any], metrics: list[str]) -> dict[str, Any]:
    return {name: {k: report["metrics"][name].get(k) for k in ("value", "se")} for name in metrics}


def table(settings: SweepConfig, cells: dict[str, dict[str, Any]], metric: str) -> str:
    """Markdown: a row for each checkpoint, a column for each value."""
    lines = [
        f"| {metric}: {settings.flag} | {' | '.join(settings.values)} |",
        "|---" * (len(settings.values) + 1) + "|",
    ]
    for name, row in cells.items():
        scores = [Score.from_dict(row[value]["metrics"][metric]) for value in settings.values]
        shown = (f"{s.value:.5g}" + (f" ± {s.se:.2g}" if s.se is not None else "") for s in scores)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def panel(settings: SweepConfig, cells: dict[str, dict[str, Any]], metric: str) -> Panel:
    """The curves of a score."""
    curves = {}
    for name, row in cells.items():
        scores = {value: Score.from_dict(report["metrics"][metric]) for value, report in row.items()}
        curves[name] = [(float(value), score.value, score.se) for value, score in scores.items()]
    numbers = [float(value) for value in settings.values]
    wide = min(numbers) > 0 and max(numbers) >= 4 * min(numbers)
    return Panel(settings.flag, metric, curves, "x" if wide else "")


if __name__ == "__main__":
    configs.run_program(main)
