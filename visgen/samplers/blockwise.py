"""Block by block: each is denoised given the clean ones before it, then remembered clean (ACDiT, arXiv 2412.07720).

An iteration is one evaluation of one block. Its row of the `Plan` says what to make of it: a solver's step, or, after
the last step of a block, its commit: the same window once more with clean values, whose keys and values stay. All rows
of a batch walk the same plan, which lies on the device, so an iteration reads nothing back and one graph serves all.

A model of clips goes on past its trained length, with a window of `context` blocks if wanted. Known blocks at the start
are committed as they are. Within a block, known tokens are kept by replacement: before every evaluation they are set to
their own noised values (Song et al. 2021, arXiv 2011.13456, appendix I.2), which is approximate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from visgen.checks import Positive, Range, Shift, Steps
from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise, Stream
from visgen.nn.diffusion import Row, Solver, rows
from visgen.samplers import Forward, Sampler

COMMIT = Row(-1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.0)  # leaves x as it is


@dataclass(frozen=True)
class Config:
    """Blockwise denoising.

    Attributes:
        steps: of the solver, per block.
        solver: see `nn/diffusion.py`; auto is DPM-Solver++ 2M for a model of noise, Euler for one of velocity.
        shift: of the straight path; above 1, more steps in the noise.
        scheduler: walk by this scheduler of `diffusers` instead; eager engine only.
        frames: of a model of clips, how many to draw, whole blocks; None: as trained.
        context: blocks that a block looks back on; None: all.
    """

    steps: Steps = 25
    solver: Solver = "auto"
    shift: Shift = 1.0
    scheduler: (
        Literal[
            "DPMSolverMultistepScheduler",
            "UniPCMultistepScheduler",
            "FlowMatchEulerDiscreteScheduler",
        ]
        | None
    ) = None
    frames: Annotated[int, Range(1, 100_000)] | None = None
    context: Positive | None = None


@dataclass
class Plan:
    """What every iteration does, and to which block.

    Attributes:
        table: [I, 10] float32, the fields of `Row`.
        block: [I] int64.
        first: [I, 1] bool: the block begins, from noise.
        fixed: [N] evaluation, from 1, after which the tokens of the layout's slot are final.
    """

    table: Tensor
    block: Tensor
    first: Tensor
    fixed: Tensor


@dataclass
class State:
    tokens: Tensor  # [B, N, C] raster order
    rounds: Tensor  # [B, N]
    step: Tensor  # [1] iteration
    x: Tensor  # [B, W, C] the block at work
    before: Tensor  # [B, W, C] what the solver remembers of its last evaluation
    kept: Tensor  # [B, W, C] x at the start of a step of several evaluations
    table: Tensor
    block: Tensor
    first: Tensor
    known: Tensor | None  # [B, N, C] raster order
    keep: Tensor | None  # [B, N, 1] bool
    denoise: Callable[[Tensor, Tensor, Tensor], Tensor]
    raster: Callable[[Tensor], Tensor]
    foreign: Any = None


class Blockwise(Sampler):
    """Denoises block after block; keys and values of the clean ones are kept once for all guidance branches."""

    continuous = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def init(self, engine: Engine, noise: Noise) -> State:
        self._check(engine)
        layout, channels, device = engine.model.backbone.layout, engine.model.config.channels, engine.device
        blocks, size = self._blocks(engine), layout.block
        count = blocks * size
        engine.reserve(min(self.config.context or blocks - 1, blocks - 1) + 1)
        plan = self._plan(engine)
        tokens = torch.zeros(engine.batch, count, channels, device=device)
        index = torch.arange(count, device=device)
        fixed = torch.zeros_like(index).scatter_(0, engine.model.backbone.raster(index), plan.fixed.to(device))
        known, keep = self._known(engine, count)
        x = torch.zeros(engine.batch, size, channels, device=device)
        return State(
            tokens=tokens,
            rounds=fixed.expand(engine.batch, -1).clone(),
            step=torch.zeros(1, dtype=torch.int64, device=device),
            x=x,
            before=x.clone(),
            kept=x.clone(),
            table=plan.table.to(device),
            block=plan.block.to(device),
            first=plan.first.to(device),
            known=known,
            keep=keep,
            denoise=engine.denoise,
            raster=engine.model.backbone.raster,
            foreign=None if self.config.scheduler is None else _Foreign(self.config, engine, plan),
        )

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        row = state.table.index_select(0, state.step)
        time, alpha, sigma, p, q, a, b, c, k, keep = row.unbind(1)  # each [1]
        size, channels = state.x.shape[1:]
        slots = state.block.index_select(0, state.step).unsqueeze(1) * size
        slots = slots + torch.arange(size, device=slots.device)  # [1, W]
        at = state.raster(slots)  # [1, W]
        start = noise.normal(at, channels, Stream.DENOISE)  # [B, W, C]
        x = torch.where(state.first.index_select(0, state.step), start, state.x)
        where = at.unsqueeze(-1).expand_as(x)
        if state.known is not None and state.keep is not None:
            kept = state.keep.index_select(1, at[0])
            x = torch.where(kept, alpha * state.known.gather(1, where) + sigma * start, x)
        out = state.denoise(x, slots, time)
        if state.foreign is not None:
            new = now = state.foreign.step(x, out)
        else:
            now = p * x + q * out
            new = a * x + b * now + c * state.before + k * state.kept
        state.kept.copy_(torch.where(keep > 0, x, state.kept))
        state.before.copy_(now)
        state.x.copy_(new)
        if state.known is not None and state.keep is not None:
            new = torch.where(kept, state.known.gather(1, where), new)
        state.tokens.scatter_(1, where, new)
        state.step += 1

    def iterations(self, engine: Engine) -> int:
        return len(self._plan(engine).block)

    def notes(self, state: State) -> dict[str, Any]:
        return {"blocks": int(state.block[-1]) + 1}

    def _blocks(self, engine: Engine) -> int:
        """Number of blocks to draw."""
        layout, each = engine.model.backbone.layout, engine.model.backbone.config.block[0]
        trained, frames = layout.grid[0], self.config.frames or layout.grid[0]
        if frames % each or (frames != trained and trained == 1):
            remedy = "leave it out: this model draws single images" if trained == 1 else f"a multiple of {each} fits"
            raise UserError(f"sampler.frames {frames} are not whole blocks of this model; {remedy}")
        return frames * layout.tokens // (trained * layout.block)

    def _plan(self, engine: Engine) -> Plan:
        """The iterations of a decode, one after another."""
        walk = [*rows(engine.model.head.path, self.config.solver, self.config.steps, self.config.shift), COMMIT]
        if self.config.scheduler is not None:
            walk = [Row(t, *COMMIT[1:]) for t in _times(self.config, engine)] + [COMMIT]
        blocks, given = self._blocks(engine), self._given(engine)
        made: list[tuple[Row, int, bool]] = []
        fixed: list[int] = []
        for block in range(blocks):
            steps = [COMMIT] if block < given else walk
            steps = steps[:-1] if block == blocks - 1 and len(steps) > 1 else steps  # nothing reads the last block
            made += [(row, block, j == 0) for j, row in enumerate(steps)]
            ends = len(made) - (steps[-1] is COMMIT and len(steps) > 1)
            fixed += [ends] * engine.model.backbone.layout.block
        return Plan(
            torch.tensor([row for row, _, _ in made], dtype=torch.float32),
            torch.tensor([block for _, block, _ in made]),
            torch.tensor([[first] for _, _, first in made]),
            torch.tensor(fixed),
        )

    def _given(self, engine: Engine) -> int:
        """Leading blocks of which every token is known, in all images."""
        if engine.known is None:
            return 0
        layout = engine.model.backbone.layout
        count = self._blocks(engine) * layout.block
        mask = fitted(engine.known[1].all(0), count)  # [N] raster order
        slots = torch.arange(count, device=mask.device)
        whole = mask[engine.model.backbone.raster(slots)].unflatten(0, (-1, layout.block)).all(1)
        return int(whole.long().cumprod(0).sum())  # read by the host, once before a decode

    def _known(self, engine: Engine, count: int) -> tuple[Tensor | None, Tensor | None]:
        """Known tokens [B, N, C] and their mask [B, N, 1], of all tokens to be drawn."""
        if engine.known is None:
            return None, None
        tokens, mask = engine.known
        return fitted(tokens.float().mT, count).mT.clone(), fitted(mask, count).unsqueeze(-1).clone()

    def _check(self, engine: Engine) -> None:
        engine.check_sampler("blockwise")
        if self.config.scheduler is not None and type(engine) is not Engine:
            raise UserError(f"sampler.scheduler {self.config.scheduler} runs eagerly alone; add --engine.kind eager")
        if self.config.scheduler is not None and self.config.solver != "auto":
            raise UserError(
                f"sampler.scheduler {self.config.scheduler} steps by its own rule, not by sampler.solver "
                f"{self.config.solver}; leave one of them out"
            )


def fitted(x: Tensor, count: int) -> Tensor:
    """[..., N] cut, or filled with zeros, to `count`."""
    return torch.nn.functional.pad(x, (0, max(0, count - x.shape[-1])))[..., :count]


def _scheduler(config: Config, engine: Engine) -> Any:
    """The scheduler of `diffusers` that the config names, for this model."""
    import diffusers

    path = engine.model.head.path
    flow = (config.scheduler or "").startswith("FlowMatch")
    if flow != (path.predicts == "velocity"):
        fitting = "FlowMatchEulerDiscreteScheduler" if not flow else "one of the others"
        raise UserError(f"sampler.scheduler {config.scheduler} is not for a model of {path.predicts}; use {fitting}")
    extra = {"shift": config.shift} if flow else {"timestep_spacing": "linspace", "final_sigmas_type": "zero"}
    made = getattr(diffusers, str(config.scheduler))(**path.settings(), **extra)
    made.set_timesteps(config.steps)
    return made


def _times(config: Config, engine: Engine) -> list[float]:
    return _scheduler(config, engine).timesteps.tolist()


class _Foreign:
    """Walks by a scheduler of `diffusers`, which the host holds: anew for every block, nothing at a commit."""

    def __init__(self, config: Config, engine: Engine, plan: Plan) -> None:
        self.make = lambda: _scheduler(config, engine)
        self.plan = iter(zip(plan.table[:, 0].tolist(), plan.first[:, 0].tolist(), strict=True))

    def step(self, x: Tensor, out: Tensor) -> Tensor:
        time, first = next(self.plan)
        if time < 0:
            return x
        if first:
            self.scheduler = self.make()
            self.times = iter(self.scheduler.timesteps)
        return self.scheduler.step(out, next(self.times), x).prev_sample
