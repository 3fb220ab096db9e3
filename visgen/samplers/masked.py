"""Masked decoding: sets of tokens in an order of each image's own, each given all before it (MAR, arXiv 2406.11838).

Iteration k of K evaluates the backbone once and draws as many tokens as leave floor(N cos(pi (k + 1) / 2K)) to be drawn
(MaskGIT, Chang et al. 2022, arXiv 2202.04200, section 3.2), at least one. The head's whole denoising loop is part of
it: its tables and embeddings of time lie on the device, shapes are those of the largest set, and nothing is read back,
so one graph serves all iterations. With one token an iteration it is autoregression in random order; larger sets draw
their tokens independently of each other, which is approximate. Known tokens are seen from the first iteration on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor

from visgen.checks import Positive, Range, Scale
from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise, Stream
from visgen.nn.ancestral import Walk, Walker, log_variance, walk
from visgen.samplers import Forward, Sampler


@dataclass(frozen=True)
class Config:
    """Masked decoding; guidance grows with the share of tokens that are drawn (`guidance.schedule linear`).

    Attributes:
        iterations: evaluations K of the backbone; at most one for each token.
        steps: of the head's denoising, in every iteration.
        last_steps: their number once all tokens are known; between, it falls evenly with the known share (DiSA,
            arXiv 2505.20297). None: `steps` throughout. Eager engine only.
        solver: see `nn/ancestral.py` and `nn/diffusion.py`; auto is ancestral for a model of noise, Euler for one of
            velocity.
        shift: of the straight path; above 1, more steps in the noise.
        last: of a model of noise, the time at which denoising begins; None: 999 for ancestral, 989 for the others,
            which would keep the errors of a step at 999.
        temperature: factor of the noise that ancestral steps add.
    """

    iterations: Positive = 64
    steps: Positive = 100
    last_steps: Positive | None = None
    solver: Walker = "auto"
    shift: Scale = 1.0
    last: Annotated[int, Range(1, 999)] | None = None
    temperature: Scale = 1.0


@dataclass
class State:
    tokens: Tensor  # [B, N, C] raster order; known ones are there from the start
    rounds: Tensor  # [B, N]
    order: Tensor  # [B, N] the place that is drawn as the n-th
    step: Tensor  # [1] iteration
    done: Tensor  # [K] tokens drawn before each iteration
    count: Tensor  # [K] tokens that it draws
    guided: Tensor  # [K] tokens by which its guidance goes
    table: Tensor  # [all steps, 10] the walks of all iterations of different numbers of steps, one behind another
    bounds: Tensor  # [all steps, 2] of the log variance
    about: Tensor  # [all steps, width] the head's embeddings of time
    known: Tensor | None  # [B, N, C]
    keep: Tensor | None  # [B, N] bool
    width: int  # of the largest set
    walks: list[tuple[int, tuple[bool, ...]]]  # of every iteration: first row of its table, whether steps draw
    turn: int  # iteration, as far as the host's walk is concerned
    hidden: Callable[[Tensor, Tensor, Tensor], Tensor]
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
        each = {w.steps: w for w in walks}
        first = dict(zip(each, torch.tensor([0, *each]).cumsum(0).tolist(), strict=False))
        table = torch.cat([w.rows for w in each.values()]).to(device)
        index = torch.arange(n, device=device).unsqueeze(0)
        tokens = torch.zeros(b, n, engine.model.config.channels, device=device)
        known, keep = None, None
        if engine.known is not None:
            known, keep = engine.known[0].float().clone(), engine.known[1].clone()
            tokens = torch.where(keep.unsqueeze(-1), known, tokens)
        return State(
            tokens=tokens,
            rounds=torch.zeros(b, n, dtype=torch.int64, device=device),
            order=noise.bits(index, 1, Stream.ORDER).squeeze(-1).argsort(dim=1, stable=True),
            step=torch.zeros(1, dtype=torch.int64, device=device),
            done=torch.tensor(done, device=device),
            count=torch.tensor(counts, device=device),
            guided=torch.tensor(guided, device=device),
            table=table,
            bounds=torch.cat([torch.stack([w.low, w.high], 1) for w in each.values()]).to(device),
            about=head.about(table[:, 0]),
            known=known,
            keep=keep,
            width=max(counts),
            walks=[(first[w.steps], w.noisy) for w in walks],
            turn=0,
            hidden=lambda values, at, level: _hidden(engine, values, at, level),
            law=lambda h, at: head.dist(h, engine.guidance.weights(at, n + 1)),
        )

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        n, width = state.order.shape[1], state.width
        done, count, guided = (x.index_select(0, state.step) for x in (state.done, state.count, state.guided))  # [1]
        rank = torch.arange(n, device=done.device).unsqueeze(0)
        shown = rank < done  # [1, N], in the order of drawing
        if state.keep is not None:
            shown = shown | state.keep.gather(1, state.order)
        h = state.hidden(_taken(state.tokens, state.order), state.order, (~shown).float() - 1)  # [K, B, N, D]
        at = state.order.index_select(1, ((done + rank[0, :width]) % n))  # [B, W] wraps round where the set is smaller
        h = h.gather(2, at[None, :, :, None].expand(len(h), -1, -1, h.shape[-1]))
        drawn = self._denoised(state, state.law(h, guided.expand_as(at)), at, noise)
        if state.known is not None and state.keep is not None:
            drawn = torch.where(state.keep.gather(1, at).unsqueeze(-1), _taken(state.known, at), drawn)
        drawn = torch.where((rank[0, :width] < count).unsqueeze(-1), drawn, _taken(state.tokens, at))
        state.tokens.scatter_(1, at.unsqueeze(-1).expand_as(drawn), drawn)
        fixed = torch.where(rank[:, :width] < count, state.step + 1, state.rounds.gather(1, at))
        state.rounds.scatter_(1, at, fixed)
        state.step += 1
        state.turn += 1

    def _denoised(self, state: State, law: Any, at: Tensor, noise: Noise) -> Tensor:
        """Tokens [B, W, C] of the places at [B, W]; the noise of a step is keyed by place and step alone."""
        start, noisy = state.walks[state.turn % len(state.walks)]
        draws = _noise(noise, at, state.tokens.shape[-1], 1 + sum(noisy))
        x = draws[0]
        before, kept = torch.zeros_like(x), torch.zeros_like(x)
        for j, draw in enumerate(noisy):
            _, _, _, p, q, a, b, c, k, keep = state.table[start + j].unbind()
            out, share = law.predict(x, state.about[start + j])
            now = p * x + q * out
            new = a * x + b * now + c * before + k * kept
            if draw:
                low, high = state.bounds[start + j].unbind()
                spread = (log_variance(share, low, high, law.head.config.variance) / 2).exp()
                new = new + self.config.temperature * spread * draws[1 + j]
            before, kept, x = now, torch.where(keep > 0, x, kept), new
        return x

    def iterations(self, engine: Engine) -> int:
        return min(self.config.iterations, engine.tokens)

    def notes(self, state: State) -> dict[str, Any]:
        return {"head_steps": sum(len(noisy) for _, noisy in state.walks)}

    def _walks(self, engine: Engine) -> list[Walk]:
        """The head's walk in every iteration.

        Raises:
            UserError: a model without a diffusion head, or settings that it or the engine cannot follow.
        """
        config, kind = self.config, engine.model.backbone.sampler
        if kind != "masked":
            raise UserError(f"sampler masked is not for this model, whose backbone masks nothing; use {kind}")
        if config.last_steps not in (None, config.steps) and type(engine) is not Engine:
            raise UserError(f"sampler.last_steps {config.last_steps} runs eagerly alone; add --engine.kind eager")
        made: dict[int, Walk] = {}
        walks = []
        counts = reveals(engine.tokens, config.iterations)
        for k in range(len(counts)):
            known = sum(counts[:k]) / engine.tokens
            final = config.steps if config.last_steps is None else config.last_steps
            steps = round(config.steps + (final - config.steps) * known)
            if steps not in made:
                made[steps] = walk(engine.model.head.path, config.solver, steps, config.shift, config.last)
            walks.append(made[steps])
        if config.temperature != 1 and not any(walks[0].noisy):
            raise UserError(
                f"sampler.temperature {config.temperature} scales the noise of ancestral steps, of which these are "
                "none; leave it out"
            )
        return walks


def reveals(tokens: int, iterations: int) -> list[int]:
    """How many of `tokens` each iteration draws."""
    iterations, left, made = min(iterations, tokens), tokens, []
    for k in range(iterations):
        after = math.floor(tokens * math.cos(math.pi / 2 * (k + 1) / iterations))
        after = 0 if k == iterations - 1 else max(1, min(left - 1, after))
        made.append(left - after)
        left = after
    return made


def _hidden(engine: Engine, values: Tensor, at: Tensor, level: Tensor) -> Tensor:
    """h [K, B, N, D] of all places under K branches, of values [B, N, C] at places [B, N] and their level."""
    k, model = engine.guidance.branches, engine.model
    rows = (x.expand(len(values), *x.shape[1:]).repeat(k, *[1] * (x.ndim - 1)) for x in (values, at, level))
    tokens, pos, level = rows
    return model.backbone(tokens, pos, cond=engine.condition, level=level).unflatten(0, (k, -1))


def _taken(x: Tensor, places: Tensor) -> Tensor:
    """[B, N, C] at places [B, W] -> [B, W, C]."""
    return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def _noise(noise: Noise, at: Tensor, channels: int, count: int) -> Tensor:
    """`count` draws [count, B, W, C] for places [B, W], all at once."""
    index = at.unsqueeze(1).expand(-1, count, -1)
    which = torch.arange(count, device=at.device).view(1, -1, 1).expand_as(index)
    made = noise.normal(index.flatten(1), channels, Stream.DENOISE, which.flatten(1))
    return made.unflatten(1, (count, -1)).transpose(0, 1)
