"""The training loop: one for every objective.

`fit` = set up -> prepare -> resume -> per step: per turn (accumulate, clip, step) -> EMA -> log, preview, save.
A step is a pure function of the state and its number: the data order, the learning rates and every random stream are
keyed by it, so a resumed run repeats the uninterrupted one bit for bit on the CPU. The loop never waits for the device
between two logging intervals.

A net's buffers must be computed alike on every process (the loop does not broadcast them), and the micro-batches of a
step are the same objects in each of its turns, so an objective can keep tensors per micro-batch.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn

from visgen import config as configs
from visgen import run_files
from visgen.checks import check
from visgen.config import UserError
from visgen.data import Batch, Data, to_batch
from visgen.launch import cpus, on_cpu
from visgen.model import Model
from visgen.nn.blocks import compile_blocks, recompute
from visgen.objectives import Objective
from visgen.train.ema import Ema, EmaConfig
from visgen.train.faults import Stop
from visgen.train.held_out import Best, held_out_losses, preview_batch
from visgen.train.log import Log, LogConfig, report
from visgen.train.optim import OptimConfig, build_optimizer, override
from visgen.train.order import MicroBatches, Order, check_batch, micro_batches, say_killed
from visgen.train.scoring import Scoring
from visgen.train.shards import shard, sharding
from visgen.train.state import (
    LoopConfig,
    State,
    keep_tokenizer,
    mend_export,
    other_data,
    restore,
    same_meaning,
    save,
    unfinished_tokenizer,
)
from visgen.train.step import read_meter, train_step
from visgen.train.throughput import Clock, operations, peak, speeds


def fit(
    objective: Objective,
    data: Data,
    run: Path,
    accelerator: Accelerator,
    *,
    loop: LoopConfig,
    optim: OptimConfig,
    ema: EmaConfig,
    log: LogConfig,
    resume: Path | None = None,
    values: Mapping[str, Any] | None = None,
    held_out: Callable[[], Data] | None = None,
    scoring: Scoring | None = None,
    last: bool = False,
) -> None:
    """Trains `objective` on `data` in the run directory `run`.

    Args:
        resume: a step directory to continue from.
        values: the resolved config, for W&B.
        held_out: makes the data that previews and held-out losses are of; default `data`.
        scoring: distances of drawn images, on all processes.
        last: whether the process ends after it; see `faults.Stop`.

    Raises:
        UserError: settings that do not fit together, what the objective's `setup` refuses, too many steps
            that are not finite, a checkpoint that cannot be written.
    """
    for name, settings in (("loop", loop), ("optim", optim), ("ema", ema)):
        check(settings, name)
    loop = loop.resolved()
    loop.check(objective)
    check_batch(len(data), loop.batch, accelerator.num_processes, loop.accumulation)
    objective.setup(data)
    if loop.preview_every:
        objective.check_preview()
    data = objective.reading(data)
    state = prepare(objective, run, data.classes, accelerator, loop, optim, ema)
    state.data_samples = len(data)
    if scoring is not None:
        scoring.prepare(objective, accelerator, data.classes)
    start, said, in_place = 0, [""], False
    if resume is not None:
        in_place = resume.parent.resolve() == run.resolve()
        same_meaning(state, resume)
        start, resume, warning = restore(state, resume, fall_back=in_place)
        said = [warning, other_data(state, resume, start)]
    if accelerator.is_main_process:
        run_files.clean(run)
        state.tokenizer = keep_tokenizer(objective, data, run, resume)
    if resume is not None and in_place:
        said.append(mend_export(state, resume, start))
    out = Log(log, run, values or {}, accelerator.is_main_process, start, loop.steps)
    try:
        if accelerator.is_main_process:
            _report(state, data, out, start)
            for line in filter(None, [*said, unfinished_tokenizer(objective)]):
                out.say(line)
        if start >= loop.steps:
            out.say(
                f"all {loop.steps} steps are done; to go on: a larger loop.steps with --loop.resume {run} and another "
                "loop.out"
            )
        elif _enough(state):
            out.say(f"{_lost(state)}; raise loop.patience to go on")
            return
        _run(state, data, held_out, scoring, start, out, last)
    except RuntimeError as error:
        say_killed(error)
        raise
    finally:
        out.close()


def _run(
    state: State,
    data: Data,
    held_out: Callable[[], Data] | None,
    scoring: Scoring | None,
    start: int,
    out: Log,
    last: bool,
) -> None:
    """The steps from `start` on, and all that is due between them: look, save, then talk."""
    loop = state.loop
    looks = state.accelerator.is_main_process and (loop.preview_every or loop.eval_every)
    spare = state.objective.reading(held_out()) if looks and held_out is not None else data
    preview = preview_batch(spare, loop.preview_images, loop.seed) if looks and loop.preview_every else None
    clock, work = Clock(start), operations(state.objective)
    rate = peak(state.accelerator.device, loop.peak_tflops)
    most = None if rate is None else rate * state.accelerator.num_processes
    with Stop(state.accelerator, last) as stop, contextlib.closing(_batches(state, data, start)) as source:
        for step in range(start, loop.steps):
            with clock.waiting():
                batches = next(source)
            train_step(state, batches, step)
            done, warning = step + 1, ""
            with clock.paused():
                scored = scoring is not None and scoring.due(done, loop.steps)
                average = state.ema.whole() if scored or _looks(loop, done) else state.ema.module
                improved = _evaluate(state, average, spare if looks else None, done, out)
                if scoring is not None and scored:
                    out.metrics(done, scoring.measure(average))
            stopping = stop.agreed()
            saving = improved or stopping or _enough(state) or _due(done, loop.save_every, loop.steps)
            if saving or done % loop.log_every == 0:
                means, warning = read_meter(state, step, clock.share())  # also before every save
                facts = speeds(clock.lap(done), loop.batch, state.objective, work, most)
                facts["epoch"] = done * loop.batch / len(data)
                out.metrics(done, {**means, **facts}, f"{state.objective.export}/loss")
            with clock.paused():
                if saving:
                    save(state, done)
                out.advance()
                out.tell(warning)
                if preview is not None and _due(done, loop.preview_every, loop.steps):
                    with out.attempt("the preview"):
                        _preview(state, average, preview, done, out)
            if _enough(state):
                out.say(_lost(state))
            if _enough(state) or done == loop.steps:
                _end(state, done, out)
                break
            if stopping:
                who = stop.received or "a signal to another process"
                out.say(f"{who}: step {done} is saved; the same command goes on from there")
                break
    if data.skipped:
        out.say(f"{data.skipped} of {len(data)} samples could not be read; the next one was taken in place of each")


def make_accelerator(loop: LoopConfig) -> Accelerator:
    """The processes and devices of this launch."""
    loop = loop.resolved()
    torch.set_float32_matmul_precision("highest" if loop.precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = loop.precision != "fp32"
    ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
    if loop.reduce == "bf16":
        ddp.comm_hook = DDPCommunicationHookType.BF16
    return Accelerator(
        mixed_precision="bf16" if loop.precision == "bf16" else "no", cpu=on_cpu(), kwargs_handlers=[ddp]
    )


def prepare(
    objective: Objective,
    run: Path,
    classes: list[str],
    accelerator: Accelerator,
    loop: LoopConfig,
    optim: OptimConfig,
    ema: EmaConfig,
) -> State:
    """Moves, compiles and wraps the nets, each with its optimiser; frozen modules are only moved."""
    overrides = getattr(objective, "optim_overrides", {})
    nets, optimizers, settings = {}, {}, {}
    sharded = sharding(accelerator)
    if sharded and not objective.shards:
        kind = type(objective).__module__.rpartition(".")[2]
        raise UserError(
            f"objective {kind} reads weights outside a net's forward, or trains several nets, so it is not sharded; "
            "launch it with DDP, as by configs/accelerate/gpu8.yaml"
        )
    for net in objective.nets.values():
        _place(net, accelerator.device).train()
    average = Ema(objective.exported(), ema.decay)  # of the plain module, before anything is put around it
    for name, net in objective.nets.items():
        settings[name] = override(optim, overrides.get(name))
        settings[name].check(loop.steps)
        _adapt(net, loop)
        if sharded:
            shard(net, accelerator, bf16=loop.precision == "bf16")
        optimizer = build_optimizer(net, settings[name], getattr(objective, "no_decay", ()))
        if sharded:
            nets[name], optimizers[name] = net, accelerator.prepare_optimizer(optimizer)
        else:
            with warnings.catch_warnings():  # torch 2.14 has a new name for it, which 2.11 does not know
                warnings.filterwarnings("ignore", ".*broadcast_buffers", FutureWarning)
                nets[name], optimizers[name] = accelerator.prepare(net, optimizer)
    average.follow()
    for module in objective.frozen.values():
        _place(module, accelerator.device).requires_grad_(False).eval()
    best = Best(loop.keep_best)
    return State(accelerator, objective, run, classes, loop, ema, nets, optimizers, settings, average, best=best)


def _adapt(net: nn.Module, loop: LoopConfig) -> None:
    """Compilation and recomputation, as `loop` asks for them."""
    if loop.compile and (loop.compiled == "whole" or not compile_blocks(net)):
        net.forward = torch.compile(net.forward)
    if loop.recompute:
        recompute(net)


def _place(module: nn.Module, device: torch.device) -> nn.Module:
    """Moves a module; on a GPU kernels of convolutions lie channels-last, which saves cuDNN a transposition each."""
    module.to(device)
    return module.to(memory_format=torch.channels_last) if device.type == "cuda" else module


# ------------------------------------------------------------------------------------------------------ helpers


def _batches(state: State, data: Data, start: int) -> Generator[list[Batch], None, None]:
    """The micro-batches of every step from `start` on, on the device."""
    accelerator, loop = state.accelerator, state.loop
    order = Order(len(data), loop.batch, loop.seed)
    rank, world = accelerator.process_index, accelerator.num_processes
    keys = MicroBatches(order, start, loop.steps, rank, world, loop.accumulation)
    source = micro_batches(data, keys, loop.seed, loop.workers, pin=accelerator.device.type == "cuda")
    for _ in range(start, loop.steps):
        yield [to_batch(next(source), accelerator.device) for _ in range(loop.accumulation)]


def _due(done: int, every: int, steps: int) -> bool:
    return every > 0 and (done % every == 0 or done == steps)


def _looks(loop: LoopConfig, done: int) -> bool:
    """Is the average looked at after `done` steps?"""
    return _due(done, loop.preview_every, loop.steps) or _due(done, loop.eval_every, loop.steps)


def _evaluate(state: State, average: nn.Module, data: Data | None, done: int, out: Log) -> bool:
    """Held-out losses of `average` on `data` (the main process's alone) where they are due; the best so far?"""
    loop = state.loop
    if not _due(done, loop.eval_every, loop.steps):
        return False
    found = _losses(state, average, data, loop.eval_samples) if data is not None else {}
    out.metrics(done, found)
    return bool(loop.keep_best) and state.best.update(found, done, state.objective, state.accelerator)


def _losses(state: State, average: nn.Module, data: Data, samples: int) -> dict[str, float]:
    device = state.accelerator.device
    return held_out_losses(state.objective, average, data, samples, state.loop.batch, device)


def _enough(state: State) -> bool:
    return 0 < state.loop.patience <= state.best.since


def _end(state: State, done: int, out: Log) -> None:
    """Say what has come of the run, and what can be done with it."""
    if not out.main:
        return
    best, run = state.best, state.run
    out.say(f"done: {done:,} steps, {out.passed()} for {done - out.start:,} of them; {run / run_files.step_name(done)}")
    if best.step:
        out.say(f"best held-out {best.metric}: {best.value:g}, at step {best.step} (--step best)")
    if state.loop.preview_every:
        out.say(f"previews: {run / 'previews'}")
    if isinstance(state.objective.exported(), Model):
        flag = " --step best" if best.step and best.step != done else ""
        out.say(f"next: python sample.py --checkpoint {run}{flag} --num 16 --out out/{run.name}")
    else:
        out.say(f"next: a training with --objective.tokenizer {run}")


def _lost(state: State) -> str:
    best = state.best
    return f"no better held_out/{best.metric} in {best.since} evaluations: best {best.value:g}, at step {best.step}"


@torch.no_grad()
def _preview(state: State, average: nn.Module, samples: dict[str, Tensor], done: int, out: Log) -> None:
    batch = to_batch(samples, state.accelerator.device)
    images = state.objective.preview(average, batch, state.loop.seed)
    if images is not None:
        out.images(done, images)


def _report(state: State, data: Data, out: Log, start: int) -> None:
    loop, accelerator = state.loop, state.accelerator
    rows = []
    for name, net in state.objective.nets.items():
        optim = state.settings[name]
        trainable = sum(p.numel() for p in state.trainable[name])
        plan = f"{optim.method} lr {optim.lr * optim.lr_scale:g} {optim.schedule}, warm-up {optim.warmup}"
        rows.append((name, f"{_size(net):,}", f"{trainable:,}", plan))
    rows += [(name, f"{_size(module):,}", "0", "frozen") for name, module in state.objective.frozen.items()]
    each = loop.batch // (accelerator.num_processes * loop.accumulation)
    epochs = loop.steps * loop.batch / len(data)
    facts = {
        "data": f"{configs.kind_of(data.config)}, {len(data):,} samples, {len(data.classes)} classes",
        "steps": f"{loop.steps:,} ({epochs:.2f} epochs)" + (f", resumed after {start:,}" if start else ""),
        "batch": f"{loop.batch} = {accelerator.num_processes} processes x {loop.accumulation} micro-batches x {each}",
        "workers": f"{loop.workers}" + (f", of which {cpus()} start: one a CPU" if loop.workers > cpus() else ""),
        "precision": _precision_of(loop),
        "peak": _peak_of(state),
        "average": f"decay {state.ema_config.decay:g} of {state.objective.export}",
        "device": torch.cuda.get_device_name(accelerator.device) if accelerator.device.type == "cuda" else "cpu",
        "run": state.run,
    }
    report(out.console, rows, facts)


def _precision_of(loop: LoopConfig) -> str:
    parts: list[str] = [loop.precision]
    if loop.compile:
        parts.append("blocks compiled" if loop.compiled == "blocks" else "compiled")
    if loop.recompute:
        parts.append("blocks recomputed")
    return ", ".join(parts)


def _peak_of(state: State) -> str:
    rate, work = peak(state.accelerator.device, state.loop.peak_tflops), operations(state.objective)
    if rate is None or work is None:
        return "unknown, so MFU is not shown"
    return f"{rate / 1e12:g} TFLOP/s a device; an image takes {work / 1e9:.3g} GFLOP"


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
