"""Distilled Decoding 2, stage 1: the teacher's trunk learns to predict the score of its own next token.

The logits of the teacher give way to a small head that predicts, for a noised token, the velocity of the mixture of all
codes under the teacher's law (`nn/mixture.py`; arXiv 2510.21003, section 3.5, "AR-diffusion tuning" with the loss GTS):

    E_t,e | head((1 - t) q_i + t e, t, f_i) - v_Phi |^2,   q the teacher's tokens, f_i of those before i

The target is exact, where plain diffusion training has a single draw e - q_i of it. `objectives/dd2.py` starts both of
its networks from the result. Not published, so ours: the law of t (that of the head, within `times`), how many noises
each token gets (the head's `repeats`), and that the loss is that of the velocity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from visgen.checks import Share
from visgen.data import Batch
from visgen.model import Model, ModelConfig
from visgen.nn.keyed import Rng
from visgen.nn.mixture import posterior, velocity
from visgen.objectives import Logs
from visgen.objectives._dd2 import check_form, draws, model_config, predicted
from visgen.objectives._distilled import (
    Distillation,
    PreviewConfig,
    TeacherConfig,
    asked,
    features,
    start_from_teacher,
)
from visgen.samplers._teacher import Teacher


@dataclass(frozen=True)
class Config(TeacherConfig):
    """Stage 1 of Distilled Decoding 2.

    Attributes:
        teacher, precision, captured: as of every distillation (`_distilled.TeacherConfig`).
        model: the network. Its backbone holds guidance and filters of the teacher's probabilities, for good.
        times: between which t lies; codes have unit variance, so below the first one every code is known.
        preview: images for the logger, by one step of the network as a generator.
    """

    model: ModelConfig = field(default_factory=model_config)
    times: tuple[Share, Share] = (0.04, 0.98)
    preview: PreviewConfig = field(default_factory=PreviewConfig)


class DD2Tuning(Distillation):
    """`nets["student"]` returns the mean squared error of the velocity."""

    needs_laws = True
    held_out_values = ("mse",)

    def __init__(self, config: Config) -> None:
        model = Model(config.model)
        check_form(model, config.times, "dd2_tuning")
        super().__init__(config, model)
        self.nets = {"student": TunedNet(model)}

    def start(self, model: Any, teacher: Teacher) -> None:
        start_from_teacher(model, teacher.model, head=False)

    def loss(self, name: str, nets: dict[str, nn.Module], batch: Batch, step: int, rng: Rng) -> tuple[Tensor, Logs]:
        batch = self.mapped(batch, rng)
        return nets[name](*self._lesson(batch, self.seeds(batch, rng), rng), asked(batch))

    @torch.no_grad()
    def _lesson(self, batch: Batch, seeds: Tensor, rng: Rng) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Codes [B, N, C] of the teacher's tokens; them noised [R, B, N, C] at times [R, B, N, 1], and the exact
        velocities there."""
        tokens, model = self.tokens(batch, seeds), self.exported()
        codes, logp = model.backbone.codes, self.laws(batch, tokens).flatten(0, 1)
        clean = codes[tokens]
        t, noise = draws(model.head, clean, model.head.config.repeats, self.config.times, rng)
        x = (1 - t) * clean + t * noise
        exact = [
            velocity(each, time, posterior(each, time, logp, codes, covariance=False).mean).view_as(clean)
            for each, time in zip(x.flatten(1, 2), t.flatten(1, 2), strict=True)
        ]
        return clean, x, t, torch.stack(exact)

    def held_out(self, model: Any, batch: Batch) -> Logs:
        """The loss on tokens, times and noise that are the same every time."""
        batch = self.mapped(batch)
        rng = torch.Generator(model.parameter_device()).manual_seed(0)
        clean, x, t, exact = self._lesson(batch, self.seeds(batch), rng)
        return {"mse": (predicted(model, x, t, features(model, clean, asked(batch))) - exact).square().mean()}


class TunedNet(nn.Module):
    """Codes before each token, noised tokens, times, exact velocities -> (loss, logs)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, clean: Tensor, x: Tensor, t: Tensor, exact: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Logs]:
        found = predicted(self.model, x, t, features(self.model, clean, batch))
        return (found - exact).square().mean(), {}
