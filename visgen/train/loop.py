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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from torch import Tensor, nn

from visgen import checkpoint
from visgen import config as configs
from visgen.checks import check
from visgen.config import UserError
from visgen.data import Batch, Data, to_batch
from visgen.launch import cpus, on_cpu
from visgen.objectives import Objective
from visgen.train.ema import Ema, EmaConfig
from visgen.train.held_out import Best, held_out_losses, preview_batch
from visgen.train.log import Clock, Log, LogConfig, report
from visgen.train.optim import OptimConfig, build_optimizer, learning_rate, override
from visgen.train.order import MicroBatches, Order, check_batch, micro_batches
from visgen.train.scoring import Scoring
from visgen.train.seeds import STEP, TURN, random_key, seed_process
from visgen.train.state import LoopConfig, State, keep_tokenizer, load, mend_export, save


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
) -> None:
    """Trains `objective` on `data` in the run directory `run`.

    Args:
        resume: a step directory to continue from.
        values: the resolved config, for W&B.
        held_out: makes the data that previews and held-out losses are of; default `data`.
        scoring: distances of drawn images, on all processes.

    Raises:
        UserError: settings that do not fit together, what the objective's `setup` refuses, a loss that is not finite.
    """
    for name, settings in (("loop", loop), ("optim", optim), ("ema", ema)):
        check(settings, name)
    loop.check(objective)
    check_batch(len(data), loop.batch, accelerator.num_processes, loop.accumulation)
    objective.setup(data)
    data = objective.reading(data)
    state = prepare(objective, run, data.classes, accelerator, loop, optim, ema)
    if scoring is not None:
        scoring.prepare(objective, accelerator)
    start = load(state, resume) if resume is not None else 0
    if accelerator.is_main_process:
        checkpoint.clean(run)
        state.tokenizer = keep_tokenizer(objective, data, run, resume)
    out = Log(log, run, values or {}, accelerator.is_main_process, start, loop.steps)
    try:
        if accelerator.is_main_process:
            _report(state, data, out, start)
            in_place = resume if resume is not None and resume.parent.resolve() == run.resolve() else None
            if in_place is not None and (mended := mend_export(state, in_place, start)):
                out.say(mended)
        if start >= loop.steps:
            out.say(
                f"all {loop.steps} steps are done; to go on: a larger loop.steps, another loop.out, --loop.resume {run}"
            )
        elif _enough(state):
            out.say(f"{_lost(state)}; raise loop.patience to go on")
            return
        looks = accelerator.is_main_process and (loop.preview_every or loop.eval_every)
        spare = objective.reading(held_out()) if looks and held_out is not None else data
        preview = preview_batch(spare, loop.preview_images, loop.seed) if looks and loop.preview_every else None
        clock = Clock(start)
        for step, batches in enumerate(_batches(state, data, start), start):
            train_step(state, batches, step)
            done = step + 1
            out.advance()
            with clock.paused():
                improved = _evaluate(state, spare if looks else None, done, out)
                if scoring is not None and scoring.due(done, loop.steps):
                    out.metrics(done, scoring.measure(state.ema.module))
            saving = improved or _enough(state) or _due(done, loop.save_every, loop.steps)
            if saving or done % loop.log_every == 0:
                means = read_meter(state, step)  # also before every save: a poisoned state is never saved
                facts = {"epoch": done * loop.batch / len(data), "images_per_s": clock.lap(done) * loop.batch}
                out.metrics(done, {**means, **facts}, f"{objective.export}/loss")
            with clock.paused():
                if preview is not None and _due(done, loop.preview_every, loop.steps):
                    _preview(state, preview, done, out)
                if saving:
                    save(state, done)
            if _enough(state):
                out.say(_lost(state))
                break
    finally:
        out.close()


def make_accelerator(loop: LoopConfig) -> Accelerator:
    """The processes and devices of this launch."""
    torch.set_float32_matmul_precision("highest" if loop.precision == "fp32" else "high")
    torch.backends.cudnn.allow_tf32 = loop.precision != "fp32"
    return Accelerator(
        mixed_precision="bf16" if loop.precision == "bf16" else "no",
        cpu=on_cpu(),
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
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
    for name, net in objective.nets.items():
        settings[name] = override(optim, overrides.get(name))
        settings[name].check(loop.steps)
        _place(net, accelerator.device).train()
        optimizer = build_optimizer(net, settings[name], getattr(objective, "no_decay", ()))
        if loop.compile:
            net.forward = torch.compile(net.forward)
        nets[name], optimizers[name] = accelerator.prepare(net, optimizer)
    for module in objective.frozen.values():
        _place(module, accelerator.device).requires_grad_(False).eval()
    average = Ema(objective.exported(), ema.decay)
    accelerator.register_for_checkpointing(average)
    if hasattr(objective, "state_dict"):
        accelerator.register_for_checkpointing(objective)
    rng = torch.Generator(accelerator.device)
    best = Best(loop.keep_best)
    return State(accelerator, objective, run, classes, loop, ema, nets, optimizers, settings, average, rng, best=best)


def _place(module: nn.Module, device: torch.device) -> nn.Module:
    """Moves a module; on a GPU kernels of convolutions lie channels-last, which saves cuDNN a transposition each."""
    module.to(device)
    return module.to(memory_format=torch.channels_last) if device.type == "cuda" else module


# ----------------------------------------------------------------------------------------------------- one step


def train_step(state: State, batches: list[Batch], step: int) -> None:
    """All turns of step `step` (counted from 0) on its micro-batches, then the average."""
    seed_process(state.loop.seed, STEP, step, state.accelerator.process_index)  # dropout draws from the global streams
    state.objective.begin_step(step, state.ema.module)
    for turn, name in enumerate(state.objective.turns(step)):
        take_turn(state, name, turn, batches, step)
    state.ema.update_parameters(state.objective.exported())


def take_turn(state: State, name: str, turn: int, batches: list[Batch], step: int) -> None:
    """One optimiser step of net `name`, its gradient averaged over micro-batches and processes."""
    accelerator, net, optimizer, meter = state.accelerator, state.nets[name], state.optimizers[name], state.meter
    rate = learning_rate(state.settings[name], step, state.loop.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    if len(state.nets) > 1:  # the loss reaches through other nets, their gradients are not wanted
        for other, parameters in state.trainable.items():
            for parameter in parameters:
                parameter.requires_grad_(other == name)
    state.rng.manual_seed(random_key(state.loop.seed, TURN, step, turn, accelerator.process_index))
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(net):
            loss, logs = state.objective.loss(name, state.nets, batch, step, state.rng)
            accelerator.backward(loss / len(batches))
        for key, value in {"loss": loss, **logs}.items():
            meter.add(f"{name}/{key}", value)
        meter.watch(f"{name}: the loss", loss, step)
    if state.loop.clip:
        norm = accelerator.clip_grad_norm_(state.trainable[name], state.loop.clip)
        meter.add(f"{name}/grad_norm", norm)
        meter.watch(f"{name}: the gradient", norm, step)
    optimizer.step()
    optimizer.zero_grad()


def read_meter(state: State, step: int) -> dict[str, float]:
    """Means since the last read, and the learning rates of `step`. Stops the run where something was not finite."""
    means, bad = state.meter.read(state.accelerator)
    if bad:
        what, first = min(bad.items(), key=lambda item: (item[1], "loss" not in item[0]))
        kept = checkpoint.find_steps(state.run)
        where = f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        raise UserError(
            f"{what} is not finite at step {first + 1}; {where}; lower optim.lr, lengthen optim.warmup or look at the "
            "data of that step"
        )
    rates = {f"{n}/lr": learning_rate(s, step, state.loop.steps) for n, s in state.settings.items()}
    return {**means, **rates}


# ------------------------------------------------------------------------------------------------------ helpers


def _batches(state: State, data: Data, start: int) -> Iterator[list[Batch]]:
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


def _evaluate(state: State, data: Data | None, done: int, out: Log) -> bool:
    """Held-out losses on `data` (the main process's alone) where they are due; are they the best so far?"""
    loop = state.loop
    if not _due(done, loop.eval_every, loop.steps):
        return False
    found = _losses(state, data, loop.eval_samples) if data is not None else {}
    out.metrics(done, found)
    return bool(loop.keep_best) and state.best.update(found, done, state.objective, state.accelerator)


def _losses(state: State, data: Data, samples: int) -> dict[str, float]:
    device = state.accelerator.device
    return held_out_losses(state.objective, state.ema.module, data, samples, state.loop.batch, device)


def _enough(state: State) -> bool:
    return 0 < state.loop.patience <= state.best.since


def _lost(state: State) -> str:
    best = state.best
    return f"no better held_out/{best.metric} in {best.since} evaluations: best {best.value:g}, at step {best.step}"


@torch.no_grad()
def _preview(state: State, samples: dict[str, Tensor], done: int, out: Log) -> None:
    batch = to_batch(samples, state.accelerator.device)
    images = state.objective.preview(state.ema.module, batch, state.loop.seed)
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
        "precision": loop.precision + (", compiled" if loop.compile else ""),
        "average": f"decay {state.ema_config.decay:g} of {state.objective.export}",
        "device": torch.cuda.get_device_name(accelerator.device) if accelerator.device.type == "cuda" else "cpu",
        "run": state.run,
    }
    report(out.console, rows, facts)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
