"""Speculative Jacobi decoding and its relatives: several tokens per evaluation, the law of plain autoregression.

A window of drafts goes through the backbone at once; the drafts that agree with their laws stay, the others become the
drafts of the next iteration. How they are drawn anew is `drafting`; that each rule is lossless is proved in
docs/methods.md and measured by eval/exactness.py.

- `fresh`: independent draws behind the first refused draft (Teng et al. 2024, SJD, arXiv 2410.01699).
- `coupled`: the test itself redraws every position, keeping as many drafts as any rule can (maximal coupling).
- `gumbel`: the draws of a position share one Gumbel noise, so that similar laws give equal tokens.
- `pure_gumbel`: the same, and a draft stays iff it is drawn again: the tokens are those of `ar`, one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from visgen.checks import Positive
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise, Stream
from visgen.decode.verify import Verdict, advance, first_drafts, open_window, ring, verify
from visgen.samplers import Forward, Sampler
from visgen.samplers._window import choose_window


@dataclass(frozen=True)
class Config:
    """Speculative Jacobi decoding.

    Attributes:
        drafting: how a window's drafts are drawn anew; see above.
        window: tokens per evaluation, or `auto`: by a trial on the device, plain autoregression where none pays.
            The tokens of a seed depend on the window (not for `pure_gumbel`).
        init: the first draft of a position: a uniform draw, a draw from the newest law to its `left` or one row `up`,
            or a copy (`repeat`) of the token to its left. Each carries the law that it truly has.
    """

    drafting: Literal["fresh", "coupled", "gumbel", "pure_gumbel"] = "coupled"
    window: Positive | Literal["auto"] = 32
    init: Literal["uniform", "left", "up", "repeat"] = "uniform"


@dataclass
class State:
    tokens: Tensor  # [B, N], final ones and behind them drafts
    position: Tensor  # [B, 1], the first token that is not final
    iteration: Tensor  # [B, 1]
    rounds: Tensor  # [B, N]
    slots: Tensor  # [W], 0 to W - 1; slot s of the window holds the position that is s modulo W
    laws: Tensor | None  # [B, W, V] logits that each slot's draft was drawn from; None: `pure_gumbel`, which needs none
    newest: Tensor | None  # [B, C + 1, V] newest logits of each of C columns (`left`: 1), and a slot for the rest
    known: tuple[Tensor, Tensor] | None  # tokens, mask [B, N]
    fused: bool
    chosen: dict[str, Any]


class SJD(Sampler):
    """Tests a window, moves it to the first refused draft, and draws drafts for what is new in it."""

    lossless = True
    ragged = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def init(self, engine: Engine, noise: Noise) -> State:
        window = self.config.window
        if window != "auto":
            return self.begin(engine, window)
        chosen = choose_window(self, engine)
        return self.begin(engine, chosen["window"], chosen)

    def begin(self, engine: Engine, window: int, chosen: dict[str, Any] | None = None) -> State:
        """The state before the first iteration: every draft is the known token or token 0, with certainty.

        A window of one token is plain autoregression, so it is drawn as such.
        """
        rows, count = engine.batch, engine.tokens
        window = min(window, count)
        tokens = torch.zeros(rows, count, dtype=torch.int64, device=engine.device)
        if engine.known is not None:
            tokens = torch.where(engine.known[1], engine.known[0], tokens)
        laws = newest = None
        if self.config.drafting != "pure_gumbel" and window > 1:
            laws = _certain(tokens[:, :window], engine.vocab)
        columns = {"left": 1, "up": engine.grid[-1]}.get(self.config.init)
        if columns is not None and window > 1:
            newest = torch.zeros(rows, columns + 1, engine.vocab, device=engine.device)
        position = tokens.new_zeros(rows, 1)
        slots = torch.arange(window, device=engine.device)
        return State(
            tokens=tokens,
            position=position,
            iteration=position.clone(),
            rounds=torch.zeros_like(tokens),
            slots=slots,
            laws=laws,
            newest=newest,
            known=engine.known,
            fused=engine.fused,
            chosen=chosen or {},
        )

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        window = open_window(state)
        index, waiting, draft = window.index, window.waiting, window.draft  # [B, W]
        law = forward(state.tokens, index)
        shared = self.config.drafting in ("gumbel", "pure_gumbel")  # one noise for all drafts of a position
        stream = Stream.TOKEN if shared else Stream.DRAFT
        if state.laws is None:
            drawn = torch.where(waiting, law.draw(noise, index, Stream.TOKEN, where=waiting), draft)
            verdict = Verdict(index, drawn == draft, drawn, drawn)
        else:  # kept and redrawn drafts alike follow the law that tests them
            coupled = self.config.drafting == "coupled"
            rule: dict[str, Any] = {"every": coupled, "redraw": None if coupled else stream, "relabel": True}
            q = law.like(state.laws)
            verdict = verify(law, draft, q, noise, index, waiting, state.iteration, **rule)
        advance(state, verdict)
        if len(state.slots) > 1:
            logits = self.first_laws(state, law, index)
            first_drafts(state, law, logits, state.laws, index, noise, stream, state.known)

    def first_laws(self, state: State, law: Any, index: Tensor) -> Tensor | None:
        """Logits [B, W, V] of the first drafts of what enters the window after index [B, W]; None: uniform."""
        if self.config.init == "uniform":
            return None
        last = index.amax(1, keepdim=True)
        newest = law.logits if state.laws is None else state.laws
        if state.newest is None:
            return _certain(state.tokens.gather(1, last), law.vocab).expand_as(newest)
        entering = ring(state.position, state.slots, state.tokens.shape[1])
        columns = state.newest.shape[1] - 1
        column = torch.where(index > last - columns, index % columns, columns)  # older laws: to the last slot
        state.newest.scatter_(1, _lanes(column, law.vocab), newest)
        return state.newest.gather(1, _lanes(entering % columns, law.vocab))

    def iterations(self, engine: Engine) -> int:
        return engine.tokens

    def done(self, state: State) -> Tensor:
        return state.position[:, 0] == state.tokens.shape[1]

    def notes(self, state: State) -> dict[str, Any]:
        return state.chosen


def _certain(tokens: Tensor, vocab: int) -> Tensor:
    """Logits [B, W, V] of the law that has all mass on tokens [B, W]."""
    logits = torch.full((*tokens.shape, vocab), -torch.inf, device=tokens.device)
    return logits.scatter_(-1, tokens.unsqueeze(-1), 0.0)


def _lanes(slot: Tensor, vocab: int) -> Tensor:
    """slot [B, W] -> [B, W, V], to index whole laws."""
    return slot.unsqueeze(-1).expand(-1, -1, vocab)
