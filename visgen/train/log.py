"""What a run tells: a report at the start, a progress bar, `metrics.jsonl`, preview grids, Weights & Biases.

Scalars stay on the device until they are logged; then one gather over the processes and one read serve them all.
Only the main process writes.
"""

from __future__ import annotations

import json
import math
import netrc
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import torch
from accelerate import Accelerator
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from visgen.config import UserError
from visgen.metrics.images import to_uint8
from visgen.pictures import grid


@dataclass(frozen=True)
class LogConfig:
    """Weights & Biases; the files in the run directory are always written.

    Attributes:
        wandb: log there too; without an API key it logs offline.
        project: its project.
        name: of the run there; empty: the name of the run directory.
    """

    wandb: bool = True
    project: str = "visgen"
    name: str = ""


class Meter:
    """Means of finite device scalars since the last read, and the first step at which one was not finite."""

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.bad: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        value = value.detach().double()
        fine = torch.isfinite(value)
        value, count = torch.where(fine, value, 0.0), fine.double()
        self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.counts[name] = self.counts[name] + count if name in self.counts else count

    def watch(self, name: str, value: Tensor, step: int) -> None:
        """Remembers, on the device, the first step at which `value` was infinite or NaN."""
        first = torch.where(torch.isfinite(value.detach()), math.inf, float(step)).double()
        self.bad[name] = torch.minimum(self.bad[name], first) if name in self.bad else first

    def read(
        self, accelerator: Accelerator, also: Mapping[str, Tensor | float] = MappingProxyType({})
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Means over steps and processes, and `{name: step}` of what was not finite; empties the meter.

        Args:
            also: further scalars, of which the largest over the processes is among the means.
        """
        sums, bad, more = sorted(self.sums), sorted(self.bad), sorted(also)
        given = [torch.as_tensor(also[n], dtype=torch.float64) for n in more]
        here = [t.to(accelerator.device, non_blocking=True) for t in given]
        flat = torch.stack(
            [self.sums[n] for n in sums] + [self.counts[n] for n in sums] + [self.bad[n] for n in bad] + here
        )
        rows = accelerator.gather(flat[None]).tolist()  # [world, K]; the one host read of a logging interval
        columns = list(zip(*rows, strict=True))
        cut = len(sums)
        totals, counts, first, most = (
            columns[:cut],
            columns[cut : 2 * cut],
            columns[2 * cut : 2 * cut + len(bad)],
            columns[2 * cut + len(bad) :],
        )
        means = {n: sum(t) / sum(c) if sum(c) else math.nan for n, t, c in zip(sums, totals, counts, strict=True)}
        means |= {n: max(c) for n, c in zip(more, most, strict=True)}
        steps = {n: min(c) for n, c in zip(bad, first, strict=True)}
        self.sums, self.counts, self.bad = {}, {}, {}
        return means, {n: int(step) for n, step in steps.items() if math.isfinite(step)}


class Log:
    """The outputs of one run. On other processes than the main one every method does nothing.

    Args:
        values: the resolved config as plain values, for W&B.
        start: steps already done; later lines of `metrics.jsonl` are dropped, they will be written again.
    """

    def __init__(
        self, config: LogConfig, run: Path, values: Mapping[str, Any], main: bool, start: int, steps: int
    ) -> None:
        self.main, self.run, self.wandb = main, run, None
        self.console = Console(stderr=True)
        if not main:
            return
        self.file = open(run / "metrics.jsonl", "a+", errors="replace")  # noqa: SIM115
        _drop_after(self.file, start)
        if config.wandb:
            self.wandb, line = start_wandb(config, run, values)
            self.console.print(line, highlight=False, soft_wrap=True)
        columns = (
            TextColumn("{task.percentage:3.0f}%"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=steps, completed=start, text="")
        self.bar.start()
        self.steps, self.time = steps, time.monotonic()

    def advance(self) -> None:
        if self.main:
            self.bar.advance(self.task)

    def metrics(self, step: int, values: Mapping[str, float], loss: str | None = None) -> None:
        """One line of `metrics.jsonl`; the bar (a plain line without a terminal) shows speed and `values[loss]`, or
        all values where `loss` is not named."""
        if not self.main:
            return
        clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
        self.file.write(json.dumps({"step": step, **clean}) + "\n")
        self.file.flush()
        if self.wandb is not None:
            self.wandb.log(dict(values), step=step)
        if loss is None:
            text = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        else:
            text = f"{loss} {values.get(loss, math.nan):.4f}  {values['images_per_s']:.1f} images/s"
            text += f"  {values['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in values else ""
            text += f"  MFU {values['mfu']:.1%}" if "mfu" in values else ""
            text += f"  data {values['data_wait']:.1%}"
        self.bar.update(self.task, text=text)
        if not self.console.is_terminal:
            self.console.print(f"step {step}/{self.steps}  {text}", highlight=False, soft_wrap=True)

    def images(self, step: int, images: Tensor) -> None:
        """Writes images [B, 3, H, W] in [-1, 1] as one grid `previews/step_*.png`, small ones enlarged."""
        if not self.main:
            return
        path = self.run / "previews" / f"step_{step:07d}.png"
        path.parent.mkdir(exist_ok=True)
        columns = math.ceil(math.sqrt(len(images)))
        Image.fromarray(grid(to_uint8(images).cpu(), columns)).save(path)
        if self.wandb is not None:
            import wandb

            self.wandb.log({"preview": wandb.Image(str(path))}, step=step)

    def say(self, line: str) -> None:
        if self.main:
            self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def close(self) -> None:
        if not self.main:
            return
        self.bar.stop()
        self.file.close()
        if self.wandb is not None:
            self.wandb.finish()


def report(console: Console, rows: Sequence[Sequence[str]], facts: Mapping[str, Any]) -> None:
    """What trains: one row per net (`net, parameters, trainable, optimiser`), then facts."""
    table = Table("net", "parameters", "trainable", "optimiser", title="what trains", title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for name, value in facts.items():
        console.print(f"{name:>12}  {value}", highlight=False, soft_wrap=True, markup=False)


def start_wandb(config: LogConfig, run: Path, values: Mapping[str, Any], job: str = "train") -> tuple[Any, str]:
    """A W&B run that keeps its files in the run directory and its id over resumes, and a line that says where it is."""
    try:
        import wandb
    except ImportError:
        raise UserError("log.wandb is on, but wandb is not installed: pip install wandb, or --log.no-wandb") from None
    for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        os.environ.setdefault(name, str(run.resolve()))
    mode = os.environ.get("WANDB_MODE") or ("online" if has_wandb_key() else "offline")
    identity = run / "wandb_id"
    if not identity.exists():
        identity.write_text(secrets.token_hex(4))
    started = wandb.init(
        project=config.project,
        name=config.name or run.resolve().name,
        id=identity.read_text(),
        resume=None if mode == "offline" else "allow",
        job_type=job,
        mode=mode,  # type: ignore[arg-type]
        config=dict(values),
        settings=wandb.Settings(silent=True, console="off"),
    )
    if mode == "offline":
        why = "WANDB_MODE" if os.environ.get("WANDB_MODE") else "no API key"
        where = run / "wandb"
        return started, f"W&B: offline ({why}), files in {where}; `wandb sync {where}/offline-run-*` uploads them"
    return started, f"W&B: {started.url or mode}"


def has_wandb_key() -> bool:
    """Whether WANDB_API_KEY or a netrc entry of the W&B server is there."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    names = [os.environ.get("NETRC"), "~/.netrc", "~/_netrc"]
    for path in (Path(n).expanduser() for n in names if n):
        try:
            if path.is_file() and netrc.netrc(path).authenticators(host):
                return True
        except (netrc.NetrcParseError, OSError):  # wandb itself reports a netrc that it cannot read
            continue
    return False


def _drop_after(file: Any, step: int) -> None:
    file.seek(0)
    kept = []
    for line in file:
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):  # the last line of a killed process, or damaged
            break
    file.seek(0)
    file.truncate()
    file.writelines(kept)
    file.flush()
