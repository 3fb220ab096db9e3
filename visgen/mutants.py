"""Samplers that are wrong on purpose, each as published code has been or might be: what a proof of exactness must see.

Every one of them is the shipped sampler with one label or one law changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visgen.decode.noise import Noise, Stream
from visgen.decode.verify import ring
from visgen.decode.warp import Warp
from visgen.nn.categorical import Categorical
from visgen.nn.coupling import Step
from visgen.samplers import Forward
from visgen.samplers._walk import along, step_mean
from visgen.samplers.cspec import CSpec, Walked
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


# -------------------------------------------------------------------------------------------- samplers of vectors


class Released(CSpec):
    """The rule of CSpD as it was released, for models of one variance: the densities of the last step alone, at a
    temperature of 42 in the test and of 1 in the residual, and nothing behind a refused draft is dropped."""

    temperature = 42.0

    def walk(
        self, state: Any, law: Any, index: Tensor, drafted: Tensor, path: Any, draws: Tensor, noise: Noise
    ) -> Walked:
        x, steps, predict = draws[0], len(state.spread), along(law, state.about)
        for j in range(steps):
            mean = step_mean(predict, x, state.table, j)
            x = mean + state.spread[j] * draws[1 + j]
        draft, other, spread = path.state[-1], path.mean[-1], state.spread[-1]
        chance = ((_energy(draft, other, spread) - _energy(draft, mean, spread)) / self.temperature**2).exp()  # p / q
        refused = drafted & (noise.uniform(index, 1, Stream.ACCEPT)[..., 0] > chance)
        x = torch.where((drafted & ~refused).unsqueeze(-1), draft, x)
        waiting = refused.clone()
        x = torch.where(refused.unsqueeze(-1), torch.zeros_like(x), x)  # what is left after 100 tries
        for k in range(100):
            if not waiting.any():
                break
            tried = mean + spread * noise.normal(index, x.shape[-1], Stream.RESIDUAL, 2 * k)
            kept = 1 - (_energy(tried, mean, spread) - _energy(tried, other, spread)).exp()  # 1 - q / p
            taken = waiting & (noise.uniform(index, 1, Stream.RESIDUAL, 2 * k + 1)[..., 0] < kept)
            x, waiting = torch.where(taken.unsqueeze(-1), tried, x), waiting & ~taken
        return Walked(x, drafted, drafted & ~refused, torch.zeros(steps, *index.shape))


class Unreflected(CSpec):
    """A step that is not the draft's is drawn by the draft's noise as it is."""

    def step(self, *of: Tensor) -> Step:
        mean, _, noise, spread, _, _ = of
        found = super().step(*of)
        return found._replace(state=torch.where(found.met.unsqueeze(-1), found.state, mean + spread * noise))


class NoRollback(CSpec):
    """Drafts behind one that was refused are tested, and stay, though they were drawn and tested given that one."""

    def walk(self, *of: Any) -> Walked:
        return super().walk(*of)._replace(kept=of[3])


def _energy(x: Tensor, mean: Tensor, spread: Tensor) -> Tensor:
    """-log density of N(mean, spread^2), up to a constant."""
    return ((x - mean) / spread).square().sum(-1) / 2
