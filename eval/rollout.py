"""Clips longer than those of training: how they drift, and the memory that they take, with and without a window.

python eval/rollout.py --checkpoint runs/sprites_acdit --data.kind sprites --guidance.scale 1.5 --contexts 0 4 --n 2048
"""

from __future__ import annotations

import visgen  # noqa: F401 (before torch: sets how OpenMP's threads wait)

# isort: split
import json
import shlex
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from visgen import clip_score as cs
from visgen import config as configs
from visgen import evaluate as ev
from visgen import rollout as ro
from visgen.checks import Natural, Positive, Range, Seed
from visgen.config import UserError, plugin
from visgen.files import write_text
from visgen.generate import Generator
from visgen.launch import Progress, claim, writable
from visgen.loading import load
from visgen.metrics.clips import FrameDifferences
from visgen.metrics.features import build_extractor
from visgen.metrics.plots import save_panels
from visgen.metrics.protocol import SamplePlan, Score
from visgen.metrics.report import environment
from visgen.run_files import Step
from visgen.sample import describe
from visgen.sampling import SamplingConfig
from visgen.scored_data import build_pictures, check_checkpoint, fit_size
from visgen.train.main import data_of


@dataclass(frozen=True)
class RolloutConfig(SamplingConfig):
    """Draws clips of `longer` times the trained length and scores a window of that length at every place of it; writes
    OUT/rollout.{json,md,png}.

    Attributes:
        checkpoint: run directory or Hub id of a model of clips.
        step: which step of the run, or `best`; default the newest.
        data: the data set, default that of the run's config.yaml; clips of its held-out split are the reference.
        longer: how many times longer than in training.
        contexts: blocks that are looked back on, each a row; 0: all.
        n: clips of a row; they lie in memory.
        reference_n: clips of the reference; default the whole held-out split.
        real: also score real clips of the training split that are as long, whose distance does not grow.
        plan_seed: seed of the sample plan.
        clips: decoded at once where memory is measured.
        frames: frame extractor of `fd_clips`; weights: its file, where it needs one.
        groups: jackknife groups; 1 leaves the error out.
        allow_small: score although N does not exceed the feature width.
        out: directory of the report.
    """

    sampler: Any = plugin("visgen.samplers", "blockwise")
    checkpoint: str = ""
    step: Step = None
    data: Any = plugin("visgen.data", None)
    longer: Annotated[int, Range(2)] = 4
    contexts: Annotated[tuple[Natural, ...], Range(1)] = (0, 4)
    n: Annotated[int, Range(2)] = 2048
    reference_n: Annotated[int, Range(2)] | None = None
    real: bool = True
    plan_seed: Seed = 0
    clips: Positive = 4
    frames: str = "fd_efflite0"
    weights: Path | None = None
    groups: Positive = 16
    allow_small: bool = False
    out: Path = Path("out/eval/rollout")


def main() -> None:
    settings = configs.load(RolloutConfig, sys.argv[1:], prog="eval/rollout.py")
    if not settings.checkpoint:
        raise UserError("--checkpoint is needed: a run directory of a model of clips, such as runs/sprites_acdit")
    for name in ("frames", "context"):
        if getattr(settings.sampler, name, None) is not None:
            raise UserError(f"--sampler.{name} is set for each row here; use --longer and --contexts")
    device, _ = settings.engine.resolve()
    extractor = FrameDifferences(build_extractor(settings.frames, weights=settings.weights, device=device))
    generator = load(settings.checkpoint, settings.step, settings.engine)
    data = fit_size(settings.data or data_of(settings.checkpoint), generator.tokenizer, sys.argv[1:])
    held_out = build_pictures(data, "held_out")
    window, asked = (
        check(generator, held_out),
        check_checkpoint(held_out, generator, f"checkpoint {settings.checkpoint}"),
    )
    plan = SamplePlan(settings.n, len(held_out.classes), settings.plan_seed)
    ref_n = min(settings.reference_n or len(held_out), len(held_out))
    ev.check_size(plan, ref_n, extractor, settings.groups, settings.allow_small, "clips")
    out = writable(settings.out, "--out")
    claim(out)
    longest = settings.longer * window
    contexts = [context or None for context in settings.contexts]
    for context in contexts:
        generator.check_sampling(replace(settings, sampler=ro.sampler_of(settings, longest, context)))
    real = real_clips(settings, data, longest) if settings.real else None  # now: there may be none so long
    used = [
        ro.memory(generator, settings, times * window, context, settings.clips)
        for context in contexts
        for times in range(1, settings.longer + 1)
    ]
    with Progress("reference") as step:
        ref = cs.reference(held_out, extractor, ref_n, settings.plan_seed, settings.engine.batch, None, step)
    protocol = ev.protocol_of(extractor, ref, held_out, plan, settings.groups)  # type: ignore[arg-type]
    scored: dict[str, dict[int, dict[str, Score]]] = {}
    given = (window, range(0, longest, window), ref, extractor, protocol)
    bound = {} if real is None else {"real": ro.drift(real, *given, allow_small=settings.allow_small)}
    del real  # as large as the clips of a row
    for context in contexts:
        with Progress(ro.name_of(context)) as step:
            clips = ro.rolled(generator, plan, settings, longest, context, step, asked)
        scored[ro.name_of(context)] = ro.drift(clips, *given, allow_small=settings.allow_small)
    write(settings, generator, out, scored | bound, used, protocol.hash)


def check(generator: Generator, held_out: Any) -> int:
    """The frames of a clip in training, which are those of the window.

    Raises:
        UserError: a model of images, or of clips of another length than the data's.
    """
    frames = generator.frames()
    if frames == 1:
        raise UserError("the checkpoint draws single images, which have no length; give a model of clips")
    if held_out.frames != frames:
        raise UserError(
            f"the data have clips of {held_out.frames} frames, the model draws {frames}: --data.frames {frames}"
        )
    return frames


def real_clips(settings: RolloutConfig, config: Any, frames: int) -> Tensor:
    """uint8 [n, F, 3, H, W] of the training split, in the plan's number."""
    data = build_pictures(replace(config, frames=frames), "train")
    chosen = cs.stratified(ev.labels_of(data), settings.n, settings.plan_seed)
    return torch.cat([pixels for pixels, _ in cs.real(data, chosen, settings.engine.batch)])


def write(
    settings: RolloutConfig,
    generator: Generator,
    out: Path,
    scored: dict[str, dict[int, dict[str, Score]]],
    used: list[ro.Memory],
    protocol: str,
) -> None:
    command = shlex.join(["python", *sys.argv])
    found = {
        "command": command,
        "protocol": protocol,
        "drift": {n: {s: {k: v.to_dict() for k, v in x.items()} for s, x in row.items()} for n, row in scored.items()},
        "memory": [asdict(m) for m in used],
        "sampling": describe(settings, generator),
        **environment(),
    }
    text = f"{ro.drift_table(scored)}\n\n{ro.memory_table(used)}\n"
    write_text(out / "rollout.json", json.dumps(found, indent=1) + "\n")
    write_text(out / "rollout.md", f"```\n{command}\n```\n\n{text}\n![drift and memory](rollout.png)\n")
    save_panels([ro.drift_panel(scored), ro.memory_panel(used)], out / "rollout.png")
    print(text)


if __name__ == "__main__":
    configs.run_program(main)
