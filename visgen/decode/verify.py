"""Verification of drafts: the one rule behind every lossless sampler of the family.

A draft d with the law q *that it was truly drawn from* meets the law p of its position, guided and filtered. It stays
with probability min(1, p(d) / q(d)), else norm(max(p - q, 0)) replaces it, so what is there afterwards follows p
(speculative sampling, Leviathan et al. 2023, arXiv 2211.17192, section 2.3; Chen et al. 2023, arXiv 2302.01318).
Filters act on p and q before the ratio, never on the residual. What else must hold when drafts live on over several
iterations: `docs/methods.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from visgen.decode.noise import Noise, Stream
from visgen.heads import Testable


@dataclass
class Verdict:
    """What a window's drafts have become.

    Attributes:
        tokens: [B, W] the drafts that stay, and draws from the residual in place of those that do not.
        first: [B, 1] position of the first draft that did not stay, of the window's last one if all did. Tokens up to
            and with it are final: each follows its law given final tokens.
    """

    tokens: Tensor
    first: Tensor


def verify(
    law: Testable,
    draft: Tensor,
    drawn_from: Testable,
    noise: Noise,
    index: Tensor,
    waiting: Tensor,
    iteration: Tensor,
    every: bool,
) -> Verdict:
    """Tests a window's drafts, all at once and without a look at any value.

    Args:
        law: p, the law of each position given the drafts before it.
        draft: [B, W] ids.
        drawn_from: q, the law each draft was drawn from.
        index: [B, W] distinct positions, in any order.
        waiting: [B, W] bool; tokens elsewhere are final already and stay.
        iteration: [B, 1], keys the noise.
        every: replace every refused draft (maximal coupling), or only the first, after which the caller redraws.
    """
    kept = law.accept(draft, drawn_from, noise, index, Stream.ACCEPT, iteration, waiting) | ~waiting
    first = first_of(~kept, index)
    replaced = ~kept if every else ~kept & (index == first)
    redrawn = law.residual(drawn_from, noise, index, Stream.RESIDUAL, iteration, replaced)
    return Verdict(torch.where(replaced, redrawn, draft), first)


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
