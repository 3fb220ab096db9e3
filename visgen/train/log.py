"""What a run tells: a report at the start, a progress bar, `metrics.jsonl`, preview grids, Weights & Biases.

Scalars stay on the device until they are logged; then one gather over the processes and one read serve them all.
Only the main process writes.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import Accelerator
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from torch import Tensor

from visgen import files
from visgen.checks import printable
from visgen.launch import console
from visgen.metrics.images import to_uint8
from visgen.pictures import grid
from visgen.train.lines import Lines
from visgen.train.remote import LogConfig, Remote

BAR = 10 + 1 + 7 + 4  # characters of the bar: itself, "/" of the steps, time left, gaps
ALWAYS = ("/loss", "/grad_norm")  # have a place in the log also where no value was finite


class Meter:
    """Means of finite device scalars since the last read, and the first step at which one was not finite.

    A scalar without any finite value, such as the usage of a codebook that is bypassed, is left out.
    """

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
        means = {n: v for n, v in means.items() if not math.isnan(v) or n.endswith(ALWAYS)}
        means |= {n: max(c) for n, c in zip(more, most, strict=True)}
        steps = {n: min(c) for n, c in zip(bad, first, strict=True)}
        self.sums, self.counts, self.bad = {}, {}, {}
        return means, {n: int(step) for n, step in steps.items() if math.isfinite(step)}


class Log:
    """The outputs of one run. On other processes than the main one every method does nothing.

    `metrics` writes the file at once; `tell` shows on the terminal and in W&B what came since the last time. So the
    loop can save a step before it talks about it. Neither raises whatever happens to disk, terminal or network.

    Args:
        values: the resolved config as plain values, for W&B.
        start: steps already done; later lines of `metrics.jsonl` are dropped, they will be written again.

    Raises:
        UserError: `metrics.jsonl` cannot be written at the start.
    """

    def __init__(
        self, config: LogConfig, run: Path, values: Mapping[str, Any], main: bool, start: int, steps: int
    ) -> None:
        self.main, self.run, self.start, self.steps = main, run, start, steps
        self.console = console()
        self.failed: set[str] = set()  # what has failed and was said
        self.untold: list[tuple[int, Mapping[str, float], str | None]] = []
        if not main:
            return
        self.lines = Lines(run / "metrics.jsonl")
        self.lines.open(start)
        self.remote = Remote(config, run, values)
        if self.remote.line:
            self.say(self.remote.line)
        columns = (
            BarColumn(bar_width=10),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True)),
        )
        self.bar = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.bar.add_task("", total=steps, completed=start, text="")
        self.bar.start()
        self.time = time.monotonic()

    def advance(self) -> None:
        if self.main:
            self.bar.advance(self.task)

    def metrics(self, step: int, values: Mapping[str, float], loss: str | None = None) -> None:
        """Write one line of `metrics.jsonl`; the bar (a plain line without a terminal) will show speed and
        `values[loss]`, or all values where `loss` is not named."""
        if not self.main or not values:
            return
        clean = {k: v if math.isfinite(v) else None for k, v in values.items()}
        why = self.lines.add({"step": step, **clean})
        if why:
            self.warn("metrics", f"{self.lines.path} cannot be written ({why}); its lines are kept and tried again")
        self.untold.append((step, values, loss))

    def tell(self, warning: str = "") -> None:
        """Show a `warning`, and what `metrics` has been given since the last time."""
        if not self.main:
            return
        self._warn_of(warning)
        for step, values, loss in self.untold:
            self._warn_of(self.remote.log(values, step))
            width = self.console.width - len(f"{self.steps}") * 2 - BAR
            if self.console.is_terminal:
                self.bar.update(self.task, text=fitting(parts_of(values, loss), width))
            else:
                left = "" if loss is None or step == self.steps else f"  {self._left(step)} left"
                self.say(f"step {step}/{self.steps}  {'  '.join(parts_of(values, loss))}{left}")
        self.untold = []

    def _left(self, step: int) -> timedelta:
        """Return the time to the last step at the speed since the start."""
        passed = time.monotonic() - self.time
        return timedelta(seconds=round(passed / (step - self.start) * (self.steps - step)))

    def passed(self) -> timedelta:
        """Return the time since the start."""
        return timedelta(seconds=round(time.monotonic() - self.time))

    def images(self, step: int, images: Tensor) -> None:
        """Write images [B, 3, H, W] in [-1, 1] as one grid `previews/step_*.png`, small ones enlarged."""
        if not self.main:
            return
        path = self.run / "previews" / f"step_{step:07d}.png"
        path.parent.mkdir(exist_ok=True)
        columns = math.ceil(math.sqrt(len(images)))
        with files.publishing(path) as unfinished:
            Image.fromarray(grid(to_uint8(images).cpu(), columns)).save(unfinished, format="PNG")
        self._warn_of(self.remote.image("preview", path, step))

    @contextlib.contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Turn a failure of the block, which only shows something, into one warning."""
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            self.warn(what, f"{what} failed ({reason}); the training goes on without")

    def say(self, line: str) -> None:
        if self.main:
            self.console.print(printable(line), soft_wrap=True)

    def warn(self, what: str, line: str) -> None:
        """Say a warning about `what` once."""
        if what not in self.failed:
            self.failed.add(what)
            self.say(f"warning: {line}")

    def _warn_of(self, line: str) -> None:
        if line:
            self.say(line)

    def close(self) -> None:
        if not self.main:
            return
        self.tell()
        self.bar.stop()
        if why := self.lines.flush():
            self.say(f"warning: {self.lines.path} lacks {len(self.lines.waiting)} lines ({why})")
        self._warn_of(self.remote.finish())


def parts_of(values: Mapping[str, float], loss: str | None) -> list[str]:
    """Return the parts of a line about `values`, the most important first: the loss and the speed, or all values where
    `loss` is not named."""
    if loss is None:
        return [f"{name} {value:.4f}" for name, value in values.items()]
    parts = [f"{loss.rpartition('/')[2]} {values.get(loss, math.nan):.4f}", f"{values['images_per_s']:.1f} images/s"]
    parts.append(f"data {values['data_wait']:.1%}")
    parts += [f"MFU {values['mfu']:.1%}"] if "mfu" in values else []
    return parts + ([f"{values['tokens_per_s']:,.0f} tokens/s"] if "tokens_per_s" in values else [])


def fitting(parts: Sequence[str], width: int) -> str:
    """Return the first of the `parts`, as many as fit into `width` characters, but one at least."""
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 2 + len(part) > width:
            break
        text += f"  {part}"
    return text


def report(shown: Console, rows: Sequence[Sequence[str]], facts: Mapping[str, Any]) -> None:
    """What trains: one row per net (`net, parameters, trainable, optimiser`), then facts."""
    table = Table("net", "parameters", "trainable", "optimiser", title="what trains", title_justify="left")
    for row in rows:
        table.add_row(*row)
    shown.print(table)
    for name, value in facts.items():
        shown.print(printable(f"{name:>12}  {value}"), soft_wrap=True)
