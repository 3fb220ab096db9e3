"""Proof that a sampler draws from the distribution of plain autoregression, by simulation; `enumeration.py` enumerates.

A `World` is an engine with what it is asked to draw: one or more conditions (labels, maps, known tokens). Image i has
condition i modulo their number. Its engine is a real one, or a `TableEngine`: a table of probabilities for every
condition and prefix, so that the probability of every sequence is known. Shipped samplers run on both unchanged.

- `joint`: the probability of every sequence under plain autoregression, found without the code that decodes: a table is
  multiplied out; a real model runs its training pass, without a cache, and the published formula guides it.
- `simulate`: many rows with the shipped noise in float32; `Fit` is a G-test of their joint counts, and their TV beside
  the TV that as many draws of the true distribution show.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from visgen.conditions import Prefix
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.refill import refill
from visgen.nn.categorical import Categorical
from visgen.samplers import Sampler

CHUNK = 1 << 17  # rows of a simulation that are decoded at once


class TableEngine(Engine):
    """An engine whose model is a table of the next token's logits after each prefix, in the default dtype.

    Args:
        logits: [nodes, V] float64, by length of the prefix, then lexically: the root, x_0, x_0 x_1, ...; or of several
            classes, [classes, nodes, V].
        grid: (T, H, W) of its tokens.
        drafter: the draft model's engine, for a sampler that has one.
        law: class of the laws.
    """

    def __init__(
        self, logits: Tensor, grid: tuple[int, int, int], drafter: TableEngine | None = None, law: Any = Categorical
    ) -> None:
        self.logits = logits if logits.ndim == 3 else logits.unsqueeze(0)
        self.grid, self.drafter, self.law = grid, drafter, law
        self.tokens, self.vocab = math.prod(grid), logits.shape[-1]
        self.device, self.dtype, self.guidance = torch.device("cpu"), torch.float32, Guidance()
        self.unsound, self._kept = torch.zeros(1, dtype=torch.int32), {}
        self.begin(rows(1))

    def begin(self, batch: dict[str, Any], known: tuple[Tensor, Tensor] | None = None) -> None:
        """Starts a batch of images of the classes `batch["label"]`."""
        self.given, self.known, self._cond = batch, known, self.prefixes(batch)
        self.read = torch.zeros(self.batch, self.tokens, dtype=torch.int64)  # the cache: the token before each

    def prefixes(self, batch: dict[str, Any]) -> Prefix:
        """A slot of one channel: the class itself."""
        return Prefix(batch["label"].view(-1, 1, 1).float())

    def forward(self, tokens: Tensor, index: Tensor) -> Any:
        """Like a transformer with a cache, it sees at every earlier position what was last fed there."""
        self.read.scatter_(1, index, tokens.gather(1, (index - 1).clamp(min=0)))
        nodes = [torch.zeros_like(self.read[:, 0])]
        for k in range(1, self.tokens):
            nodes.append(nodes[-1] * self.vocab + self.read[:, k] + 1)
        tables, label = self.logits.to(torch.get_default_dtype()), self.condition.vectors[:, 0].long()  # [B, 1]
        law = self.law(tables[label, torch.stack(nodes, 1).gather(1, index)])
        return law if self.known is None else law.pin(*(x.gather(1, index) for x in self.known))

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """As in `Engine`, but for the draft model, which is there."""
        return self.drafter if key[0] == "draft" else super().once(key, make)  # type: ignore[index]


def rows(count: int) -> dict[str, Any]:
    """A batch of `count` images of class 0."""
    return {"label": torch.zeros(count, dtype=torch.int64)}


def labelled(which: Tensor) -> dict[str, Any]:
    """A batch of images [B] of the classes whose numbers are those of their conditions."""
    return {"label": which}


@dataclass(frozen=True)
class World:
    """An engine and what it is asked to draw.

    Attributes:
        conditions: number C of different conditions.
        batch: what `engine.begin` reads for images of conditions [B].
        known: (tokens [C, N], mask [C, N]) of every condition.
        rows: images that are decoded at once, by refilling rows; None: all.
    """

    engine: Engine
    conditions: int = 1
    batch: Callable[[Tensor], dict[str, Any]] = labelled
    known: tuple[Tensor, Tensor] | None = None
    rows: int | None = None

    def begin(self, which: Tensor) -> None:
        """Start a batch of images of conditions [B]."""
        known = None if self.known is None else tuple(x.to(which.device)[which] for x in self.known)
        self.engine.begin(self.batch(which), known)  # type: ignore[arg-type]

    def decode(self, sampler: Sampler, which: Tensor, seeds: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [B, N] of images of these conditions [B] and seeds [B], and how many evaluations each took."""
        which, seeds = which.to(self.engine.device), seeds.to(self.engine.device)
        if self.rows is not None:
            found = refill(self.engine, sampler, self.batch(which), Noise(seeds), self.rows)
        else:
            self.begin(which)
            found = self.engine.run(sampler, Noise(seeds))
        return found.tokens.cpu(), found.nfe_per_image.cpu()


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


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Tables and laws in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@torch.inference_mode()
def joint(world: World) -> Tensor:
    """Probability [C, V^N] float64 of every sequence under plain autoregression, for every condition."""
    engine, found = world.engine, []
    every = sequences(engine.vocab, engine.tokens)
    for condition in range(world.conditions):
        which = torch.full((len(every),), condition)
        world.begin(which)
        each = _reference(engine, world.batch(which), every).softmax(-1)  # [V^N, N, V]
        chances = each.gather(-1, every.unsqueeze(-1)).squeeze(-1)
        if world.known is not None:
            tokens, mask = (x[condition] for x in world.known)
            chances = torch.where(mask, (every == tokens).double(), chances)
        found.append(chances.prod(1))
    return torch.stack(found)


def _reference(engine: Engine, batch: dict[str, Any], every: Tensor) -> Tensor:
    """Logits [M, N, V] float64 of all tokens of sequences [M, N], known ones aside."""
    index = torch.arange(engine.tokens).expand(len(every), -1)
    if isinstance(engine, TableEngine):
        engine.known = None
        with precision(torch.float64):
            return engine.forward(every, index).logits
    if engine.dtype != torch.float32:  # rounding is part of the law, and that of one token at a time is the reference
        engine.known = None
        return torch.cat([engine.forward(every, index[:, k : k + 1]).logits for k in range(engine.tokens)], 1).double()
    return engine.warp(_guided(engine, batch, every).float()).double()


def _guided(engine: Engine, batch: dict[str, Any], every: Tensor) -> Tensor:
    """u + s (l - u) + r (c - l) at every token, of the training pass: null, condition, condition with control."""
    model, rule = engine.model, engine.guidance
    given, control = model.condition(batch), model.controlled(batch)
    control = None if control is None else control.expand(-1, len(every), -1, -1)

    def said(cond: Prefix, added: Tensor | None) -> Tensor:
        h = model.backbone(every[:, :-1], None, cond=cond, control=added)[:, model.condition.prefix - 1 :]
        return model.head.law(h).logits.double()

    null, plain, full = said(model.condition.null(given), None), said(given, None), said(given, control)
    scales = torch.tensor([scales_at(rule, k, engine.tokens) for k in range(engine.tokens)])  # [N, 2]
    return null + scales[:, :1] * (plain - null) + scales[:, 1:] * (full - plain)


def scales_at(rule: Guidance, token: int, tokens: int) -> tuple[float, float]:
    """The scales of condition and control at one token, as docs/methods.md has them."""
    place = token / max(tokens - 1, 1)
    if not rule.interval[0] <= place <= rule.interval[1]:
        return 1.0, 1.0
    grown = {"constant": 1.0, "linear": place, "cosine": math.sin(math.pi * place / 2) ** 2}[rule.schedule]
    control = rule.scale if rule.control is None else rule.control
    return 1 + (rule.scale - 1) * grown, 1 + (control - 1) * grown


@torch.inference_mode()
def tabulated(world: World) -> Tensor:
    """The laws of a real engine as logits [C, nodes, V] of a `TableEngine`; known tokens are left out."""
    engine, found = world.engine, []
    every = sequences(engine.vocab, engine.tokens)
    for condition in range(world.conditions):
        engine.begin(world.batch(torch.full((len(every),), condition)))
        index = torch.arange(engine.tokens)
        logits = engine.forward(every, index.expand(len(every), -1)).logits.double()
        found.append(torch.cat([logits[:: engine.vocab ** (engine.tokens - k), k] for k in index.tolist()]))
    return torch.stack(found)


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


def simulate(sampler: Sampler, world: World, draws: int, seed: int, law: Tensor | None = None) -> Fit:
    """How `draws` sequences by the shipped sampler, loop and noise, of seeds from `seed` on, fit the law [C, V^N].

    Args:
        law: default `joint(world)`.
    """
    law, evaluations = joint(world) if law is None else law, 0
    counts = torch.zeros_like(law)
    for start in range(0, draws, CHUNK):
        image = torch.arange(start, min(start + CHUNK, draws))
        which = image % world.conditions
        tokens, nfe = world.decode(sampler, which, image + seed)
        cells = which * law.shape[1] + place(tokens, world.engine.vocab)
        counts += torch.bincount(cells, minlength=counts.numel()).view_as(counts)
        evaluations += int(nfe.sum())
    return fitted(counts, law, evaluations / draws)


def fitted(counts: Tensor, law: Tensor, nfe: float) -> Fit:
    """The fit of counts [C, cells] to laws [C, cells]."""
    each = counts.sum(1, keepdim=True)  # draws of every condition
    share = each[:, 0] / each.sum()
    tv = (counts / each - law).abs().sum(1) / 2
    floor = (2 * law * (1 - law) / (math.pi * each)).sqrt().sum(1) / 2
    return Fit(float(tv @ share), float(floor @ share), g_test(counts, law), nfe)


def g_test(counts: Tensor, law: Tensor) -> float:
    """p-value of the log-likelihood ratio G = 2 sum O ln(O / E) of counts [..., cells], chi-square with one less than
    the cells' number for each of the laws."""
    if counts[law == 0].any():
        return 0.0
    g, freedom = torch.zeros((), dtype=torch.float64), 0
    for found, each in zip(counts.view(-1, law.shape[-1]), law.view(-1, law.shape[-1]), strict=True):
        expected = each * found.sum()
        rare = expected < 5
        observed = torch.cat([found[~rare], found[rare].sum(0, keepdim=True)])
        expected = torch.cat([expected[~rare], expected[rare].sum(0, keepdim=True)])
        observed, expected = observed[expected > 0], expected[expected > 0]
        g += 2 * torch.special.xlogy(observed, observed / expected).sum()
        freedom += len(observed) - 1
    return float(torch.special.gammaincc(torch.tensor(freedom / 2, dtype=torch.float64), g.clamp(min=0) / 2))


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p-values of a family (Holm 1979): below alpha each, at most one false alarm in 1 / alpha families."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    out, highest = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p) - rank) * p[i]))
        out[i] = highest
    return out


def side_by_side(tasks: dict[str, tuple[Any, ...]], processes: int) -> tuple[dict[str, Any], float]:
    """Return what each task, a function and its arguments, returns, and the seconds of CPU time that all took. None is
    faster on two threads, so each has a process."""
    if processes == 1:
        return _unzipped({name: _timed(*task) for name, task in tasks.items()})
    workers = min(len(tasks), processes)
    threads = max(1, torch.get_num_threads() // workers)
    with ProcessPoolExecutor(workers, get_context("forkserver"), torch.set_num_threads, (threads,)) as pool:
        running = {name: pool.submit(_timed, *task) for name, task in tasks.items()}
        return _unzipped({name: future.result() for name, future in running.items()})


def _timed(task: Callable[..., Any], *given: Any) -> tuple[Any, float]:
    start = time.process_time()
    return task(*given), time.process_time() - start


def _unzipped(found: dict[str, tuple[Any, float]]) -> tuple[dict[str, Any], float]:
    return {name: result for name, (result, _) in found.items()}, sum(seconds for _, seconds in found.values())
