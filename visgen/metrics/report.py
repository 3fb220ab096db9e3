"""`report.json` and `report.md`: every number with its protocol, its error and the command that reproduces it.

The files are the product; W&B mirrors them (`Report.flat`). Numbers of different protocols never share a table.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from visgen.config import UserError
from visgen.files import read_json, write_text
from visgen.metrics.frechet import Comparison, compare
from visgen.metrics.protocol import EvalProtocol, Score, finite, require_same

SCHEMA = 1


@dataclass
class Report:
    """One evaluation: its protocol, scores and circumstances.

    Attributes:
        model: ckpt, sha256, step, ema, params, tokenizer_sha, ..
        sampling: cfg, temperature, top_k, top_p, steps, sampler, precision, seed, plan (`SamplePlan.hash`), ..
        checks: `ImageAudit.checks()`.
        speed: `Stopwatch.to_dict()`.
        remarks: Markdown blocks under the table of `report.md`: verdicts, further tables, pictures.
    """

    protocol: EvalProtocol
    scores: dict[str, Score]
    model: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    checks: dict[str, Any] = field(default_factory=dict)
    speed: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    command: str = ""
    env: dict[str, Any] = field(default_factory=lambda: environment())
    duration_s: float = 0.0
    created_utc: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema_version": SCHEMA,
            "status": "ok",
            "created_utc": self.created_utc,
            "duration_s": self.duration_s,
            "command": self.command,
            "protocol": self.protocol.to_dict(),
            "model": finite(self.model),
            "sampling": finite(self.sampling),
            "metrics": {name: score.to_dict() for name, score in self.scores.items()},
            "checks": finite(self.checks),
            "speed": finite(self.speed),
            "env": finite(self.env),
            "warnings": [*self.warnings, *diagnose(self.scores, self.checks)],
            "remarks": self.remarks,
        }

    def write(self, folder: str | Path) -> Path:
        """Writes `report.json` and `report.md` into `folder`; returns the folder.

        Raises:
            UserError: the extractor has random weights, or the folder cannot be written.
        """
        if "!random" in self.protocol.extractor:
            raise UserError(
                f"extractor {self.protocol.extractor} has random weights, its numbers mean nothing: not reported;"
                f" pass the weight file"
            )
        folder = Path(folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"report: cannot write to {folder} ({error.strerror}); choose another --out") from error
        text = json.dumps(self.to_dict(), sort_keys=True, indent=2, allow_nan=False, default=str)
        write_text(folder / "report.json", text + "\n")
        write_text(folder / "report.md", self.markdown())
        return folder

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """Reads a `report.json` (or the folder that holds it). Its hash must be that of its protocol fields."""
        path = Path(path)
        path = path / "report.json" if path.is_dir() else path
        if not path.is_file():
            raise UserError(f"report {path} does not exist; pass a report.json or its folder")
        data = read_json(path, "measure again")
        protocol = EvalProtocol.from_dict(data["protocol"])
        if protocol.hash != data["protocol"]["hash"]:
            raise UserError(f"report {path}: its protocol was edited (hash {protocol.hash}); measure again")
        scores = {name: Score.from_dict(values) for name, values in data["metrics"].items()}
        same = ("model", "sampling", "checks", "speed", "command", "env", "duration_s", "created_utc")
        found = diagnose(scores, data["checks"])  # made anew on writing
        warnings = [text for text in data["warnings"] if text not in found]
        remarks = data.get("remarks", [])  # absent in earlier files
        return cls(protocol, scores, warnings=warnings, remarks=remarks, **{key: data[key] for key in same})

    def markdown(self) -> str:
        """The report for people: warnings, headline table, protocol, what it is comparable with, command."""
        data = self.to_dict()
        title = self.model.get("ckpt") or self.protocol.id
        lines = [f"# {title}", ""]
        lines += [f"> **Warning:** {text}" for text in data["warnings"]] + [""] * bool(data["warnings"])
        lines += ["| metric | value | bias-corrected | floor | N |", "|---|---|---|---|---|"]
        for name, score in self.scores.items():
            cells = [plus_minus(score), number(score.bias_corrected), number(score.floor), score.n or ""]
            lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
        for text in self.remarks:
            lines += ["", text]
        lines += ["", f"Protocol `{self.protocol.id}` (`{self.protocol.hash}`): `{self.protocol.canonical}`"]
        lines += ["", f"Comparable only with numbers of protocol `{self.protocol.hash}`; +- is one standard error."]
        for block in ("sampling", "checks", "speed", "env"):
            if data[block]:
                lines += ["", f"{block.capitalize()}: " + ", ".join(f"{k} {v}" for k, v in data[block].items())]
        if self.command:
            lines += ["", "Reproduce:", "", "```", self.command, "```"]
        return "\n".join(lines) + "\n"

    def flat(self) -> dict[str, float]:
        """`eval/<protocol id>/<metric>` (and `.._se`, `.._bias_corrected`) -> value, for W&B."""
        out = {}
        for name, score in self.scores.items():
            key = f"eval/{self.protocol.id}/{name}"
            parts = {key: score.value, f"{key}_se": score.se, f"{key}_bias_corrected": score.bias_corrected}
            out.update({k: v for k, v in parts.items() if v is not None})
        return out


def table(reports: Mapping[str, Report], metrics: Sequence[str]) -> str:
    """A Markdown table, one row per report.

    Raises:
        UserError: protocols differ, or a report lacks a metric.
    """
    require_same({name: report.protocol for name, report in reports.items()})
    lines = ["| | " + " | ".join(metrics) + " |", "|---" * (len(metrics) + 1) + "|"]
    for name, report in reports.items():
        missing = [m for m in metrics if m not in report.scores]
        if missing:
            raise UserError(f"report '{name}' has no '{missing[0]}'; it has {', '.join(report.scores)}")
        lines.append(f"| {name} | " + " | ".join(plus_minus(report.scores[m]) for m in metrics) + " |")
    hashes = {report.protocol.hash for report in reports.values()}
    return "\n".join([*lines, "", f"Protocol `{', '.join(hashes)}`; +- is one standard error."]) + "\n"


def paired(a: Report, b: Report, metric: str) -> Comparison:
    """Paired comparison of one metric of two reports.

    Raises:
        UserError: protocols or sample plans differ, or the metric holds no groups.
    """
    require_same({"a": a.protocol, "b": b.protocol})
    plans = [report.sampling.get("plan") for report in (a, b)]
    if None in plans or plans[0] != plans[1]:
        raise UserError(f"a paired comparison needs one sample plan, got {plans[0]} and {plans[1]}; sample both anew")
    return compare(a.scores[metric], b.scores[metric])


def diagnose(scores: Mapping[str, Score], checks: Mapping[str, Any]) -> list[str]:
    """What usually lies behind a strange number, in words."""
    found = []
    for name, score in scores.items():
        terms = score.terms
        if terms.get("mean", 0.0) > 0.3 * abs(score.value) and score.floor and score.value > 3 * score.floor:
            share = terms["mean"] / score.value
            found.append(f"{name}: {share:.0%} of it is the mean term: a colour or denormalisation error?")
        if terms.get("single", 0.0) > 1.5 * score.value and terms.get("chunks", 1) > 1:
            found.append(f"{name}: {terms['single']:.3g} over all images at once: are they sorted by class?")
        if terms.get("rank_ok") == 0:
            found.append(f"{name}: fewer images than feature dimensions, the covariance is singular")
        if score.floor and score.se and score.value <= score.floor + 2 * score.se:
            found.append(f"{name}: within 2 SE of the noise floor, indistinguishable from the reference at this N")
        if not math.isfinite(score.value):
            found.append(f"{name}: is {score.value}")
    if checks.get("clipped_fraction", 0) > 0.01:
        found.append(f"{checks['clipped_fraction']:.1%} of the values were outside [-1, 1]: a missing clamp?")
    if checks.get("unique_images", 0) < checks.get("images", 0):
        twins = checks["images"] - checks["unique_images"]
        found.append(f"{twins} of {checks['images']} images are exact duplicates: the same seed twice?")
    return found


def environment() -> dict[str, Any]:
    """Code and machine: git_sha (`unknown` outside a checkout), dirty, torch, cuda, gpu, python, platform, cpus."""
    root = Path(__file__).resolve().parents[2]
    sha, status = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain")
    return {
        "git_sha": sha or "unknown",
        "dirty": bool(status) if sha else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
    }


def _git(root: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def plus_minus(score: Score) -> str:
    """Value ± standard error."""
    return number(score.value) + (f" ± {score.se:.2g}" if score.se is not None else "")


def number(value: float | None) -> str:
    """Four digits, for tables; nothing for None."""
    return "" if value is None else f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
