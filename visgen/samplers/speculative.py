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
from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.noise import Noise, Stream
from visgen.decode.verify import advance, verify
from visgen.samplers import Forward, Sampler

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

    def __init__(self, config: Config) -> None:
        self.config = config

    def init(self, engine: Engine, noise: Noise) -> State:
        drafter = engine.once(("draft", self.config.draft), lambda: _load(self.config.draft, engine))
        drafter.begin(engine.given, engine.known)
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


def _load(path: Path | None, engine: Engine) -> Engine:
    """An engine of the draft model, for the same tokens, guidance and filters.

    Raises:
        UserError: no such model, or one of other tokens, another condition or without a null class.
    """
    from visgen.checkpoint import WEIGHTS, find_step, load_model, read_metadata

    if path is None or str(path) == ".":  # "." is what an empty flag becomes
        raise UserError("sampler.draft is needed: the run directory of a smaller model of the same tokenizer")
    try:
        step = find_step(path)
    except UserError as error:
        raise UserError(f"sampler.draft: {error}") from None
    model, its = load_model(step), (read_metadata(step / WEIGHTS).get("tokenizer") or "")[:12] or None
    wanted: dict[str, Any] = {"grid": tuple(engine.grid), "vocab": engine.vocab, "tokenizer": engine.tokenizer}
    given: dict[str, Any] = {"grid": tuple(model.grid), "vocab": model.config.vocab, "tokenizer": its}
    for name, value in given.items():
        if value != wanted[name] and None not in (value, wanted[name]):  # older files name no tokenizer
            raise UserError(
                f"sampler.draft {path}: its {name} is {value}, the model's is {wanted[name]}; "
                "pass a draft model that was trained on the same tokenizer"
            )
    mine, target = model.config.condition, engine.model.config.condition
    if _told(mine) != _told(target):
        raise UserError(
            f"sampler.draft {path}: its condition is {_told(mine)}, the model's is {_told(target)}; "
            "pass a draft model that is told the same"
        )
    if engine.guidance.branches > 1 and mine.dropout == 0:
        raise UserError(f"sampler.draft {path} was trained without a null class; set guidance.scale to 1")
    model = model.to(engine.device, engine.dtype).eval().requires_grad_(False)
    return type(engine)(model, engine.guidance, engine.warp)  # a captured one keeps its batches in the same buffers


def _told(condition: Any) -> str:
    """A condition's settings, those of training alone left out."""
    settings = {name: value for name, value in vars(condition).items() if name not in ("dropout", "views")}
    kind = type(condition).__module__.rpartition(".")[2]
    return f"{kind} ({', '.join(f'{name} {value}' for name, value in settings.items())})"
