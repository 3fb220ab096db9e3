"""Proof that a sampler of vectors draws from the law of plain autoregression, on models whose law is known.

A `ToyEngine` is an engine whose model is a Gaussian, or a mixture of them, of C channels, whose means lean on the token
before; the best prediction of its noise is a formula, so shipped samplers run on it unchanged. `draws` runs one;
`gaussian_chain` is the law that a walk draws of a Gaussian, and `ks` tests projections of two sets of draws, or of one
against a normal law. `prove` is what `eval/exactness.py` says of vectors: all its draft models are wrong on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from visgen import config as configs
from visgen import mutants
from visgen.config import plugin_config
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.exactness import holm
from visgen.nn.ancestral import Walk, walk
from visgen.nn.diffusion import Path
from visgen.samplers import Sampler
from visgen.samplers._walk import fixed_log

CHANNELS, DIRECTIONS = 16, 8  # of a toy's tokens; of the projections that are tested
CONTROLLED = ("gaussian", "mixture")  # toys on which wrong rules must fail
CHUNK = 512  # rows that are decoded at once: their noise is all made beforehand


@dataclass(frozen=True)
class Toy:
    """Law of a token given the one before: sum over k of weights[k] N(means[k] + lean * before, std^2 I).

    Attributes:
        means: [K, C].
        weights: [K].
        error: by what the prediction of the noise errs in every channel, as a model's does.
        shift: [N, C], added to the means by the token's place; none without it.
    """

    means: Tensor
    weights: Tensor
    std: float
    lean: float = 0.0
    error: float = 0.0
    shift: Tensor | None = None


class ToyLaw:
    """The law of tokens, whose means lie `offset` [B, W, C] from the toy's."""

    def __init__(self, toy: Toy, path: Path, offset: Tensor) -> None:
        self.toy, self.path, self.offset = toy, path, offset

    def at(self, which: slice) -> ToyLaw:
        return ToyLaw(self.toy, self.path, self.offset[:, which])

    def predict(self, x: Tensor, time: Tensor) -> tuple[Tensor, None]:
        """The noise in x [B, W, C] at times [1] or [B, W, 1]."""
        alpha, sigma = self.path.scales(time)
        variance = (alpha * self.toy.std).square() + sigma.square()
        away = x.unsqueeze(-2) - alpha.unsqueeze(-1) * (self.toy.means + self.offset.unsqueeze(-2))
        log = self.toy.weights.log() - away.square().sum(-1) / (2 * variance)  # [B, W, K]
        mixed = (log.softmax(-1).unsqueeze(-1) * away).sum(-2) if len(self.toy.weights) > 1 else away.squeeze(-2)
        return sigma * mixed / variance + self.toy.error, None


class ToyEngine(Engine):
    """An engine of `tokens` vectors, with a draft model for a sampler that has one.

    Args:
        ordered: every image's tokens are drawn in an order of its own.
        given: tokens [N, C] that are known, and which they are [N].
    """

    continuous = True

    def __init__(
        self,
        toy: Toy,
        tokens: int,
        draft: Toy | None = None,
        ordered: bool = False,
        given: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.toy, self.tokens, self.grid = toy, tokens, (1, 1, tokens)
        self.path = Path("epsilon", "squaredcos_cap_v2")
        self.guidance, self.device, self.pinned = Guidance(), torch.device("cpu"), given
        self.unsound = torch.zeros(1, dtype=torch.int32)
        self.kept: dict[Hashable, Tensor] = {}  # draws of its law
        self.drafter = None if draft is None else ToyEngine(draft, tokens, None, ordered, given)
        config = SimpleNamespace(channels=toy.means.shape[1], backbone=Toy, head=Toy)
        head = SimpleNamespace(path=self.path, about=lambda time: time.unsqueeze(-1))
        self.model = SimpleNamespace(head=head, config=config, backbone=SimpleNamespace(ordered=ordered))
        self.begin({"rows": 1})

    def begin(self, batch: dict[str, Any], known: tuple[Tensor, Tensor] | None = None) -> None:
        """Starts a batch of `batch["rows"]` images, all of the same known tokens."""
        self.given, rows = batch, batch["rows"]
        self.known = None
        if self.pinned is not None:
            self.known = self.pinned[0].expand(rows, -1, -1), self.pinned[1].expand(rows, -1)
        self.read = torch.zeros(batch["rows"], self.tokens, self.toy.means.shape[1])  # the cache: what was fed last

    @property
    def batch(self) -> int:
        return len(self.read)

    def forward(self, tokens: Tensor, index: Tensor) -> ToyLaw:
        at = index.unsqueeze(-1).expand(-1, -1, tokens.shape[-1])
        before = tokens.gather(1, (at - 1).clamp(min=0)) * (index > 0).unsqueeze(-1)
        self.read.scatter_(1, at, before)
        offset = self.toy.lean * self.read.gather(1, at)
        if self.toy.shift is not None:
            offset = offset + self.toy.shift[index if self.order is None else self.order.gather(1, index)]
        return ToyLaw(self.toy, self.path, offset)

    def check_sampler(self, kind: str, decodes: str | None = None) -> None:
        """Takes any."""

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The draft model: nothing else is kept here."""
        return self.drafter


# ------------------------------------------------------------------------------------------------------- the proof


def prove(family: list[Any], count: int, seed: int, alpha: float) -> dict[str, Any]:
    """Tests samplers of these configs by `count` draws of every toy, and wrong ones, which must fail.

    Returns:
        pass, and what was found: `acceptance` and `first_failure` are those of Gaussians of deviation 0.7 whose means
        are 0.3 apart.
    """
    p: dict[str, float] = {}
    wrong = _controls(family[0].steps)
    caught = dict.fromkeys(wrong, False)
    for toy, engine in toys().items():  # each engine keeps its plain draws
        for i, config in enumerate(family):
            p[f"{toy} {i}"] = _tested(f"vectors     {toy:9}", configs.build(config), engine, count, seed + (i << 32))
        for i, (title, sampler) in enumerate(wrong.items() if toy in CONTROLLED else ()):
            said = f"control     {toy:9} {title:18}"
            found = _tested(said, sampler, engine, count, seed + ((1000 + i) << 32))
            caught[title] |= found < alpha / len(wrong) / len(CONTROLLED)
    rates: dict[str, float] = {}
    for config in [c for c in family if getattr(c, "mode", "") == "exact"][:1]:
        p["known law"], rates = apart(configs.build(config), count, seed)
    lowest = min(holm(list(p.values())))
    return {
        "pass": lowest >= alpha and all(caught.values()),
        "tested": len(p),
        "draws": count,
        "min_holm_p": lowest,
        **rates,
        "controls_caught": f"{sum(caught.values())}/{len(caught)}",
    }


def toys() -> dict[str, ToyEngine]:
    """Engines, each with a draft model that is wrong in means, widths, weights and what it leans on: of two tokens, and
    of four in an order of each image's own, of which one is known."""
    rng = torch.Generator().manual_seed(5)
    means, off = (torch.randn(4, CHANNELS, generator=rng) for _ in range(2))
    one, weights = torch.ones(1), torch.tensor([0.4, 0.3, 0.2, 0.1])
    shift, given = (torch.randn(4, CHANNELS, generator=rng) for _ in range(2))
    here, low = torch.zeros(1, CHANNELS), torch.full((1, CHANNELS), 0.1)
    return {
        "gaussian": ToyEngine(
            Toy(torch.zeros(1, CHANNELS), one, 0.7, 0.6),
            2,
            Toy(torch.full((1, CHANNELS), 0.25), one, 0.65, 0.3, 0.02),
        ),
        "any order": ToyEngine(
            Toy(here, one, 0.7, 0.6, shift=shift),
            4,
            Toy(low, one, 0.7, 0.5, 0.01, shift),
            ordered=True,
            given=(given, torch.tensor([False, False, True, False])),
        ),
        "mixture": ToyEngine(
            Toy(means, weights, 0.35, 0.3), 2, Toy(means + 0.1 * off, weights.flip(0), 0.35, 0.3, 0.03)
        ),
    }


def _controls(steps: int) -> dict[str, Sampler]:
    """Rules that are not lossless."""

    def config(**values: Any) -> Any:
        return plugin_config("visgen.samplers", "cspec", length=2, steps=steps, **values)

    return {
        "as released": mutants.Released(config()),
        "unreflected": mutants.Unreflected(config()),
        "no rollback": mutants.NoRollback(config()),
        "distance": configs.build(config(mode="distance", radius=3.0)),
    }


def _tested(said: str, sampler: Any, engine: ToyEngine, count: int, seed: int) -> float:
    """p-value, adjusted for the projections, of its tokens being of the law of plain autoregression."""
    wanted = _plain(sampler.config, engine, count)
    found, notes = draws(sampler, engine, count, seed)
    onto = projections(wanted.flatten(1).shape[1], DIRECTIONS).float()
    p = min(holm([ks(a, b) for a, b in zip(*((x.flatten(1) @ onto).unbind(1) for x in (found, wanted)), strict=True)]))
    rate = f"{mean_of(notes, 'acceptance'):.3f}" if "acceptance" in notes[0] else "none needed"
    print(f"{said} {type(sampler).__name__:11} {sampler.config.mode:9} p {p:.2g}  first drafts kept {rate}", flush=True)
    return p


def _plain(rule: Any, engine: ToyEngine, count: int) -> Tensor:
    """Draws of plain autoregression by the same chain, of seeds that are nobody else's."""
    same = {k: getattr(rule, k) for k in ("steps", "last", "temperature", "variance")}
    plain = configs.build(plugin_config("visgen.samplers", "causal", end_noise=True, **same))
    key = (*same.values(), count)
    if key not in engine.kept:
        engine.kept[key] = draws(plain, engine, count, 1 << 60)[0]
    return engine.kept[key]


def apart(sampler: Any, count: int, seed: int) -> tuple[float, dict[str, float]]:
    """One Gaussian token, drafted by a Gaussian 0.3 away: p-value against the law of the chain, which is a formula, and
    the share of drafts that stay, by the rule and by the first-failure rule."""
    config, one = sampler.config, torch.ones(1)
    mean = torch.zeros(1, CHANNELS)
    engine = ToyEngine(Toy(mean, one, 0.7), 1, Toy(mean + 0.3 / math.sqrt(CHANNELS), one, 0.7))
    found, notes = draws(sampler, engine, count, seed)
    made = walk(engine.path, "ancestral", config.steps, last=config.last)
    spread = config.temperature * (fixed_log(made.low, made.high, config.variance) / 2).exp()
    _, deviation = gaussian_chain(made, spread, 0.7, engine.path)
    onto = projections(CHANNELS, DIRECTIONS).float()
    p = min(holm([ks(x / deviation) for x in (found[:, 0] @ onto).unbind(1)]))
    rates = {name: round(mean_of(notes, name), 4) for name in ("acceptance", "first_failure")}
    print(f"vectors     apart     p {p:.2g}  kept {rates['acceptance']}, first failure {rates['first_failure']}")
    return p, rates


def draws(sampler: Sampler, engine: ToyEngine, count: int, seed: int) -> tuple[Tensor, list[dict[str, Any]]]:
    """[count, N, C] by the shipped sampler, loop and noise, of seeds from `seed` on; and the notes of every chunk."""
    found, notes = [], []
    for start in range(0, count, CHUNK):
        rows = min(CHUNK, count - start)
        engine.begin({"rows": rows})
        with torch.inference_mode():
            noise = Noise(torch.arange(rows) + start + seed)
            state = sampler.init(engine, noise)
            for _ in range(sampler.iterations(engine)):
                sampler.iterate(state, engine.forward, noise)
                over = sampler.done(state)
                if over is not None and over.all():
                    break
        found.append(engine._raster(state.tokens))
        notes.append(sampler.notes(state) | {"rows": rows})
    return torch.cat(found), notes


def mean_of(notes: list[dict[str, Any]], name: str) -> float:
    """Mean over chunks of a note, or of the first of its numbers, weighted by their rows."""
    values = [n[name][0] if isinstance(n[name], list) else n[name] for n in notes]
    return sum(v * n["rows"] for v, n in zip(values, notes, strict=True)) / sum(n["rows"] for n in notes)


def gaussian_chain(walk: Walk, spread: Tensor, std: float, path: Path) -> tuple[float, float]:
    """What a walk draws of N(m, std^2) with the best prediction o of the noise: N(factor m, deviation^2).

    A step is linear: x' = a x + b (p x + q o) + s z with o = sigma (x - alpha m) / (alpha^2 std^2 + sigma^2).

    Returns:
        (factor, deviation)
    """
    factor, variance = 0.0, 1.0
    for row, s in zip(walk.rows.double(), spread.double().tolist(), strict=True):
        time, _, _, p, q, a, b, *_ = row.tolist()
        alpha, sigma = (float(v) for v in path.scales(torch.tensor(time)))
        share = sigma / ((alpha * std) ** 2 + sigma**2)
        own, lean = a + b * (p + q * share), -b * q * share * alpha
        factor, variance = own * factor + lean, own**2 * variance + s**2
    return factor, math.sqrt(variance)


def projections(channels: int, count: int, seed: int = 0) -> Tensor:
    """Random directions [channels, count] of length 1."""
    made = torch.randn(channels, count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made / made.norm(dim=0)


def ks(found: Tensor, other: Tensor | None = None) -> float:
    """p-value of the Kolmogorov-Smirnov test: are values [n] of the law of other values [m], or else of N(0, 1)?"""
    found = found.double().sort()[0]
    n = len(found)
    if other is None:
        law, place = torch.special.ndtr(found), torch.arange(1, n + 1, dtype=torch.float64) / n
        return kolmogorov(float(torch.maximum(place - law, law - place + 1 / n).max()), n)
    other = other.double().sort()[0]
    both = torch.cat([found, other])
    shares = [torch.searchsorted(x, both, right=True).double() / len(x) for x in (found, other)]
    return kolmogorov(float((shares[0] - shares[1]).abs().max()), n * len(other) / (n + len(other)))


def kolmogorov(distance: float, n: float) -> float:
    """P(greatest distance of n draws >= distance), asymptotic, with Stephens' correction (1970)."""
    x = (math.sqrt(n) + 0.12 + 0.11 / math.sqrt(n)) * distance
    if x < 0.2:
        return 1.0
    return min(1.0, max(0.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101))))
