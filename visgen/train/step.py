"""One step: its turns, each an optimiser step of one net, and what is read of them now and then.

A step is a pure function of the state and its number. Learning rates, dropout and the noise of every sample are keyed
by it; noise by the sample's place in the step besides, so that processes and micro-batches change nothing of it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from visgen import run_files
from visgen.config import UserError
from visgen.data import Batch
from visgen.nn.keyed import Rows
from visgen.train.optim import learning_rate
from visgen.train.seeds import STEP, TURN, random_key, seed_process
from visgen.train.shards import full, is_sharded, no_sync
from visgen.train.state import State


def train_step(state: State, batches: list[Batch], step: int) -> None:
    """All turns of step `step` (counted from 0) on its micro-batches, then the average."""
    seed_process(state.loop.seed, STEP, step, state.accelerator.process_index)  # dropout draws from the global streams
    state.objective.begin_step(step, state.ema.module)
    for turn, name in enumerate(state.objective.turns(step)):
        take_turn(state, name, turn, batches, step)
    state.ema.update()


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
    key, losses = random_key(state.loop.seed, TURN, step, turn), []
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        for module in state.counting[name]:
            module.micro_batch = (i, len(batches))
        rng = Rows(key + places_of(state, i))
        with contextlib.nullcontext() if last else no_sync(accelerator, net):
            with _precision(state, net):
                loss, logs = state.objective.loss(name, state.nets, batch, step, rng)
            accelerator.backward(loss / len(batches))
        for what, value in {"loss": loss, **logs}.items():
            meter.add(f"{name}/{what}", value)
        meter.watch(f"{name}: the loss", loss, step)
        losses.append(loss.detach().float())
    norm = clip_gradient(state.trainable[name], state.loop.clip)
    meter.add(f"{name}/grad_norm", norm)
    meter.watch(f"{name}: the gradient", norm, step)
    _step_if_finite(state, name, torch.stack([*losses, norm.float()]))


def places_of(state: State, part: int) -> Tensor:
    """Where the rows of micro-batch `part` stand in the step's global order (`order.MicroBatches`), [B] int64."""
    accelerator, loop = state.accelerator, state.loop
    length = loop.batch // (accelerator.num_processes * loop.accumulation)
    own = torch.arange(part * length, (part + 1) * length, device=accelerator.device)
    return own * accelerator.num_processes + accelerator.process_index


def clip_gradient(parameters: list[nn.Parameter], most: float) -> Tensor:
    """Scales the gradient of `parameters` to a norm of at most `most` (0: leaves it); the norm before."""
    norm = full(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    if most:
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


def _step_if_finite(state: State, name: str, values: Tensor) -> None:
    """An optimiser step of net `name`, or none where one of the `values` is not finite on any process.

    On a GPU the fused optimiser reads the answer there; on the CPU the host does.
    """
    optimizer = state.optimizers[name]
    fine = torch.isfinite(values).all()
    if state.accelerator.num_processes > 1:
        fine = state.accelerator.reduce(fine.float(), "sum") == state.accelerator.num_processes
    state.finite.enter(name, fine)
    if optimizer.param_groups[0]["fused"]:
        optimizer.optimizer.found_inf = (~fine).float()
        optimizer.step()
    elif fine:
        optimizer.step()
    optimizer.zero_grad()


def read_meter(state: State, step: int, data_wait: float) -> tuple[dict[str, float], str]:
    """Return the means since the last read with the learning rates of `step`, and a line about skipped steps or "".

    Raises:
        UserError: too many in a row. Nothing of them has entered the weights.
    """
    means, bad = state.meter.read(state.accelerator, {**state.finite.take(), "data_wait": data_wait})
    row = max(means.pop(f"{name}/skipped_in_a_row", 0) for name in state.nets)
    skipped = {n: means.pop(f"{n}/skipped", 0) for n in state.nets}
    means |= {f"{n}/skipped": count for n, count in skipped.items() if count}
    warning = ""
    if bad:
        what, first = min(bad.items(), key=lambda item: (item[1], "loss" not in item[0]))
        where = f"{what} is not finite at step {first + 1}"
        if row > state.loop.most_skipped:
            kept = run_files.find_steps(state.run)
            last = f"the last checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
            raise UserError(
                f"{where}, nor were {row:.0f} steps in a row (loop.most_skipped {state.loop.most_skipped}); {last}; "
                "lower optim.lr, lengthen optim.warmup or look at the data of that step"
            )
        warning = f"warning: {where}; {sum(skipped.values()):.0f} steps until step {step + 1} were skipped"
    rates = {f"{n}/lr": learning_rate(s, step, state.loop.steps) for n, s in state.settings.items()}
    return {**means, **rates}, warning


def _precision(state: State, net: nn.Module) -> Any:
    """Autocast around a sharded net; DDP's has it in its forward."""
    if not is_sharded(net) or state.loop.precision != "bf16":
        return contextlib.nullcontext()
    return torch.autocast(state.accelerator.device.type, torch.bfloat16)
