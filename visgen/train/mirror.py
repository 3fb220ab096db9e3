"""Reports in Weights & Biases: a mirror of files that are complete without it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from visgen.metrics.report import Report
from visgen.train.remote import LogConfig, Remote


def mirror_reports(reports: Mapping[str, Report], out: Path) -> None:
    """Mirrors evaluation reports, one per row of a table, into one W&B run: `eval/<protocol>/<metric>/<row>`."""
    values = {row: report.to_dict() for row, report in reports.items()}
    remote = Remote(LogConfig(wandb=True), out, values, job="eval")
    flat = {f"{key}/{row}": value for row, report in reports.items() for key, value in report.flat().items()}
    for line in filter(None, (remote.line, remote.log(flat), remote.finish())):
        print(line, file=sys.stderr)


def mirror_sweep(values: Mapping[str, Any], out: Path) -> str:
    """Mirrors a sweep's `report.json` into one W&B run and returns a line about it.

    The run has the settings, protocol and git revision as its config, a table with a line for each cell, the scores as
    `eval/<protocol>/<metric>/<cell>`, all pictures, and the report as an artifact. Without a key it is offline, in
    OUT/wandb, artifact included; without wandb nothing is mirrored, and the line says so.
    """
    config = {**values["settings"], "protocol": values["protocol"], "git_revision": values["env"]["git_sha"]}
    remote = Remote(LogConfig(wandb=True), out, config, job="eval")
    if remote.run is None:
        return f"{remote.line}; the report is complete without it"
    lines = (remote.line, remote.attempt(lambda run: _mirror(run, values, out)), remote.finish())
    return "\n".join(filter(None, lines))


def _mirror(run: Any, values: Mapping[str, Any], out: Path) -> None:
    import wandb

    table = table_of(values)
    flat = {}
    for cell in values["cells"]:
        for name, score in cell["metrics"].items():
            flat[f"eval/{values['protocol']['id']}/{name}/{cell['name']}"] = score["value"]
    pictures = [*values["plots"], "same_seeds.png", *(cell["pictures"] for cell in values["cells"])]
    images = {f"pictures/{name.removesuffix('.png')}": wandb.Image(str(out / name)) for name in pictures}
    run.log({"cells": wandb.Table(columns=table[0], data=table[1:]), **flat, **images})
    artifact = wandb.Artifact(f"report-{_word(values['title'])}", type="report", metadata=dict(values["protocol"]))
    for name in ("report.json", "report.md", *pictures):
        artifact.add_file(str(out / name), name=name)
    run.log_artifact(artifact)


def table_of(values: Mapping[str, Any]) -> list[list[Any]]:
    """Columns, and one row for each cell."""
    names = list(values["cells"][0]["metrics"])
    batches = [lap["batch"] for lap in values["cells"][0]["speed"]]
    head = ["cell", "row", "at", "protocol", "n"]
    head += [f"{name}{part}" for name in names for part in ("", "_se", "_bias_corrected")]
    head += ["nfe_per_image", "same_images_as_baseline", *(f"s_per_image_batch_{b}" for b in batches)]
    out: list[list[Any]] = [head]
    for cell in values["cells"]:
        row = [cell["name"], cell["row"], cell["at"], values["protocol"]["hash"], values["plan"]["n"]]
        for name in names:
            score = cell["metrics"][name]
            row += [score["value"], score["se"], score["bias_corrected"]]
        row += [cell["nfe_per_image"]["mean"], cell["same_images_as_baseline"]]
        row += [lap["seconds"] / lap["images"] for lap in cell["speed"]]
        out.append(row)
    return out


def _word(title: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", title).strip("-") or "report"
