"""Speculative sampling with a draft model: a smaller model proposes, one evaluation of the model tests.

Leviathan et al. 2023 (arXiv 2211.17192, algorithm 1); Chen et al. 2023 (arXiv 2302.01318, algorithm 2). Each row stops
drafting when the predicted probability that any of its drafts is refused exceeds a threshold, the policy of SpecDec++
(Huang et al. 2024, arXiv 2405.19715). Its trained predictor is replaced by the row's mean overlap of the two
laws so far: a decision by laws at final positions, never by a drawn value, so the draws stay exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from visgen.checks import Positive, Share
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise, Stream
from visgen.decode.verify import advance, verify
from visgen.samplers import Forward, Sampler
from visgen.samplers._draft import load_draft

PRIOR = (0.7, 4.0)  # a row's overlap before it is known, and how many tested tokens that counts as


@dataclass(frozen=True)
class Config:
    """Speculative sampling.

    Attributes:
        draft: run or step directory of the draft model, trained on tokens of the same tokenizer.
        length: drafts per evaluation of the model, at most.
        threshold: a row stops drafting when some draft is refused with more than this probability; 1 never stops.
    """

    draft: Path | None = None
    length: Positive = 4
    threshold: Share = 0.7


@dataclass
class State:
    tokens: Tensor  # [B, N], final ones and behind them drafts
    position: Tensor  # [B, 1], the first token that is not final
    iteration: Tensor  # [B, 1]
    rounds: Tensor  # [B, N]
    slots: Tensor  # [W], 0 to W - 1 with W = length + 1 (or N)
    overlap: Tensor  # [B, 1] sum of the overlaps of the laws at tested positions
    tested: Tensor  # [B, 1] their number
    drafts: Tensor  # [B, 1] tokens that the draft model drafted
    drafter: Any  # the draft model's engine
    known: tuple[Tensor, Tensor] | None  # tokens, mask [B, N]
    fused: bool


class Speculative(Sampler):
    """Drafts up to `length` tokens one by one, tests them in one window, goes on behind the first refused one."""

    lossless = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def init(self, engine: Engine, noise: Noise) -> State:
        drafter = engine.once(("draft", self.config.draft), lambda: load_draft(self.config.draft, engine))
        drafter.begin(engine.given, engine.known)
        drafter.unsound = engine.unsound
        tokens = torch.zeros(engine.batch, engine.tokens, dtype=torch.int64, device=engine.device)
        position = tokens.new_zeros(engine.batch, 1)
        slots = torch.arange(min(self.config.length + 1, engine.tokens), device=engine.device)
        tested = torch.full(position.shape, PRIOR[1], device=engine.device)
        return State(
            tokens=tokens,
            position=position,
            iteration=position.clone(),
            rounds=tokens.clone(),
            slots=slots,
            overlap=PRIOR[0] * tested,
            tested=tested,
            drafts=position.clone(),
            drafter=drafter,
            known=engine.known,
            fused=engine.fused,
        )

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        state.iteration += 1
        count, width = state.tokens.shape[1], len(state.slots)
        index = state.position.clamp(max=count - width) + state.slots  # [B, W]; at the end it covers some final tokens
        waiting = index >= state.position
        drafted = waiting & (index < state.position + self.wanted(state))
        laws = self.propose(state, index, waiting, drafted, noise)
        law = forward(state.tokens, index)
        draft, q = state.tokens.gather(1, index), law.like(laws)
        verdict = verify(law, draft, q, noise, index, waiting, state.iteration, every=False)
        advance(state, verdict)
        counted = drafted & (index < state.position)  # at final positions alone, so that no drawn draft has a say
        state.overlap += (law.overlap(q) * counted).sum(1, keepdim=True)
        state.tested += counted.sum(1, keepdim=True)
        state.drafts += drafted.sum(1, keepdim=True)

    def wanted(self, state: State) -> Tensor:
        """Drafts of each row [B, 1]: as many as all stay with probability 1 - threshold, as far as is known; 1 or more.

        SpecDec++: stop when P(some draft is refused) = 1 - prod of the acceptances exceeds the threshold.
        """
        steps = torch.arange(1, self.config.length + 1, device=state.tokens.device)
        refused = 1 - (state.overlap / state.tested) ** steps  # [B, length]
        return (refused <= self.config.threshold).sum(1, keepdim=True).clamp(min=1)

    def propose(self, state: State, index: Tensor, waiting: Tensor, drafted: Tensor, noise: Noise) -> Tensor:
        """Writes a draft for every waiting position of index [B, W]; returns the logits [B, W, V] of their laws.

        Drafts of the draft model where `drafted`, elsewhere uniform ones, labelled so: the token behind the last draft
        needs none, and any will do. The first evaluation reads all that may have become final since the last one.
        """
        count, width = state.tokens.shape[1], len(state.slots)
        at = (state.position - width + 1 + state.slots).clamp(0, count - 1)  # [B, W], up to the first waiting token
        law = state.drafter.forward(state.tokens, at)
        laws = torch.zeros_like(law.logits)
        if state.known is not None:
            laws = law.like(laws).pin(*(x.gather(1, index) for x in state.known)).logits
        self.write(state, index, law.like(laws), waiting & ~drafted, noise)
        steps = self.config.length
        if index.device.type == "cpu":  # where a look is free
            steps = int(drafted.sum(1).max())
        for i in range(steps):
            at = (state.position + i).clamp(max=count - 1)  # [B, 1]
            if i > 0:
                law = state.drafter.forward(state.tokens, at)
            law = law.like(law.logits[:, -1:])
            here = drafted & (index == state.position + i)  # [B, W], one slot or none
            self.write(state, at, law, here.any(1, keepdim=True), noise)
            laws = torch.where(here.unsqueeze(-1), law.logits, laws)
        return laws

    def write(self, state: State, index: Tensor, law: Any, where: Tensor, noise: Noise) -> None:
        """Draws the drafts at index from their law, in `where` of it."""
        drawn = law.draw(noise, index, Stream.DRAFT, state.iteration, where)
        state.tokens.scatter_(1, index, torch.where(where, drawn, state.tokens.gather(1, index)))

    def iterations(self, engine: Engine) -> int:
        return engine.tokens

    def done(self, state: State) -> Tensor:
        return state.position[:, 0] == state.tokens.shape[1]

    def notes(self, state: State) -> dict[str, Any]:
        drafts = state.drafts.float().mean() / state.rounds.amax(1).float().mean()
        return {"drafts_per_evaluation": round(drafts.item(), 2)}  # read when the decode is over
