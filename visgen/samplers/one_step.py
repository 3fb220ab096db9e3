"""A one-step student: all tokens from their noise in one pass, or two (Distilled Decoding 1 and 2, arXiv 2412.17153 and
2510.21003).

    1 pass     tokens = f(noise)
    2 passes   tokens before t are kept, the others get their noise back, and f draws them anew
    assisted   2 passes: tokens first .. t - 1 are the teacher's, one by one; then the pass from t on (DD1)
               1 pass: the teacher draws all tokens from `first` on anew, one by one (DD2, algorithm 4)

with t the student's `second`. A token is the most likely one, or the code nearest to a student's vector: all chance is
in the noise, which the seed fixes. The teacher maps the same noise (`draw: map`), so an assisted image is still a
function of its seed and lies nearer to the teacher's own; `random` draws instead, as the released code does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from visgen.checks import Natural
from visgen.config import UserError
from visgen.decode.engine import Engine
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise, Stream
from visgen.decode.warp import Warp
from visgen.quantizers.vq import nearest
from visgen.samplers import Forward, Sampler
from visgen.samplers._teacher import codes_of, mapped, noise_of, read_teacher


@dataclass(frozen=True)
class Config:
    """Sampling of a one-step student.

    Attributes:
        passes: 1, or 2 of a student that was trained for it.
        teacher: run directory of its teacher, which draws a span of tokens between the two passes, or after one.
        first: where that span begins; it ends where the second pass begins, or with the last token. At 0 the first
            pass is left out.
        draw: how the teacher draws: by the map from the tokens' noise, or at random.
        split: tokens from this one on are the nearest code of the student's second output; None: none of them.
    """

    passes: Literal[1, 2] = 1
    teacher: Path | None = None
    first: Natural = 0
    draw: Literal["map", "random"] = "map"
    split: Natural | None = None


@dataclass
class State:
    tokens: Tensor  # [B, N]
    rounds: Tensor  # [B, N]
    noise: Tensor  # [B, N, C]
    codes: Tensor  # [V, C] of the student's input
    fixed: Tensor  # [B, N] bool, known tokens
    starts: Tensor  # [I] where each pass begins
    step: Tensor  # [1]
    second: int  # where the second pass begins
    whole: Callable[[Tensor, Tensor], tuple[Any, Tensor]]
    vectors: Callable[[Tensor], Tensor]
    helper: tuple[Engine, Tensor] | None  # the teacher's engine, and codes [V, C] of the map


class OneStep(Sampler):
    """Takes the most likely token of every slot, in one or two passes."""

    whole = True

    def __init__(self, config: Config) -> None:
        self.config = config

    def init(self, engine: Engine, noise: Noise) -> State:
        self._check(engine)
        backbone = engine.model.backbone
        second = _second(engine)
        index = torch.arange(engine.tokens, device=engine.device).expand(engine.batch, -1)
        tokens, fixed = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
        if engine.known is not None:
            fixed = engine.known[1].clone()
            tokens = torch.where(fixed, engine.known[0], tokens)
        helper = None
        if self.config.teacher is not None:
            key = "teacher", self.config.teacher
            helper = engine.once(key, lambda: _helper(self.config.teacher, engine))
            helper[0].begin(engine.given, engine.known)
            helper[0].unsound = engine.unsound
        return State(
            tokens=tokens.clone(),
            rounds=self._rounds(engine, index),
            noise=noise_of(noise, index, backbone.config.channels),
            codes=backbone.codes,
            fixed=fixed,
            starts=torch.tensor([0, second][: self.config.passes], device=engine.device),
            step=torch.zeros(1, dtype=torch.int64, device=engine.device),
            second=second if self.config.passes == 2 else engine.tokens,
            whole=engine.whole,
            vectors=lambda h: backbone.vectors(h, engine.condition),
            helper=helper,
        )

    def iterate(self, state: State, forward: Forward, noise: Noise) -> None:
        if state.helper is None:
            self._pass(state, state.starts.index_select(0, state.step))
            state.step += 1
            return
        if self.config.first:
            self._pass(state, state.starts[:1])
        self._span(state, *state.helper, noise)
        if self.config.passes == 2:
            self._pass(state, state.starts[1:])

    def _pass(self, state: State, start: Tensor) -> None:
        """Draws the tokens from `start` [1] on, given those before it."""
        index = torch.arange(state.tokens.shape[1], device=start.device).unsqueeze(0)
        fresh = index >= start  # [1, N]
        noisy = fresh & ~state.fixed
        values = torch.where(noisy.unsqueeze(-1), state.noise, state.codes[state.tokens].to(state.noise.dtype))
        law, h = state.whole(values, noisy.float())
        drawn = law.likeliest()
        if self.config.split is not None:
            found = state.vectors(h)
            near = nearest(found.flatten(0, 1), state.codes.float())[0].view_as(drawn)
            drawn = torch.where((index >= self.config.split) & noisy, near, drawn)
        state.tokens.copy_(torch.where(noisy, drawn, state.tokens))

    def _span(self, state: State, teacher: Engine, codes: Tensor, noise: Noise) -> None:
        """The teacher's tokens from `first` up to the second pass, or the end. It reads those before them at once."""
        rows, device = len(state.tokens), state.tokens.device
        for i in range(self.config.first, state.second):
            at = torch.full((rows, 1), i, device=device)
            read = torch.arange(i + 1, device=device).expand(rows, -1) if i == self.config.first else at
            law = teacher.forward(state.tokens, read)
            law = law.like(law.logits[:, -1:])
            if self.config.draw == "map":
                drawn = mapped(law, state.noise[:, i : i + 1], codes)
            else:
                drawn = law.draw(noise, at, Stream.TOKEN)
            state.tokens.scatter_(1, at, drawn)

    def iterations(self, engine: Engine) -> int:
        return 1 if self.config.teacher is not None else self.config.passes

    def notes(self, state: State) -> dict[str, Any]:
        span = state.second - self.config.first if state.helper is not None else 0
        return {"passes": self.config.passes - (span > 0 and self.config.first == 0), "teacher_evaluations": span}

    def _rounds(self, engine: Engine, index: Tensor) -> Tensor:
        """[B, N] the evaluation, of student or teacher, that fixes each token."""
        second = _second(engine) if self.config.passes == 2 else engine.tokens
        if self.config.teacher is None:
            return 1 + (index >= second).long()
        first = self.config.first
        span = int(first > 0) + 1 + (index - first).clamp(0, second - first - 1)
        return torch.where(index < first, 1, span + (index >= second).long())

    def _check(self, engine: Engine) -> None:
        config, second = self.config, _second(engine)
        if (engine.guidance, engine.warp) != (Guidance(), Warp()):
            raise UserError("a one-step student holds its teacher's guidance and filters; leave guidance and warp out")
        if config.passes == 2 and not second:
            raise UserError("sampler.passes 2: this student was trained for one pass alone; set it to 1")
        end = second if config.passes == 2 else engine.tokens
        if config.teacher is None and (config.first or config.draw != "map"):
            raise UserError("sampler.first and sampler.draw are about sampler.teacher; give it, or leave them out")
        if config.teacher is not None and config.first >= end:
            raise UserError(
                f"sampler.first is {config.first}, but sampler.teacher draws tokens before {end}; set it below {end}"
            )
        if config.split is not None and not getattr(engine.model.backbone.config, "regress", False):
            raise UserError("sampler.split reads a second output that this student does not have; leave it out")


def _second(engine: Engine) -> int:
    """Where the second pass begins that the student was trained for; 0: none."""
    return getattr(engine.model.backbone.config, "second", 0)


def _helper(path: Path | None, engine: Engine) -> tuple[Engine, Tensor]:
    """An engine of the teacher, by the settings that the student has learned, and the codes of the map.

    Raises:
        UserError: no teacher, another than the student's, or one of other tokens or another condition.
    """
    guidance, warp = engine.model.backbone.taught
    teacher = read_teacher(path, guidance, "sampler.teacher")
    its, mine = teacher.model.config, engine.model.config
    learned = engine.model.teacher
    given: dict[str, tuple[Any, Any]] = {
        "hash": (teacher.hash[:12], learned[:12] or teacher.hash[:12]),
        "grid": (tuple(its.grid), tuple(its.grid if learned else mine.grid)),  # a known student may draw other sizes
        "vocab": (its.vocab, mine.vocab),
        "tokenizer": (teacher.tokenizer_hash[:12], engine.tokenizer or teacher.tokenizer_hash[:12]),
        "classes": (getattr(its.condition, "classes", None), getattr(mine.condition, "classes", None)),
    }
    for name, (one, other) in given.items():
        if one != other:
            raise UserError(
                f"sampler.teacher {path}: its {name} is {one}, the student's is {other}; pass the teacher that the "
                "student learned from"
            )
    model = teacher.model.at(engine.model.grid).to(engine.device, engine.dtype).eval()
    codes = codes_of(teacher.tokenizer.to(engine.device))
    return type(engine)(model, guidance, warp), codes
