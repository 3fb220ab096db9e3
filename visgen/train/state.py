"""What a run is made of between two steps: its settings, its state, and how that is saved and restored."""

from __future__ import annotations

import contextlib
import datetime
import json
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import accelerate
import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import nn

from visgen import checkpoint
from visgen.checks import Natural, Positive, Seed, Weight
from visgen.config import UserError
from visgen.data import Data
from visgen.objectives import Objective
from visgen.tokenizers import Tokenizer
from visgen.train.ema import Ema, EmaConfig
from visgen.train.held_out import Best
from visgen.train.log import Meter
from visgen.train.optim import OptimConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LoopConfig:
    """The loop.

    Attributes:
        steps: optimisation steps in all.
        batch: samples of one step, over all processes and micro-batches together.
        accumulation: micro-batches of one step, on each process.
        precision: bf16 is autocast around each net's forward; tf32 lets fp32 matrix products and convolutions run in
            TF32 (small nets run faster so, since nothing is cast); weights and optimiser stay fp32.
        clip: largest gradient norm of a net, 0 for none.
        compile: torch.compile each net's forward.
        workers: data-reading processes of each process, at most one a CPU.
        save_every, preview_every, log_every: in steps; the last step saves and previews too; 0 previews never.
        eval_every: held-out losses of the weight average, in steps; 0 never.
        eval_samples: held-out samples they are taken over.
        keep_last: newest checkpoints that stay, 0 for all.
        keep_best: a held-out value, such as nats_per_token; an evaluation that finds it best so far writes a checkpoint
            (`--step best`), which stays until there is a better one; empty: none.
        patience: evaluations in a row without a better `keep_best` that end the run, 0 for none.
        preview_images: samples of the preview batch, from the held-out split where the data have one.
        seed: of weights, data order, augmentation and every training noise.
        out: run directory; empty: runs/<name of the YAML>.
        resume: auto (the newest checkpoint in `out`), never, or the run or step directory to start from.
    """

    steps: Positive = 10_000
    batch: Positive = 64
    accumulation: Positive = 1
    precision: Literal["bf16", "tf32", "fp32"] = "bf16"
    clip: Weight = 1.0
    compile: bool = False
    workers: Natural = 4
    save_every: Positive = 1000
    keep_last: Natural = 2
    keep_best: str = ""
    patience: Natural = 0
    preview_every: Natural = 1000
    eval_every: Natural = 0
    eval_samples: Positive = 2000
    preview_images: Positive = 16
    log_every: Positive = 50
    seed: Seed = 0
    out: str = ""
    resume: str = "auto"

    def check(self, objective: Objective) -> None:
        """Raises `UserError` for settings that need each other, or what `objective` does not have."""
        if self.keep_best and not self.eval_every:
            raise UserError(f"loop.keep_best '{self.keep_best}' is a held-out value: set loop.eval_every")
        if self.keep_best and self.keep_best not in objective.held_out_values:
            allowed = ", ".join(objective.held_out_values) or "none, this objective has no held-out values"
            raise UserError(f"loop.keep_best '{self.keep_best}' is no held-out value; allowed: {allowed}")
        if self.patience and not self.keep_best:
            raise UserError(f"loop.patience {self.patience} waits for a held-out value: set loop.keep_best")


@dataclass
class State:
    """What a step needs or changes."""

    accelerator: Accelerator
    objective: Objective
    run: Path
    classes: list[str]
    loop: LoopConfig
    ema_config: EmaConfig
    nets: dict[str, nn.Module]  # prepared
    optimizers: dict[str, Any]
    settings: dict[str, OptimConfig]
    ema: Ema
    rng: torch.Generator  # given to the objective; on the device
    tokenizer: str = ""  # hash of the frozen tokenizer whose tokens are learned; kept by the main process
    meter: Meter = field(default_factory=Meter)
    best: Best = field(default_factory=Best)

    def __post_init__(self) -> None:
        self.trainable = {n: [p for p in net.parameters() if p.requires_grad] for n, net in self.nets.items()}


# -------------------------------------------------------------------------------------------------- checkpoints


def save(state: State, step: int) -> None:
    """Writes `step_*/` under a temporary name, then renames it; removes the oldest beyond `keep_last`, but the best."""
    accelerator, final = state.accelerator, state.run / checkpoint.step_name(step)
    temporary = checkpoint.unfinished(final)
    if accelerator.is_main_process:
        temporary.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary / "state"))
    if accelerator.is_main_process:
        export(state, temporary, step)
        facts = {
            **_about(state, step),
            **state.best.to_dict(),
            "samples": step * state.loop.batch,
            "processes": accelerator.num_processes,
            "torch": torch.__version__,
            "accelerate": accelerate.__version__,
            "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        (temporary / checkpoint.META).write_text(json.dumps(facts, indent=1) + "\n")
    accelerator.wait_for_everyone()  # every process has written its random state
    if accelerator.is_main_process:
        checkpoint.publish(final)
        checkpoint.keep_last(state.run, state.loop.keep_last, state.best.step)
    accelerator.wait_for_everyone()


def export(state: State, folder: Path, step: int) -> None:
    """Writes the average as it is sampled: `folder/model.safetensors`."""
    config, dtype = state.objective.exported().config, DTYPES[state.ema_config.save_dtype]
    extra = {**_about(state, step), "classes": json.dumps(state.classes), "tokenizer": state.tokenizer}
    part = state.objective.part
    extra |= dict(state.objective.facts)
    checkpoint.save_module(folder / checkpoint.WEIGHTS, state.ema.module, config, dtype, extra, part)


def mend_export(state: State, path: Path, step: int) -> str:
    """Writes the export of the step directory `path`, which was just loaded, again if it is damaged or missing.

    Returns:
        What was done, in one line; "" for nothing.
    """
    try:
        checkpoint.read_metadata(path / checkpoint.WEIGHTS)
        return ""
    except UserError:
        export(state, path, step)
        return f"{path / checkpoint.WEIGHTS} was damaged or missing: written again from the state of its step"


def _about(state: State, step: int) -> dict[str, Any]:
    return {"step": step, "objective": type(state.objective).__module__.rpartition(".")[2]}


def load(state: State, path: Path) -> int:
    """Restores everything from the step directory `path`; the number of steps done.

    Raises:
        UserError: it is of another objective, does not fit, or is damaged.
    """
    try:
        facts = json.loads((path / checkpoint.META).read_text())
        own = _about(state, 0)["objective"]
        made = facts.get("objective", own)
        if made != own:
            raise UserError(f"{path} is of objective {made}, this config trains {own}; pass a step of such a run")
        state.accelerator.load_state(str(path / "state"))
        state.best.restore(path, state.run)
        return int(facts["step"])
    except UserError:
        raise
    except (RuntimeError, ValueError, KeyError, OSError, EOFError, UnpicklingError, SafetensorError) as error:
        reason, older = " ".join(str(error).split()).partition(". ")[0], checkpoint.older_steps(path)
        raise UserError(
            f"{path} does not fit this config or is damaged ({reason[:300]}); if damaged, remove it to "
            + (f"go on from {older[-1]}" if older else "start anew, for there is no older one")
        ) from error


def keep_tokenizer(objective: Objective, data: Data, run: Path, resume: Path | None) -> str:
    """Copies a frozen tokenizer beside the run: a directory is all that sampling needs.

    Args:
        resume: the step that the run continues from.

    Returns:
        Hash of the tokenizer whose tokens are learned, be they encoded on the fly or cached; "" if none is known.

    Raises:
        UserError: the continued run was trained on another tokenizer.
    """
    tokenizer, path = objective.frozen.get("tokenizer"), run / checkpoint.TOKENIZER
    own = tokenizer if isinstance(tokenizer, Tokenizer) else None
    given = checkpoint.tokenizer_hash(own) if own else getattr(data, "tokenizer_hash", "")
    old = _trained_on(resume) if resume else ""
    if given and old and given != old:
        raise UserError(
            f"{resume} was trained on tokenizer {old[:12]}, which is not the tokenizer of this config ({given[:12]}); "
            "give the old one back, or start anew in another loop.out"
        )
    if own and not (resume and path.exists() and checkpoint.tokenizer_hash(checkpoint.load_tokenizer(path)) == given):
        checkpoint.save_module(path, own, own.config)
    return given


def _trained_on(step: Path) -> str:
    """Hash of the tokenizer whose tokens were learned up to the directory `step`; "" where nothing tells."""
    beside = step.parent / checkpoint.TOKENIZER
    with contextlib.suppress(UserError):  # a damaged export, which `mend_export` speaks of
        if recorded := checkpoint.read_metadata(step / checkpoint.WEIGHTS).get("tokenizer"):
            return recorded
    return checkpoint.tokenizer_hash(checkpoint.load_tokenizer(beside)) if beside.is_file() else ""
