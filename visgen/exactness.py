"""Proof that a sampler draws from the law of plain autoregression: by enumeration and by simulation.

A `TableEngine` is an engine whose model is one table, a law for every prefix, so that its joint law is known. Shipped
samplers run on it unchanged.

- `enumerate_law`: all branches of a decode, in float64. The laws draw from a `Branching` noise: at every draw the
  iteration starts anew with a row for each outcome, weighted by its probability; equal states are merged in between.
- `simulate`: many rows with the shipped noise in float32; `Fit` is a G-test of their joint counts, and their TV beside
  the TV that as many draws of the true law show.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visgen.decode.engine import Engine
from visgen.decode.noise import Noise, mix
from visgen.nn.categorical import Categorical
from visgen.samplers import Sampler

CHUNK = 1 << 17  # rows of a simulation that are decoded at once


class TableEngine(Engine):
    """An engine whose model is a table of the next token's logits after each prefix, in the default dtype.

    Args:
        logits: [nodes, V] float64, by length of the prefix, then lexically: the root, x_0, x_0 x_1, ...
        grid: (T, H, W) of its tokens.
        drafter: the draft model's engine, for a sampler that has one.
        law: class of the laws.
    """

    def __init__(
        self, logits: Tensor, grid: tuple[int, int, int], drafter: TableEngine | None = None, law: Any = Categorical
    ) -> None:
        self.logits, self.grid, self.drafter, self.law = logits, grid, drafter, law
        self.tokens, self.vocab = math.prod(grid), logits.shape[-1]
        self.device, self.known, self.unsound = torch.device("cpu"), None, torch.zeros(1, dtype=torch.int32)
        self.begin({"rows": 1})

    def begin(self, batch: dict[str, Any], known: tuple[Tensor, Tensor] | None = None) -> None:
        """Starts a batch of `batch["rows"]` images; knows no known tokens."""
        self.given = batch
        self.read = torch.zeros(batch["rows"], self.tokens, dtype=torch.int64)  # the cache: the token before each

    @property
    def batch(self) -> int:
        return len(self.read)

    def forward(self, tokens: Tensor, index: Tensor) -> Any:
        """Like a transformer with a cache, it sees at every earlier position what was last fed there."""
        self.read.scatter_(1, index, tokens.gather(1, (index - 1).clamp(min=0)))
        nodes = [torch.zeros_like(self.read[:, 0])]
        for k in range(1, self.tokens):
            nodes.append(nodes[-1] * self.vocab + self.read[:, k] + 1)
        return self.law(self.logits.to(torch.get_default_dtype())[torch.stack(nodes, 1).gather(1, index)])

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The draft model: nothing else is kept here."""
        return self.drafter


def table(vocab: int, tokens: int, seed: int, sharpness: float) -> Tensor:
    """Random logits for `TableEngine`."""
    rng = torch.Generator().manual_seed(seed)
    return sharpness * torch.randn(sum(vocab**k for k in range(tokens)), vocab, generator=rng, dtype=torch.float64)


def lengths(vocab: int, tokens: int) -> Tensor:
    """Length [nodes] of each prefix of a table: the position of the token that it speaks of."""
    return torch.repeat_interleave(torch.arange(tokens), vocab ** torch.arange(tokens))


def sequences(vocab: int, tokens: int) -> Tensor:
    """All sequences [V^N, N] of tokens, in lexical order."""
    return torch.cartesian_prod(*[torch.arange(vocab)] * tokens).view(-1, tokens)


def place(tokens: Tensor, vocab: int) -> Tensor:
    """Where each row of tokens [B, N] stands among `sequences`."""
    return (tokens * vocab ** torch.arange(tokens.shape[1]).flip(0)).sum(1)


@torch.inference_mode()
def joint(engine: Engine, batch: Callable[[int], dict[str, Any]]) -> Tensor:
    """Probability [V^N] of every sequence under plain autoregression, by one evaluation of all of them.

    Args:
        batch: what `engine.begin` reads for so many images, all of one condition.
    """
    every = sequences(engine.vocab, engine.tokens)
    engine.begin(batch(len(every)))
    with precision(torch.float64):
        law = engine.forward(every, torch.arange(engine.tokens).expand(len(every), -1))
        return law.like(law.logits.double()).log_prob(every).sum(1).exp()


@torch.inference_mode()
def tabulated(engine: Engine, batch: Callable[[int], dict[str, Any]]) -> Tensor:
    """The laws of a real engine as logits [nodes, V] of a `TableEngine`, by one evaluation; `batch` as for `joint`."""
    every = sequences(engine.vocab, engine.tokens)
    engine.begin(batch(len(every)))
    index = torch.arange(engine.tokens)
    logits = engine.forward(every, index.expand(len(every), -1)).logits.double()
    return torch.cat([logits[:: engine.vocab ** (engine.tokens - k), k] for k in index.tolist()])


def rows(count: int) -> dict[str, Any]:
    """A batch of a `TableEngine`."""
    return {"rows": count}


# -------------------------------------------------------------------------------------------------- enumeration


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


def enumerate_law(sampler: Sampler, engine: TableEngine) -> tuple[Tensor, float]:
    """Exact law [V^N] of a decode's tokens, and its expected number of evaluations, on an engine of `BranchingLaw`s."""
    law, nfe, noise = torch.zeros(engine.vocab**engine.tokens, dtype=torch.float64), 0.0, Branching()
    engines = [e for e in (engine, engine.drafter) if e is not None]
    for each in engines:
        each.begin({"rows": 1})
    with precision(torch.float64):
        state, weight = sampler.init(engine, noise), torch.ones(1)  # type: ignore[arg-type]
        for iteration in range(1, sampler.iterations(engine) + 1):
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
            each.read = read.clone()
        try:
            sampler.iterate(trial, engines[0].forward, noise)  # type: ignore[arg-type]
        except Branch as branch:
            parents, ids, chance = branch.outcomes()
            state, weight = _rows(state, parents), weight[parents] * chance
            reads = [read[parents] for read in reads]
            noise.script = [s[parents] for s in noise.script] + [ids]
        else:
            return trial, weight


def _rows(state: Any, chosen: Tensor) -> Any:
    """A copy of a state with these of its rows; tensors of one dimension have none."""
    return dataclasses.replace(
        state,
        **{k: v[chosen] for k, v in vars(state).items() if isinstance(v, Tensor) and v.ndim > 1},
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
        each.read = each.read[kept]
    return _rows(state, kept), torch.zeros(count).index_add(0, group, weight[keep])


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Tables and laws in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# --------------------------------------------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Fit:
    """Counts of sequences against their law.

    Attributes:
        tv: total variation between frequencies and law.
        floor: its expectation for draws of the law itself.
        p: P(G >= observed) of the G-test; sequences expected less than 5 times count as one. 0 if one was drawn that
            the law excludes.
        nfe: mean evaluations of a sequence.
    """

    tv: float
    floor: float
    p: float
    nfe: float


def simulate(
    sampler: Sampler, engine: Engine, draws: int, seed: int, batch: Callable[[int], dict[str, Any]] = rows
) -> Fit:
    """`draws` sequences by the shipped sampler, loop and noise, of seeds from `seed` on; `batch` as for `joint`."""
    law, evaluations = joint(engine, batch), 0
    counts = torch.zeros_like(law)
    for start in range(0, draws, CHUNK):
        count = min(CHUNK, draws - start)
        engine.begin(batch(count))
        result = engine.run(sampler, Noise(torch.arange(count) + start + seed))
        counts += torch.bincount(place(result.tokens, engine.vocab), minlength=len(counts))
        evaluations += int(result.nfe_per_image.sum())
    floor = (2 * law * (1 - law) / (math.pi * draws)).sqrt().sum() / 2
    return Fit(float((counts / draws - law).abs().sum()) / 2, float(floor), g_test(counts, law), evaluations / draws)


def g_test(counts: Tensor, law: Tensor) -> float:
    """p-value of the log-likelihood ratio G = 2 sum O ln(O / E), chi-square with one less than the cells' number."""
    if counts[law == 0].any():
        return 0.0
    expected = law * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum(0, keepdim=True)])
    expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
    observed, expected = observed[expected > 0], expected[expected > 0]
    g = 2 * torch.special.xlogy(observed, observed / expected).sum()
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, g.clamp(min=0) / 2))


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family (Holm 1979): below alpha each, at most one false alarm in 1 / alpha families."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    out, highest = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - rank) * p[i]))
        out[i] = highest
    return out
