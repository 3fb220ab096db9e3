"""Verification of drafts: the one rule behind every lossless sampler of the family.

A draft d with the law q *that it was truly drawn from* meets the law p of its position, guided and filtered. It stays
with probability min(1, p(d) / q(d)), else norm(max(p - q, 0)) replaces it, so what is there afterwards follows p
(speculative sampling, Leviathan et al. 2023, arXiv 2211.17192, section 2.3; Chen et al. 2023, arXiv 2302.01318).
Filters act on p and q before the ratio, never on the residual. What else must hold when drafts live on over several
iterations: `docs/methods.md`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from visgen.decode.noise import Noise, Stream
from visgen.heads import Testable


class Drafts(Protocol):
    """State of a sampler that tests a window of drafts."""

    tokens: Tensor  # [B, N], final ones and behind them drafts
    position: Tensor  # [B, 1], the first token that is not final
    iteration: Tensor  # [B, 1]
    rounds: Tensor  # [B, N]
    slots: Tensor  # [W], 0 to W - 1
    fused: bool  # keep the books by the kernels of nn/fused/verify.py, the twins of what is here


@dataclass
class Window:
    """Where an iteration looks, each [B, W].

    Attributes:
        index: positions, in ring order.
        waiting: whether a position is not final yet.
        draft: the tokens there.
    """

    index: Tensor
    waiting: Tensor
    draft: Tensor


@dataclass
class Verdict:
    """What a window's drafts have become, each [B, W].

    Attributes:
        index: their positions.
        kept: whether a draft stays.
        tokens: up to and with the first that does not stay: the drafts, and what replaces that one. They are final:
            each follows its law given final tokens.
        behind: the drafts behind it.
    """

    index: Tensor
    kept: Tensor
    tokens: Tensor
    behind: Tensor

    @property
    def first(self) -> Tensor:
        """[B, 1] position of the first draft that did not stay, of the window's last one if all did."""
        return first_of(~self.kept, self.index)


def open_window(state: Drafts) -> Window:
    """Counts the iteration and looks at the window that begins at the first token that is not final."""
    if state.fused:
        from visgen.nn.fused import verify as kernels  # Triton is needed here alone

        return Window(*kernels.open_window(state.tokens, state.position, state.iteration, state.slots))
    state.iteration += 1
    index = ring(state.position, state.slots, state.tokens.shape[1])
    return Window(index, index >= state.position, state.tokens.gather(1, index))


def verify(
    law: Testable,
    draft: Tensor,
    drawn_from: Testable,
    noise: Noise,
    index: Tensor,
    waiting: Tensor,
    iteration: Tensor,
    every: bool,
    redraw: Stream | None = None,
    relabel: bool = False,
) -> Verdict:
    """Tests a window's drafts, all at once and without a look at any value.

    Args:
        law: p, the law of each position given the drafts before it.
        draft: [B, W] ids.
        drawn_from: q, the law each draft was drawn from.
        index: [B, W] distinct positions, in any order.
        waiting: [B, W] bool; tokens elsewhere are final already and stay.
        iteration: [B, 1], keys the noise.
        every: replace every refused draft (maximal coupling), or only the first.
        redraw: the noise by which all drafts behind the first refused one are drawn anew from p.
        relabel: write the logits of p over those of q, wherever a draft is waiting.
    """
    if law.fused:
        shared, rule = redraw is Stream.TOKEN, {"accept": Stream.ACCEPT, "residual": Stream.RESIDUAL}
        kept, tokens, behind = law.test(
            draft, drawn_from, noise, index, iteration, waiting, redraw=redraw, shared=shared, relabel=relabel, **rule
        )
        return Verdict(index, kept, tokens, tokens if every else behind)
    kept = law.accept(draft, drawn_from, noise, index, Stream.ACCEPT, iteration, waiting) | ~waiting
    first = first_of(~kept, index)
    replaced = ~kept if every else ~kept & (index == first)
    redrawn = law.residual(drawn_from, noise, index, Stream.RESIDUAL, iteration, replaced)
    tokens = behind = torch.where(replaced, redrawn, draft)
    if redraw is not None:
        behind = draw(law, noise, index, redraw, iteration, index > first)
    if relabel:
        drawn_from.logits.copy_(law.logits)
    return Verdict(index, kept, tokens, behind)


def draw(law: Any, noise: Noise, index: Tensor, stream: Stream, iteration: Tensor, where: Tensor) -> Tensor:
    """Draws by noise of this iteration, or by the token's own, which all iterations share."""
    return law.draw(noise, index, stream, 0 if stream is Stream.TOKEN else iteration, where)


def advance(state: Drafts, verdict: Verdict) -> None:
    """Writes the tested tokens, and moves the position behind the first that did not stay."""
    if state.fused:
        from visgen.nn.fused import verify as kernels

        found = verdict.index, verdict.kept, verdict.tokens, verdict.behind
        return kernels.advance(state.tokens, state.position, state.iteration, state.rounds, *found)
    first = verdict.first
    state.tokens.scatter_(1, verdict.index, torch.where(verdict.index <= first, verdict.tokens, verdict.behind))
    place = torch.arange(state.tokens.shape[1], device=first.device)
    state.rounds += state.iteration * ((place >= state.position) & (place <= first))
    state.position.copy_(first + 1)


def first_drafts(
    state: Drafts,
    law: Any,
    logits: Tensor | None,
    laws: Tensor | None,
    index: Tensor,
    noise: Noise,
    stream: Stream,
    known: tuple[Tensor, Tensor] | None,
) -> None:
    """Drafts of the positions that have entered the window, which covered index [B, W], and their labels.

    Args:
        law: of the kind that the drafts' laws shall have.
        logits: [B, W, V] of these laws; None: uniform ones.
        laws: [B, W, V], the labels of the window's drafts, where there are any.
        known: (tokens [B, N], mask [B, N]), certain where the mask is true.
    """
    if state.fused and logits is None:
        from visgen.nn.fused import verify as kernels

        rule: dict[str, Any] = {"stream": stream, "shared": stream is Stream.TOKEN, "known": known}
        at = state.position, state.iteration, index
        return kernels.first_drafts(state.tokens, *at, laws, noise.seeds, law.vocab, **rule)
    entering = ring(state.position, state.slots, state.tokens.shape[1])
    new = entering > index
    if logits is None:
        logits = torch.zeros(*index.shape, law.vocab, device=index.device)
    first = law.like(logits)
    if known is not None:
        first = first.pin(*(x.gather(1, entering) for x in known))
    drawn = draw(first, noise, entering, stream, state.iteration, new)
    state.tokens.scatter_(1, entering, torch.where(new, drawn, state.tokens.gather(1, entering)))
    if laws is not None:
        laws.copy_(torch.where(new.unsqueeze(-1), first.logits, laws))


def first_of(marked: Tensor, index: Tensor) -> Tensor:
    """The lowest marked position of index [B, W], or the highest of all: [B, 1]."""
    return torch.where(marked, index, index.amax(1, keepdim=True)).amin(1, keepdim=True)


def ring(position: Tensor, slots: Tensor, tokens: int) -> Tensor:
    """Positions [B, W] of a window that begins at position [B, 1], in *ring order*: slot s holds the one = s modulo W.

    A position keeps its slot while the window moves, so what belongs to it is never copied. Near the end of the
    `tokens` positions the window stops and covers some final ones.
    """
    width = len(slots)
    start = position.clamp(max=tokens - width)
    return start + (slots - start) % width
