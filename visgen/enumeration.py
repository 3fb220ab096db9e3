"""Exact probabilities of what a sampler draws: all branches of a decode on a table, in float64.

The laws draw from a `Branching` noise: at every draw the iteration starts anew with a row for each outcome, weighted by
its probability; equal states are merged in between. Drafts that share a continuous noise over iterations cannot be
enumerated; `exactness.py` simulates them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visgen.conditions import Prefix
from visgen.decode.noise import mix
from visgen.exactness import TableEngine, World, place, precision
from visgen.nn.categorical import Categorical
from visgen.samplers import Sampler


class Branch(Exception):
    """A draw whose outcomes are not scripted yet: probs [R, W, K], looked at in `where` [R, W] alone."""

    def __init__(self, probs: Tensor, where: Tensor | None) -> None:
        super().__init__("draws happen in Sampler.iterate alone")
        self.probs = probs
        self.where = torch.ones(probs.shape[:2], dtype=torch.bool) if where is None else where

    def outcomes(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every joint outcome of positive probability: its row [M], ids [M, W] and probability [M]."""
        parents = torch.arange(len(self.probs))
        ids, weight = torch.zeros(len(parents), 0, dtype=torch.int64), torch.ones(len(parents), dtype=torch.float64)
        unseen = torch.eye(1, self.probs.shape[-1], dtype=torch.float64)
        for w in range(self.probs.shape[1]):
            probs = torch.where(
                self.where[parents, w, None], self.probs[parents, w], unseen
            )  # unseen: one outcome, id 0
            parent, token = probs.nonzero().unbind(1)
            parents, weight = parents[parent], weight[parent] * probs[parent, token]
            ids = torch.cat([ids[parent], token.unsqueeze(1)], 1)
        return parents, ids, weight


class Branching:
    """A noise of scripted outcomes [R, W] for the draws of an iteration, in their order; see `BranchingLaw`."""

    def __init__(self) -> None:
        self.script: list[Tensor] = []
        self.used = 0

    def choose(self, probs: Tensor, where: Tensor | None) -> Tensor:
        if self.used == len(self.script):
            raise Branch(probs, where)
        self.used += 1
        return self.script[self.used - 1]


class BranchingLaw(Categorical):
    """The shipped law, of which the two places where chance comes in take every outcome."""

    def draw(self, noise: Any, index: Tensor, stream: int, iteration: Any = 0, where: Tensor | None = None) -> Tensor:
        return noise.choose(self.probs(), where)

    def accept(
        self,
        draft: Tensor,
        drawn_from: Categorical,
        noise: Any,
        index: Tensor,
        stream: int,
        iteration: Any = 0,
        where: Tensor | None = None,
    ) -> Tensor:
        kept = self.acceptance(draft, drawn_from)
        return noise.choose(torch.stack([1 - kept, kept], -1), where) == 1


def enumerate_law(sampler: Sampler, world: World, condition: int = 0) -> tuple[Tensor, float]:
    """Exact law [V^N] of a decode's tokens, and its expected number of evaluations, on a table of `BranchingLaw`s."""
    engine = world.engine
    assert isinstance(engine, TableEngine)
    law, nfe, noise = torch.zeros(engine.vocab**engine.tokens, dtype=torch.float64), 0.0, Branching()
    world.begin(torch.tensor([condition]))
    engines = [e for e in (engine, engine.drafter) if e is not None]
    for each in engines:
        each.begin(engine.given, engine.known)
    with precision(torch.float64):
        state, weight = sampler.init(engine, noise), torch.ones(1)  # type: ignore[arg-type]
        for iteration in range(1, sampler.iterations(engine) + 1):
            if not len(weight):
                break
            state, weight = _iterate(sampler, state, engines, weight, noise)
            over = (state.rounds > 0).all(1)
            law.index_add_(0, place(state.tokens[over], engine.vocab), weight[over])
            nfe += iteration * float(weight[over].sum())
            state, weight = _merged(state, engines, weight, ~over)
    assert len(weight) == 0, "every row is complete"
    return law, nfe


def _iterate(
    sampler: Sampler, state: Any, engines: Sequence[TableEngine], weight: Tensor, noise: Branching
) -> tuple[Any, Tensor]:
    """One iteration of every row and outcome."""
    noise.script = []
    reads = [e.read for e in engines]
    while True:
        trial, noise.used = _rows(state, torch.arange(len(weight))), 0
        for each, read in zip(engines, reads, strict=True):
            _resume(each, read.clone())
        try:
            sampler.iterate(trial, engines[0].forward, noise)  # type: ignore[arg-type]
        except Branch as branch:
            parents, ids, chance = branch.outcomes()
            state, weight = _rows(state, parents), weight[parents] * chance
            reads = [read[parents] for read in reads]
            noise.script = [s[parents] for s in noise.script] + [ids]
        else:
            return trial, weight


def _resume(engine: TableEngine, read: Tensor) -> None:
    """Goes on with rows of this cache [R, N], all of the one condition that there is."""
    engine.read = read
    engine._cond = Prefix(engine.condition.vectors[:1].expand(len(read), -1, -1))
    engine.known = None if engine.known is None else _alike(engine.known, len(read))


def _alike(known: tuple[Tensor, Tensor], count: int) -> tuple[Tensor, Tensor]:
    """Known tokens of `count` rows that know the same."""
    return known[0][:1].expand(count, -1), known[1][:1].expand(count, -1)


def _rows(state: Any, chosen: Tensor) -> Any:
    """A copy of a state with these of its rows; tensors of one dimension have none."""
    known = getattr(state, "known", None)
    return dataclasses.replace(
        state,
        **{k: v[chosen] for k, v in vars(state).items() if isinstance(v, Tensor) and v.ndim > 1},
        **({} if known is None else {"known": _alike(known, len(chosen))}),
    )


def _merged(state: Any, engines: Sequence[TableEngine], weight: Tensor, keep: Tensor) -> tuple[Any, Tensor]:
    """The rows to keep, equal ones as one of their common weight; equal: by 64 bits of all that a row holds."""
    parts = [v for v in vars(state).values() if isinstance(v, Tensor) and v.ndim > 1]
    parts += [e.read for e in engines]
    key = torch.zeros(len(weight), dtype=torch.int64)
    for column in torch.cat([p[keep].double().flatten(1) for p in parts], 1).view(torch.int64).unbind(1):
        key[: len(column)] = mix(key[: len(column)] ^ column)
    _, group = key[: int(keep.sum())].unique(return_inverse=True)
    count = int(group.max()) + 1 if len(group) else 0
    first = torch.full((count,), len(group)).scatter_reduce(0, group, torch.arange(len(group)), "amin")
    kept = keep.nonzero().squeeze(1)[first]
    for each in engines:
        _resume(each, each.read[kept])
    return _rows(state, kept), torch.zeros(count).index_add(0, group, weight[keep])
