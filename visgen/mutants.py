"""Samplers that are wrong on purpose, each as published code has been or might be: what a proof of exactness must see.

Every one of them is the shipped sampler with one label or one law changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visgen.decode.noise import Noise
from visgen.decode.verify import ring
from visgen.decode.warp import Warp
from visgen.nn.categorical import Categorical
from visgen.samplers import Forward
from visgen.samplers.sjd import SJD, State


class StaleLaw(SJD):
    """A draft that was kept keeps its old label, though it now follows the law that tested it."""

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        index, draft, laws = _window(state)
        super().iterate(state, forward, noise)
        kept = (_window(state)[0] == index) & (state.tokens.gather(1, index) == draft)  # no residual gives its draft
        _relabel(state, kept, laws)


class MislabelledInit(SJD):
    """First drafts that are copies (init `repeat`), labelled as if they had been drawn uniformly."""

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        index, _, laws = _window(state)
        super().iterate(state, forward, noise)
        _relabel(state, _window(state)[0] > index, torch.zeros_like(laws))


class LockStep(SJD):
    """Rows advance together, two by two; what the faster one has verified is tested again, under its old label."""

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        index, _, laws = _window(state)
        super().iterate(state, forward, noise)
        lowest = state.position.view(-1, 2).amin(1).repeat_interleave(2).unsqueeze(1)
        _relabel(state, (index >= lowest) & (index < state.position), laws)
        state.position.copy_(lowest)


class ResampledLaw(Categorical):
    """A refused draft is replaced by a draw from p instead of the residual."""

    def leftover(self, drawn_from: Categorical) -> Categorical:
        return self


class FilteredResidualLaw(Categorical):
    """The residual goes through the filters once more."""

    def leftover(self, drawn_from: Categorical) -> Categorical:
        return super().leftover(drawn_from).warped(Warp(temperature=0.7, top_p=0.9))


def _window(state: State) -> tuple[Tensor, Tensor, Tensor]:
    """Positions [B, W] of the slots, their drafts [B, W] and a copy of their labels [B, W, V]."""
    assert state.laws is not None
    index = ring(state.position, state.slots, state.tokens.shape[1])
    return index, state.tokens.gather(1, index), state.laws.clone()


def _relabel(state: State, where: Tensor, laws: Any) -> None:
    assert state.laws is not None
    state.laws.copy_(torch.where(where.unsqueeze(-1), laws, state.laws))
