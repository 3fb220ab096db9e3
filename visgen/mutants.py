"""Samplers that are wrong on purpose, each as published code has been or might be: what a proof of exactness must see.

Every one of them is the shipped sampler with one label or one law changed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visgen.decode import refill
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise, Stream
from visgen.decode.verify import ring
from visgen.decode.warp import Warp
from visgen.nn.categorical import Categorical
from visgen.nn.coupling import Step
from visgen.samplers import Forward
from visgen.samplers._walk import along, step_mean
from visgen.samplers._window import trials
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


class SharedNoise(Categorical):
    """Whether a draft stays is drawn by the noise that drafts of `gumbel` share, not by noise of its own."""

    def accept(
        self,
        draft: Tensor,
        drawn_from: Categorical,
        noise: Any,
        index: Tensor,
        stream: int,
        iteration: Any = 0,
        where: Tensor | None = None,
    ) -> Tensor:
        return super().accept(draft, drawn_from, noise, index, Stream.TOKEN, 0, where)


class RoundedRatio(Categorical):
    """p / q of a test is taken in bfloat16, as half-precision code that never casts would take it."""

    def acceptance(self, draft: Tensor, drawn_from: Categorical) -> Tensor:
        ratio = self.log_prob(draft).bfloat16() - drawn_from.log_prob(draft).bfloat16()
        return ratio.exp().clamp(max=1).nan_to_num(nan=0.0).to(self.logits.dtype)


class TrialOfImages(SJD):
    """`window: auto` as it was: its trial draws with the seeds of the images, so their tokens choose their window."""

    def init(self, engine: Engine, noise: Noise) -> State:
        chosen = trials(self, engine, noise)
        return self.begin(engine, chosen["window"], chosen)


class FreeDrafts(SJD):
    """First drafts take no notice of known tokens, and say so: exact by itself, and not with an `UnpinnedLaw`."""

    def begin(self, engine: Engine, window: int, chosen: dict[str, Any] | None = None) -> State:
        state = super().begin(engine, window, chosen)
        state.known = None
        return state


class UnpinnedLaw(Categorical):
    """Known tokens are certain in the test of a draft, but not in what replaces a refused one."""

    free: Tensor | None = None  # logits before known tokens

    def pin(self, tokens: Tensor, mask: Tensor) -> Categorical:
        pinned = super().pin(tokens, mask)
        pinned.free = self.logits  # type: ignore[attr-defined]
        return pinned

    def leftover(self, drawn_from: Categorical) -> Categorical:
        return super().leftover(drawn_from) if self.free is None else self.like(self.free).leftover(drawn_from)


class UncontrolledTest(SJD):
    """Drafts are tested against what the model says without the control; all else is as it should be."""

    def init(self, engine: Engine, noise: Noise) -> State:
        self.engine = engine
        return super().init(engine, noise)

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        def forked(tokens: Tensor, index: Tensor) -> Any:
            kept, self.engine._control = self.engine._control, None
            plain = forward(tokens, index)
            self.engine._control = kept
            law = TestedByAnother(forward(tokens, index).logits)  # whose keys and values stay in the cache
            law.other = plain
            return law

        super().iterate(state, forked, noise)


class TestedByAnother(Categorical):
    """A law whose drafts another law tests."""

    other: Categorical | None = None

    def acceptance(self, draft: Tensor, drawn_from: Categorical) -> Tensor:
        if self.other is None:
            return super().acceptance(draft, drawn_from)
        return self.other.acceptance(draft, drawn_from)


class NeighboursLaw(SJD):
    """Row i follows the law of row i + 1, which is an image of another class where a batch mixes them."""

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        def turned(tokens: Tensor, index: Tensor) -> Any:
            law = forward(tokens, index)
            return law.like(law.logits.roll(-1, 0))

        super().iterate(state, turned, noise)


class UnwrittenLabels(SJD):
    """The kernel that tests a window leaves the labels of its drafts as they were."""

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        def unwritten(tokens: Tensor, index: Tensor) -> Any:
            law = forward(tokens, index)
            test = law.test
            law.test = lambda *given, **rule: test(*given, **{**rule, "relabel": False})
            return law

        super().iterate(state, unwritten, noise)


class OldNoise(refill.Slots):
    """A row goes on with the next image by the noise of the image that it has completed."""

    def start(self, row: Tensor, image: Tensor) -> None:
        kept = self.noise.seeds.clone()
        super().start(row, image)
        self.noise.seeds.copy_(kept)


class LateGuidance(Guidance):
    """Interval and schedule are those of the token behind."""

    def weights(self, index: Tensor, tokens: int) -> Tensor:
        return super().weights((index + 1).clamp(max=tokens - 1), tokens)


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
