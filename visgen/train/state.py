"""What a run is made of between two steps: its settings, its state, and how that is saved and restored."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal

import accelerate
import torch
from accelerate import Accelerator
from torch import nn

from visgen import checkpoint, files, run_files, tensors
from visgen import config as configs
from visgen.checks import Natural, Positive, Seed, Weight
from visgen.config import UserError
from visgen.data import Data
from visgen.data._classes import same_classes
from visgen.launch import has_bf16, on_cpu
from visgen.objectives import Objective
from visgen.tokenizers import Tokenizer
from visgen.train.ema import Ema, EmaConfig
from visgen.train.faults import Finite, all_true, together
from visgen.train.held_out import Best
from visgen.train.log import Meter
from visgen.train.optim import OptimConfig
from visgen.train.shards import gathered, moments_like, unwrapped, weights_like

STATE = "state"  # sub-directory of a step
AGAIN = "copy the step again, or use an earlier one"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class LoopConfig:
    """The loop.

    Attributes:
        steps: optimisation steps in all.
        batch: samples of one step, over all processes and micro-batches together.
        accumulation: micro-batches of one step, on each process.
        precision: bf16 is autocast around each net's forward; tf32 lets fp32 matrix products and convolutions run in
            TF32 (small nets run faster so, since nothing is cast); weights and optimiser stay fp32. auto is bf16 where
            GPU or CPU compute in it, else fp32; config.yaml records which, and a resumed run keeps it.
        reduce: in what whole (DDP) gradients are summed over the processes: fp32, or bf16, which moves half the bytes
            and rounds each process' share to 8 bits first. Sharded ones are always summed in fp32.
        clip: largest gradient norm of a net, 0 for none.
        most_skipped: a step whose loss or gradient is not finite changes nothing; the run ends where more than so many
            of a net come in a row, which is looked at when something is logged or saved.
        compile: torch.compile the nets.
        compiled: what of them: the repeated blocks, one code for all that are alike, which is soon done (a net without
            such blocks is compiled whole); or the whole forward.
        recompute: keep no activation inside a repeated block; the backward pass computes them again.
        peak_tflops: operations a second, in 10^12, that MFU is a share of; 0: the published dense bf16 rate of a GPU
            that is known (`throughput.PEAKS`), else no MFU.
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
    precision: Literal["auto", "bf16", "tf32", "fp32"] = "auto"
    reduce: Literal["fp32", "bf16"] = "fp32"
    clip: Weight = 1.0
    most_skipped: Natural = 10
    compile: bool = False
    compiled: Literal["blocks", "whole"] = "blocks"
    recompute: bool = False
    peak_tflops: Weight = 0.0
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

    def resolved(self) -> LoopConfig:
        """Return the settings with the precision that "auto" stands for here."""
        if self.precision != "auto":
            return self
        fast = has_bf16(torch.device("cpu" if on_cpu() else "cuda"))
        return dataclasses.replace(self, precision="bf16" if fast else "fp32")

    def check(self, objective: Objective) -> None:
        """Raises `UserError` for settings that need each other, or what `objective` does not have."""
        objective.check_steps(self.steps)
        if self.keep_best and not self.eval_every:
            raise UserError(f"loop.keep_best '{self.keep_best}' is a held-out value: set loop.eval_every")
        if self.keep_best and self.keep_best not in objective.held_out_values:
            allowed = ", ".join(objective.held_out_values) or "none, this objective has no held-out values"
            raise UserError(f"loop.keep_best '{self.keep_best}' is no held-out value; allowed: {allowed}")
        if self.patience and not self.keep_best:
            raise UserError(f"loop.patience {self.patience} waits for a held-out value: set loop.keep_best")
        if self.compiled == "whole" and self.recompute:
            raise UserError("loop.recompute works block by block, loop.compiled is whole: set that to blocks")


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
    tokenizer: str = ""  # hash of the frozen tokenizer whose tokens are learned; kept by the main process
    data_samples: int = 0  # how many the data set has
    meter: Meter = field(default_factory=Meter)
    finite: Finite = field(default_factory=Finite)
    best: Best = field(default_factory=Best)

    def __post_init__(self) -> None:
        self.trainable = {n: [p for p in net.parameters() if p.requires_grad] for n, net in self.nets.items()}
        # modules that count steps are told which micro-batch comes
        self.counting: dict[str, list[Any]] = {
            n: [m for m in net.modules() if hasattr(m, "micro_batch")] for n, net in self.nets.items()
        }


# -------------------------------------------------------------------------------------------------- checkpoints


def save(state: State, step: int) -> None:
    """Writes `step_*/` under a temporary name, then renames it; removes the oldest beyond `keep_last`, but the best."""
    accelerator, final = state.accelerator, state.run / run_files.step_name(step)
    temporary, main = run_files.unfinished(final), accelerator.is_main_process

    def work() -> None:
        average = state.ema.whole()
        write_state(state, temporary / STATE)
        if main:
            export(state, average, temporary, step)
            facts = {
                **_about(state, step),
                **state.best.to_dict(),
                "samples": step * state.loop.batch,
                "processes": accelerator.num_processes,
                "data_samples": state.data_samples,
                "classes": state.classes,
                "torch": torch.__version__,
                "accelerate": accelerate.__version__,
                "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "crc32": run_files.checksums(temporary),
            }
            run_files.write_meta(temporary, facts)
            run_files.publish(final)

    try:
        kept = run_files.find_steps(state.run)
        where = f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        together(accelerator, f"{final} cannot be written; {where}; make room and start again", work)
    except UserError:
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if main:
        run_files.keep_last(state.run, state.loop.keep_last, state.best.step)
    accelerator.wait_for_everyone()


def write_state(state: State, folder: Path) -> None:
    """Writes what training goes on from. All processes gather, the main one writes; a file that fails is raised last,
    so that nobody waits for tensors that another will not send."""
    failed: Exception | None = None
    for name, values in _pieces(state):
        whole = gathered(values())
        if not state.accelerator.is_main_process or failed is not None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if name.endswith(".safetensors"):
                tensors.write(folder / name, whole)
            else:
                tensors.write_pickle(folder / name, whole)
        except (UserError, RuntimeError) as error:
            failed = error
    if failed is not None:
        raise failed


def read_state(state: State, folder: Path) -> None:
    """The opposite, of a state that any number of processes has written, sharded or not."""
    for i, (name, net) in enumerate(state.nets.items()):
        own = unwrapped(net)
        found, _ = tensors.read(folder / f"model{_number(i)}.safetensors", AGAIN)
        own.load_state_dict(weights_like(own, {k.removeprefix("module."): v for k, v in found.items()}))
        saved = tensors.read_pickle(folder / f"optimizer{_number(i)}.bin", AGAIN)
        optimizer = state.optimizers[name].optimizer
        optimizer.load_state_dict(moments_like(optimizer, saved))
    state.ema.load_state_dict(tensors.read_pickle(folder / "custom_checkpoint_0.pkl", AGAIN))
    if hasattr(state.objective, "load_state_dict"):
        state.objective.load_state_dict(tensors.read_pickle(folder / "custom_checkpoint_1.pkl", AGAIN))


def _pieces(state: State) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Files of a state, and what each holds."""
    for i, (name, net) in enumerate(state.nets.items()):
        yield f"model{_number(i)}.safetensors", unwrapped(net).state_dict
        yield f"optimizer{_number(i)}.bin", state.optimizers[name].optimizer.state_dict
    yield "custom_checkpoint_0.pkl", state.ema.state_dict
    if hasattr(state.objective, "state_dict"):
        yield "custom_checkpoint_1.pkl", state.objective.state_dict


def _number(i: int) -> str:
    return f"_{i}" if i else ""


def export(state: State, average: nn.Module, folder: Path, step: int) -> None:
    """Writes the `average` as it is sampled: `folder/model.safetensors`."""
    config, dtype = state.objective.exported().config, DTYPES[state.ema_config.save_dtype]
    extra = {**_about(state, step), "classes": json.dumps(state.classes), "tokenizer": state.tokenizer}
    part = state.objective.part
    extra |= dict(state.objective.facts)
    checkpoint.save_module(folder / run_files.WEIGHTS, average, config, dtype, extra, part)


def mend_export(state: State, path: Path, step: int) -> str:
    """Writes the export of the step directory `path`, which was just loaded, again if it is damaged or missing. For all
    processes.

    Returns:
        What was done, in one line; "" for nothing.
    """
    weights, whole = path / run_files.WEIGHTS, True
    try:
        checkpoint.verify(weights)
    except UserError:
        whole = False
    if all_true(state.accelerator, whole):
        return ""
    average = state.ema.whole()
    if state.accelerator.is_main_process:
        export(state, average, path, step)
    return f"{weights} was damaged or missing: written again from the state of its step"


def _about(state: State, step: int) -> dict[str, Any]:
    return {"step": step, "objective": type(state.objective).__module__.rpartition(".")[2]}


class Damaged(UserError):
    """A step that cannot be read."""


def restore(state: State, step: Path, fall_back: bool) -> tuple[int, Path, str]:
    """Restores everything from the step directory `step`, or from the newest before it that can be read.

    Args:
        fall_back: whether an older one may do. Steps that cannot be read are then renamed to `damaged_*`.

    Returns:
        The number of steps done, the directory, and a warning ("": none).

    Raises:
        UserError: none can be read, or `step` is of another objective.
    """
    refused: list[Path] = []
    first: Damaged | None = None
    if not fall_back:
        return load(state, step), step, ""
    for path in [step, *reversed(run_files.older_steps(step))]:
        done, error = 0, None
        try:
            done = load(state, path)
        except Damaged as found:
            error = found
        if all_true(state.accelerator, error is None):
            break
        first, refused = first or error or Damaged(f"{path} cannot be read by another process"), [*refused, path]
    else:
        assert first is not None
        names = ", ".join(path.name for path in refused)
        raise UserError(f"{first}; if damaged, remove {names} to start anew, for there is no other that can be read")
    if not refused:
        return done, path, ""
    if state.accelerator.is_main_process:
        for old in refused:
            run_files.set_aside(old)
    return done, path, f"warning: {first}; going on from {path.name}, the damaged one is kept as damaged_*"


def same_meaning(state: State, path: Path) -> None:
    """Refuse to go on from the step directory `path` where a label would mean another class. Tokenizers read no label.

    Raises:
        UserError: the data have other class names than those that were trained on.
    """
    asked = getattr(state.objective.exported().config, "condition", None)
    weights = path / run_files.WEIGHTS
    if not hasattr(asked, "classes"):
        return
    trained = run_files.read_meta(path).get("classes") or []
    if not trained:
        with contextlib.suppress(UserError):  # a damaged export, which `mend_export` speaks of
            trained = checkpoint.classes_of(checkpoint.read_metadata(weights), weights)
    same_classes(trained, state.classes, str(path), "name them as before, or start anew in another loop.out")


def unfinished_tokenizer(objective: Objective) -> str:
    """Return a warning where `objective.tokenizer` is a run that has not come to its end; "": none is known."""
    path = getattr(objective.config, "tokenizer", None)  # type: ignore[attr-defined]
    if not isinstance(path, Path) or not path.is_dir():
        return ""
    with contextlib.suppress(UserError, KeyError, TypeError, ValueError):
        step = run_files.find_step(path)
        run = step.parent if run_files.is_step(step) else step
        loop, facts = configs.read_yaml(run / "config.yaml")["loop"], run_files.read_meta(step)
        enough = 0 < loop.get("patience", 0) <= (facts.get("best") or {}).get("since", 0)
        if facts["step"] < loop["steps"] and not enough:
            at = f"step {facts['step']} of {loop['steps']}"
            return f"warning: objective.tokenizer {path} is at {at}: finish its training before, or images will be poor"
    return ""


def other_data(state: State, path: Path, step: int) -> str:
    """A warning where the data were of another size when the step directory `path` was written; "": none."""
    before, now = run_files.read_meta(path).get("data_samples") or state.data_samples, state.data_samples
    if before == now:
        return ""
    return f"warning: the data had {before:,} samples at step {step}, now {now:,}: their order is another"


def load(state: State, path: Path) -> int:
    """Restores everything from the step directory `path`; the number of steps done.

    Raises:
        Damaged: it is damaged, or does not fit.
        UserError: it is of another objective.
    """
    try:
        facts = run_files.read_meta(path)
    except UserError as error:
        raise _damaged(path, error) from error
    own = _about(state, 0)["objective"]
    made = facts.get("objective", own)
    if made != own:
        raise UserError(f"{path} is of objective {made}, this config trains {own}; pass a step of such a run")
    try:
        for name, wanted in facts.get("crc32", {}).items():
            if name.startswith(f"{STATE}/") and files.crc32(path / name) != wanted:
                raise ValueError(f"{name} has other bytes than were written")
        read_state(state, path / STATE)
        state.best.restore(path, state.run)
        return int(facts["step"])
    except (RuntimeError, ValueError, KeyError, OSError, EOFError, UnpicklingError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> Damaged:
    reason = " ".join(str(error).split()).partition(". ")[0]
    return Damaged(f"{path} does not fit this config or is damaged ({reason[:300]})")


def keep_tokenizer(objective: Objective, data: Data, run: Path, resume: Path | None) -> str:
    """Copies a frozen tokenizer beside the run: a directory is all that sampling needs.

    Args:
        resume: the step that the run continues from.

    Returns:
        Hash of the tokenizer whose tokens are learned, be they encoded on the fly or cached; "" if none is known.

    Raises:
        UserError: the continued run was trained on another tokenizer.
    """
    tokenizer, path = objective.frozen.get("tokenizer"), run / run_files.TOKENIZER
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
    beside = step.parent / run_files.TOKENIZER
    with contextlib.suppress(UserError):  # a damaged export, which `mend_export` speaks of
        if recorded := checkpoint.read_metadata(step / run_files.WEIGHTS).get("tokenizer"):
            return recorded
    return checkpoint.tokenizer_hash(checkpoint.load_tokenizer(beside)) if beside.is_file() else ""
