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
from visgen.decode.verify import first_of, ring, verify
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
    chosen: dict[str, Any]


class SJD(Sampler):
    """Tests a window, moves it to the first refused draft, and draws drafts for what is new in it."""

    def __init__(self, config: Config) -> None:
        self.config = config

    def init(self, engine: Engine, noise: Noise) -> State:
        window = self.config.window
        if window != "auto":
            return self.begin(engine, window)
        trials = choose_window(self, engine, noise, self.config.drafting)
        return self.begin(engine, trials["window"], trials)

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
        rounds = torch.zeros_like(tokens)
        return State(tokens, position, position.clone(), rounds, slots, laws, newest, engine.known, chosen or {})

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        state.iteration += 1
        index = ring(state.position, state.slots, state.tokens.shape[1])  # [B, W]
        waiting = index >= state.position
        draft = state.tokens.gather(1, index)
        law = forward(state.tokens, index)
        if state.laws is None:
            tokens = torch.where(waiting, law.draw(noise, index, Stream.TOKEN, where=waiting), draft)
            first = first_of(tokens != draft, index)
        else:
            coupled = self.config.drafting == "coupled"
            verdict = verify(law, draft, law.like(state.laws), noise, index, waiting, state.iteration, every=coupled)
            tokens, first = verdict.tokens, verdict.first
            if not coupled:
                behind = index > first
                tokens = torch.where(behind, self.draw(law, noise, index, state.iteration, behind), tokens)
        state.tokens.scatter_(1, index, tokens)
        place = torch.arange(state.tokens.shape[1], device=index.device)
        state.rounds += state.iteration * ((place >= state.position) & (place <= first))
        state.position.copy_(first + 1)
        if state.laws is not None:
            state.laws.copy_(law.logits)  # kept and redrawn drafts alike follow the law that tested them
        if len(state.slots) > 1:
            self.extend(state, law, index, noise)

    def extend(self, state: State, law: Any, index: Tensor, noise: Noise) -> None:
        """First drafts, and their laws, of the positions that enter the window after index [B, W]."""
        entering = ring(state.position, state.slots, state.tokens.shape[1])
        new, last = entering > index, index.amax(1, keepdim=True)
        if self.config.init == "repeat":
            logits = _certain(state.tokens.gather(1, last), law.vocab).expand_as(law.logits)
        elif state.newest is None:
            logits = torch.zeros_like(law.logits)
        else:
            columns = state.newest.shape[1] - 1
            column = torch.where(index > last - columns, index % columns, columns)  # older laws: to the last slot
            state.newest.scatter_(1, _lanes(column, law.vocab), law.logits)
            logits = state.newest.gather(1, _lanes(entering % columns, law.vocab))
        first = law.like(logits)
        if state.known is not None:
            first = first.pin(*(x.gather(1, entering) for x in state.known))
        drawn = self.draw(first, noise, entering, state.iteration, new)
        state.tokens.scatter_(1, entering, torch.where(new, drawn, state.tokens.gather(1, entering)))
        if state.laws is not None:
            state.laws.copy_(torch.where(new.unsqueeze(-1), first.logits, state.laws))

    def draw(self, law: Any, noise: Noise, index: Tensor, iteration: Tensor, where: Tensor) -> Tensor:
        """A draft: by the position's one noise where it is shared, else by noise of its own."""
        if self.config.drafting in ("gumbel", "pure_gumbel"):
            return law.draw(noise, index, Stream.TOKEN, where=where)
        return law.draw(noise, index, Stream.DRAFT, iteration, where)

    def iterations(self, engine: Engine) -> int:
        return engine.tokens

    def done(self, state: State) -> Tensor:
        return (state.position == state.tokens.shape[1]).all()

    def notes(self, state: State) -> dict[str, Any]:
        return state.chosen


def _certain(tokens: Tensor, vocab: int) -> Tensor:
    """Logits [B, W, V] of the law that has all mass on tokens [B, W]."""
    logits = torch.full((*tokens.shape, vocab), -torch.inf, device=tokens.device)
    return logits.scatter_(-1, tokens.unsqueeze(-1), 0.0)


def _lanes(slot: Tensor, vocab: int) -> Tensor:
    """slot [B, W] -> [B, W, V], to index whole laws."""
    return slot.unsqueeze(-1).expand(-1, -1, vocab)
