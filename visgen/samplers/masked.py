"""Masked decoding: sets of tokens in an order of each image's own, each given all before it (MAR, arXiv 2406.11838).

Iteration k of K evaluates the backbone once and draws as many tokens as leave floor(N cos(pi (k + 1) / 2K)) to be drawn
(MaskGIT, Chang et al. 2022, arXiv 2202.04200, section 3.2), at least one. The head's whole denoising loop is part of
it: its tables and embeddings of time lie on the device, and nothing is read back. The encoder reads known tokens alone,
the head walks the drawn ones alone, both in one of a few sizes, so one graph serves all iterations of equal sizes. With
one token an iteration it is autoregression in random order; larger sets draw their tokens independently of each other,
which is approximate. Known tokens are seen from the first iteration on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from visgen.checks import Positive, Range, Shift, Steps, Temperature
from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise
from visgen.nn.ancestral import Walk, Walker
from visgen.samplers import Forward, Sampler
from visgen.samplers._walk import denoised, tables, taken, walks_of


@dataclass(frozen=True)
class Config:
    """Masked decoding; guidance grows with the share of tokens that are drawn (`guidance.schedule linear`).

    Attributes:
        iterations: evaluations K of the backbone; at most one for each token.
        steps: of the head's denoising, in every iteration.
        last_steps: their number once all tokens are known; between, it falls evenly with the known share (DiSA,
            arXiv 2505.20297). None: `steps` throughout. A captured engine makes a graph for each number.
        solver: see `nn/ancestral.py` and `nn/diffusion.py`; auto is ancestral for a model of noise, Euler for one of
            velocity.
        shift: of the straight path; above 1, more steps in the noise.
        last: of a model of noise, the time at which denoising begins; None: 989. As published it is 999,
            whose step multiplies the errors of the head by 316.
        temperature: factor of the noise that ancestral steps add.
        buckets: sizes of what the encoder reads, evenly up to all tokens; known tokens are padded to the next of them.
            1: all tokens always, hidden ones masked out. Sets are padded to as many sizes up to the largest. A captured
            engine makes a graph for each pair of sizes that comes up. None: no padding, and no mask where an image has
            no tokens given; a graph for every iteration.
    """

    iterations: Positive = 64
    steps: Steps = 100
    last_steps: Steps | None = None
    solver: Walker = "auto"
    shift: Shift = 1.0
    last: Annotated[int, Range(1, 999)] | None = None
    temperature: Temperature = 1.0
    buckets: Annotated[int, Range(1, 64)] | None = 8


@dataclass
class State:
    tokens: Tensor  # [B, N, C] raster order; known ones are there from the start
    rounds: Tensor  # [B, N]
    order: Tensor  # [B, N] the place that is drawn as the n-th
    seen: Tensor  # [B, N] places, those that are known sooner first
    rank: Tensor  # [B, N] the n at which each of them is drawn
    step: Tensor  # [1] iteration
    done: Tensor  # [K] tokens drawn before each iteration
    count: Tensor  # [K] tokens that it draws
    guided: Tensor  # [K] tokens by which its guidance goes
    table: Tensor  # [all steps, 10] the walks of all iterations of different numbers of steps, one behind another
    bounds: Tensor  # [all steps, 2] of the log variance
    about: Tensor  # [all steps, width] the head's embeddings of time
    known: Tensor | None  # [B, N, C]
    keep: Tensor | None  # [B, N] bool
    sizes: list[int]  # places that the encoder reads in every iteration
    widths: list[int]  # places that the head walks
    walks: list[tuple[int, tuple[bool, ...]]]  # of every iteration: first row of its table, whether steps draw
    turn: int  # iteration, as far as the host's walk is concerned
    hidden: Callable[[Tensor, Tensor, Tensor | None, Tensor], Tensor]
    law: Callable[[Tensor, Tensor], Any]


class Masked(Sampler):
    """Draws growing sets of tokens, each by the head's own denoising."""

    continuous = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def init(self, engine: Engine, noise: Noise) -> State:
        walks = self._walks(engine)
        head, device, (b, n) = engine.model.head, engine.device, (engine.batch, engine.tokens)
        counts = reveals(n, self.config.iterations)
        done = [sum(counts[:k]) for k in range(len(counts))]
        guided = [min(d + c, n - 1) for d, c in zip(done, counts, strict=True)]  # the last one too, as published
        table, bounds, about, first = tables(walks, head, device)
        index = torch.arange(n, device=device).unsqueeze(0)
        order = noise.order(n)
        seen, rank, most = order, index.expand(b, -1), 0
        tokens = torch.zeros(b, n, engine.model.config.channels, device=device)
        known, keep = None, None
        if engine.known is not None:
            known, keep = engine.known[0].float().clone(), engine.known[1].clone()
            tokens = torch.where(keep.unsqueeze(-1), known, tokens)
            rank = (~keep.gather(1, order)).int().argsort(dim=1, stable=True)
            seen, most = order.gather(1, rank), int(keep.sum(1).max())  # read once, before any iteration
        return State(
            tokens=tokens,
            rounds=torch.zeros(b, n, dtype=torch.int64, device=device),
            order=order,
            seen=seen.clone(),
            rank=rank.contiguous(),
            step=torch.zeros(1, dtype=torch.int64, device=device),
            done=torch.tensor(done, device=device),
            count=torch.tensor(counts, device=device),
            guided=torch.tensor(guided, device=device),
            table=table,
            bounds=bounds,
            about=about,
            known=known,
            keep=keep,
            sizes=[bucket(min(d + most, n), n, self.config.buckets) for d in done],
            widths=[bucket(count, max(counts), self.config.buckets) for count in counts],
            walks=[(start, w.noisy) for start, w in zip(first, walks, strict=True)],
            turn=0,
            hidden=lambda values, at, level, asked: _hidden(engine, values, at, level, asked),
            law=lambda h, at: engine.guided(h, engine.guidance.weights(at, n + 1)),
        )

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        n, width = state.order.shape[1], state.widths[state.turn % len(state.widths)]
        done, count, guided = (x.index_select(0, state.step) for x in (state.done, state.count, state.guided))  # [1]
        rank = torch.arange(n, device=done.device).unsqueeze(0)
        size = state.sizes[state.turn % len(state.sizes)]
        seen = state.seen[:, :size]
        level = None  # without padding and given tokens nothing is hidden
        if self.config.buckets is not None or state.keep is not None:
            shown = state.rank[:, :size] < done  # [B, E]
            if state.keep is not None:
                shown = shown | state.keep.gather(1, seen)
            level = (~shown).float() - 1
        at = state.order.index_select(1, ((done + rank[0, :width]) % n))  # [B, W] wraps round where the set is smaller
        h = state.hidden(taken(state.tokens, seen), seen, level, at)  # [K, B, W, D]
        start, noisy = state.walks[state.turn % len(state.walks)]
        law, channels = state.law(h, guided.expand_as(at)), state.tokens.shape[-1]
        drawn = denoised(law, at, noise, channels, state, start, noisy, self.config)
        if state.known is not None and state.keep is not None:
            drawn = torch.where(state.keep.gather(1, at).unsqueeze(-1), taken(state.known, at), drawn)
        drawn = torch.where((rank[0, :width] < count).unsqueeze(-1), drawn, taken(state.tokens, at))
        state.tokens.scatter_(1, at.unsqueeze(-1).expand_as(drawn), drawn)
        fixed = torch.where(rank[:, :width] < count, state.step + 1, state.rounds.gather(1, at))
        state.rounds.scatter_(1, at, fixed)
        state.step += 1
        state.turn += 1

    def iterations(self, engine: Engine) -> int:
        return min(self.config.iterations, engine.tokens)

    def stages(self, state: State) -> list[Hashable]:
        starts = (start for start, _ in state.walks)
        return list(zip(state.sizes, state.widths, starts, strict=True))

    def notes(self, state: State) -> dict[str, Any]:
        return {"head_steps": sum(len(noisy) for _, noisy in state.walks)}

    def _walks(self, engine: Engine) -> list[Walk]:
        """The head's walk in every iteration.

        Raises:
            UserError: a model without a diffusion head, or settings that it cannot follow.
        """
        config, total = self.config, engine.tokens
        engine.check_sampler("masked")
        final = config.steps if config.last_steps is None else config.last_steps
        if final > config.steps:
            raise UserError(
                f"sampler.last_steps {final} is more than sampler.steps {config.steps}, from which the number falls; "
                "lower it"
            )
        counts = reveals(total, config.iterations)
        known = [sum(counts[:k]) / total for k in range(len(counts))]
        return walks_of(
            config, engine.model.head.path, [round(config.steps + (final - config.steps) * u) for u in known]
        )


def reveals(tokens: int, iterations: int) -> list[int]:
    """How many of `tokens` each iteration draws."""
    iterations, left, made = min(iterations, tokens), tokens, []
    for k in range(iterations):
        after = math.floor(tokens * math.cos(math.pi / 2 * (k + 1) / iterations))
        after = 0 if k == iterations - 1 else max(1, min(left - 1, after))
        made.append(left - after)
        left = after
    return made


def bucket(count: int, most: int, buckets: int | None) -> int:
    """The least of the `buckets` even shares of `most` that `count` fits in; without them `count`."""
    if buckets is None:
        return count
    return next(size for size in (-(-most * i // buckets) for i in range(1, buckets + 1)) if size >= count)


def _hidden(engine: Engine, values: Tensor, at: Tensor, level: Tensor | None, asked: Tensor) -> Tensor:
    """h [K, B, W, D] of the places `asked` [B, W] under K branches, of values [B, E, C] at places [B, E] and their
    level; None: all are known."""
    k, b = engine.guidance.branches, len(values)

    def branched(x: Tensor) -> Tensor:
        return x.expand(b, *x.shape[1:]).repeat(k, *[1] * (x.ndim - 1))

    told = None if level is None else branched(level)
    h = engine.whole_pass(branched(values), branched(at), cond=engine.condition, level=told, asked=branched(asked))
    return h.unflatten(0, (k, b))
