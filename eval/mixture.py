"""How fast the mixture of codes is summed, fused against in chunks, and what a training step of DD2 takes.

python eval/mixture.py
python eval/mixture.py --config configs/dd/fashion32_dd2.yaml --batch 256
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visgen import config as configs
from visgen.backbones.ar import Config as ARConfig
from visgen.checks import Positive
from visgen.config import UserError, build, plugin_config
from visgen.files import write_text
from visgen.launch import writable
from visgen.metrics.report import environment
from visgen.model import Model
from visgen.nn.mixture import denoise, posterior, scale_of
from visgen.objectives.dd2 import DD2
from visgen.objectives.dd2 import Config as DD2Config
from visgen.sampling import EngineConfig
from visgen.train.main import TrainConfig


@dataclass(frozen=True)
class MixtureConfig:
    """Times sums and a training step with random weights, and writes OUT/mixture.{json,md}.

    Attributes:
        config: the YAML of a training by objective dd2, whose sizes are taken.
        batch: images of a step, or of one of its micro-batches, as all are.
        repeats: laps after two that do not count; their median counts.
        step: also take training steps; --no-step leaves them out.
        engine: device and precision of the step's forwards (its kind and batch are not read).
        out: directory of the report.
    """

    config: Path = Path("configs/imagenet256/dd2_l.yaml")
    batch: Positive = 64
    repeats: Positive = 5
    step: bool = True
    engine: EngineConfig = field(default_factory=EngineConfig)
    out: Path = Path("out/eval/mixture")


def main() -> None:
    settings = configs.load(MixtureConfig, sys.argv[1:], prog="eval/mixture.py")
    out = writable(settings.out, "--out")
    device, dtype = settings.engine.resolve()
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(
            f"the fused sums are a Triton kernel, which needs a CUDA GPU, not {device}; TRITON_INTERPRET=1 runs it "
            "element by element, which shows errors but no speed"
        )
    objective = configs.load(TrainConfig, [str(settings.config)], prog="eval/mixture.py").objective
    if not isinstance(objective, DD2Config):
        raise UserError(f"--config {settings.config} trains {configs.kind_of(objective)}; give one of objective dd2")
    try:
        rows: dict[str, Any] = {"sums": sums(objective, settings, device)}
        if settings.step:
            rows["step"] = steps(objective, settings, device, dtype)
    except torch.OutOfMemoryError:
        raise UserError(f"a batch of {settings.batch} does not fit the memory of {device}; lower --batch") from None
    facts = {"command": shlex.join(["python", *sys.argv]), "batch": settings.batch, **environment(), **rows}
    write_text(out / "mixture.json", json.dumps(facts, indent=1) + "\n")
    text = f"```\n{facts['command']}\n```\n\n{facts['gpu'] or 'CPU'}, torch {facts['torch']}\n\n{table(rows)}\n"
    write_text(out / "mixture.md", text)
    print(text)


def sums(objective: DD2Config, settings: MixtureConfig, device: torch.device) -> dict[str, Any]:
    """Seconds and extra bytes of one noise for every token, fused and in chunks, and how far each lies from float64."""
    model = objective.model
    count, vocab, channels = settings.batch * _tokens(model.grid), model.vocab, model.backbone.channels
    rng = torch.Generator(device).manual_seed(0)
    codes = torch.nn.functional.normalize(torch.randn(vocab, channels, generator=rng, device=device), dim=1)
    codes = codes * scale_of(codes)
    logp = 2 * torch.randn(count, vocab, generator=rng, device=device)
    t = 0.04 + 0.94 * torch.rand(count, 1, generator=rng, device=device)
    ids = torch.randint(vocab, (count,), generator=rng, device=device)
    x = (1 - t) * codes[ids] + t * torch.randn(count, channels, generator=rng, device=device)
    few = slice(0, 64)
    exact = posterior(x[few].double(), t[few].double(), logp[few].double(), codes.double(), fused=False)
    found: dict[str, Any] = {"tokens": count, "vocab": vocab, "channels": channels, "log_p_bytes": logp.nbytes}
    for name, fused in (("fused", True), ("chunks", False)):

        def gradient(fused: bool = fused) -> Tensor:
            own = x.detach().requires_grad_()
            return torch.autograd.grad(denoise(own, t, logp, codes, fused=fused).sum(), own)[0]

        def mean(fused: bool = fused) -> Tensor:
            with torch.no_grad():
                return posterior(x, t, logp, codes, False, fused=fused).mean

        error = (posterior(x[few], t[few], logp[few], codes, fused=fused).mean.double() - exact.mean).abs().max()
        found[name] = {
            "mean_s": _seconds(mean, settings.repeats, device)[0],
            **dict(zip(("gradient_s", "extra_bytes"), _seconds(gradient, settings.repeats, device), strict=True)),
            "largest_error": float(error),
        }
    return found


def steps(
    objective: DD2Config, settings: MixtureConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """Seconds and peak bytes of the critic's and the generator's turn: forward, backward, Adam. All nets, both
    optimisers and the average are held, as in training."""
    with torch.device(device):
        made: DD2 = build(objective)
        teacher = Model(_teacher(objective)).to(dtype).eval().requires_grad_(False)
        average = Model(objective.model)
    for net in (*made.nets.values(), teacher, average):
        for parameter in net.parameters():
            torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.02)
    made.frozen["teacher"] = teacher
    optimisers = {name: torch.optim.AdamW(net.parameters(), 1e-6) for name, net in made.nets.items()}
    classes = getattr(objective.model.condition, "classes", 1)
    batch: Any = {"label": torch.arange(settings.batch, device=device) % classes}
    rng = torch.Generator(device).manual_seed(0)

    def turn(name: str) -> None:
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss, _ = made.loss(name, made.nets, batch, 0, rng)
        loss.backward()
        optimisers[name].step()
        optimisers[name].zero_grad()

    found = {}
    for name in ("critic", "student", "critic", "student"):  # the first ones make the optimisers' moments
        for other, net in made.nets.items():
            net.requires_grad_(other == name)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds, _ = _seconds(lambda name=name: turn(name), settings.repeats, device)  # type: ignore[misc]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        found[name] = {"seconds": seconds, "peak_bytes": peak}
    return found


def table(rows: dict[str, Any]) -> str:
    """Markdown."""
    sums, lines = rows["sums"], []
    lines += [
        f"{sums['tokens']:,} tokens, {sums['vocab']:,} codes of {sums['channels']} channels; log p is "
        f"{sums['log_p_bytes'] / 2**30:.2f} GiB\n",
        "| sums | mean ms | mean and gradient ms | extra MiB | largest error |",
        "|---|---|---|---|---|",
    ]
    for name in ("fused", "chunks"):
        row = sums[name]
        extra = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 2**20:.0f}"
        lines.append(
            f"| {name} | {1e3 * row['mean_s']:.2f} | {1e3 * row['gradient_s']:.2f} | {extra} | "
            f"{row['largest_error']:.1e} |"
        )
    ratio = [sums["chunks"][key] / sums["fused"][key] for key in ("mean_s", "gradient_s")]
    lines.append(f"| ratio | {ratio[0]:.1f} | {ratio[1]:.1f} | | |")
    if "step" in rows:
        lines += ["", "| turn | s | peak GiB |", "|---|---|---|"]
        for name, row in rows["step"].items():
            peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
            lines.append(f"| {name} | {row['seconds']:.3f} | {peak} |")
    return "\n".join(lines)


def _teacher(objective: DD2Config) -> Any:
    """A teacher in the shape of the student."""
    own = objective.model.backbone
    same = {name: getattr(own, name) for name in ("layers", "heads", "width", "kv_heads", "mlp_multiple_of")}
    backbone = plugin_config("visgen.backbones", "ar", code_channels=own.channels, **same)
    assert isinstance(backbone, ARConfig)
    condition = replace(objective.model.condition, dropout=0.1)
    head = plugin_config("visgen.heads", "categorical")
    return replace(objective.model, backbone=backbone, condition=condition, head=head)


def _tokens(grid: tuple[int, ...]) -> int:
    return grid[0] * grid[1] * grid[2]


def _seconds(work: Callable[[], Any], repeats: int, device: torch.device) -> tuple[float, int | None]:
    """Median seconds, and the most bytes that one run needs beyond what is held before."""
    laps, cuda = [], device.type == "cuda"
    before = torch.cuda.memory_allocated(device) if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2 + repeats):
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize(device)
        laps.append(time.perf_counter() - start)
    extra = torch.cuda.max_memory_allocated(device) - before if cuda else None
    return statistics.median(laps[2:]), extra


if __name__ == "__main__":
    configs.run_program(main)
