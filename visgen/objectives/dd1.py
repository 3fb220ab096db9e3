"""Distilled Decoding 1: a student that draws all tokens at once learns its teacher's map from noise (arXiv 2412.17153).

The teacher turns the noise of an image into tokens one by one, each by the flow of its law (`samplers/_teacher.py`).
Given the noise that is a function, and the student learns it: by cross-entropy of every token, and if wanted by a
regression of the code vectors. In half of the samples the tokens before `second` are given, which is what the second
pass of sampling starts from. A batch says what is asked for, its labels, texts and control maps; its pictures are never
looked at, but for the maps. A teacher with control teaches the images of each map; the student then has it too.

Known of the authors' recipe: architecture, the set of starts {first token, t}, targets, EMA. Not published: weights of
the losses, how the tokens are split between them, and the optimiser. Here all tokens have the cross-entropy, so that
images are read from the logits alone; the perceptual loss is left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.checks import Weight
from visgen.config import UserError, plugin_config
from visgen.data import Batch
from visgen.decode.noise import Noise
from visgen.model import Model, ModelConfig
from visgen.nn.keyed import Rng, uniform
from visgen.objectives import Logs
from visgen.objectives._distilled import Distillation, PreviewConfig, TeacherConfig, asked, rows, start_from_teacher
from visgen.samplers._teacher import Teacher, noise_of

LATE = 0.5  # share of the rows whose tokens before `second` are given


def _model() -> ModelConfig:
    return ModelConfig(
        backbone=plugin_config("visgen.backbones", "one_step"),
        condition=plugin_config("visgen.conditions", "label", dropout=0.0),
    )


@dataclass(frozen=True)
class Config(TeacherConfig):
    """Distilled Decoding 1.

    Attributes:
        teacher, precision, captured: as of every distillation (`_distilled.TeacherConfig`).
        model: the student. Its backbone says for which second pass it is trained (`second`) and which guidance and
            filters its teacher's probabilities have, for good.
        start: from the teacher's weights, as published: condition, layers, norm, logits, control; or from scratch.
        regression: weight of the squared error of the code vectors; 0: the student has no such output.
        preview: images for the logger.
    """

    model: ModelConfig = field(default_factory=_model)
    start: Literal["teacher", "scratch"] = "teacher"
    regression: Weight = 0.0
    preview: PreviewConfig = field(default_factory=PreviewConfig)


class DD1(Distillation):
    """`nets["student"]` returns the mean cross-entropy of the teacher's tokens given their noise."""

    held_out_values = ("nats_per_token", "agreement")
    larger_is_better = ("agreement",)

    def __init__(self, config: Config) -> None:
        model = Model(config.model)
        _check_student(model, config.regression)
        super().__init__(config, model)
        self.nets = {"student": StudentNet(model, config.regression)}

    def start(self, model: Any, teacher: Teacher) -> None:
        if self.config.start == "teacher":
            start_from_teacher(model, teacher.model)

    def loss(self, name: str, nets: dict[str, nn.Module], batch: Batch, step: int, rng: Rng) -> tuple[Tensor, Logs]:
        batch = self.mapped(batch, rng)
        count, device = rows(batch), self.exported().parameter_device()
        seeds = self.seeds(batch, rng)
        tokens = self.tokens(batch, seeds)
        second = self.config.model.backbone.second
        late = uniform((count,), rng, device) < (LATE if second else 0.0)
        values, level = inputs(self.exported(), tokens, seeds, second * late.long())
        return nets[name](values, level, tokens, asked(batch))

    def held_out(self, model: Any, batch: Batch) -> Logs:
        """Cross-entropy of one pass, and how many of its tokens are the teacher's."""
        batch = self.mapped(batch)
        seeds = self.seeds(batch)
        tokens = self.tokens(batch, seeds)
        values, level = inputs(model, tokens, seeds, torch.zeros_like(seeds))
        h = hidden(model, values, level, asked(batch))[0]
        law = model.head.dist(h.unsqueeze(0), torch.ones(1, *tokens.shape, device=tokens.device))
        same = (law.likeliest() == tokens).float().mean()
        return {"nats_per_token": -law.log_prob(tokens).mean(), "agreement": same}


class StudentNet(nn.Module):
    """Noise or codes [B, N, C], which of them is noise [B, N], the teacher's tokens [B, N] -> (loss, logs)."""

    def __init__(self, model: Model, regression: float) -> None:
        super().__init__()
        self.model, self.regression = model, regression

    def expected(self, rows: int) -> float:
        """Mean number of tokens with a loss. Losses are divided by it, not by the number that was drawn, so that a step
        is the same however its rows are dealt out over processes and micro-batches."""
        backbone: Any = self.model.backbone
        return rows * (self.model.tokens - LATE * backbone.config.second)

    def forward(self, values: Tensor, level: Tensor, tokens: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Logs]:
        h, cond = hidden(self.model, values, level, batch)
        loss = (self.model.head.loss(h, tokens) * level).sum()
        logs = {"nats_per_token": loss.detach() / level.sum()}
        count = self.expected(len(tokens))
        loss = loss / count
        if self.regression:
            backbone: Any = self.model.backbone
            far = (backbone.vectors(h, cond) - backbone.codes[tokens]).square().mean(-1)
            far = (far * level).sum() / count
            loss, logs["mse"] = loss + self.regression * far, far.detach()
        return loss, logs


def hidden(model: Any, values: Tensor, level: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Any]:
    """h [B, N, D] of the slots of the tokens, and the condition."""
    cond = model.condition(batch)
    h = model.backbone(values, None, cond=cond, level=level, control=model.controlled(batch))
    return h[:, model.condition.prefix :], cond


def inputs(model: Any, tokens: Tensor, seeds: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """What a student reads whose pass begins at token start [B]: codes before it, noise from there on [B, N, C]; and
    where there is noise [B, N]."""
    index = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    codes = model.backbone.codes
    noise, fresh = noise_of(Noise(seeds), index, codes.shape[1]), index >= start.unsqueeze(1)
    return torch.where(fresh.unsqueeze(-1), noise, codes[tokens].float()), fresh.float()


def _check_student(model: Any, regression: float) -> None:
    config = model.config
    if model.backbone.shift or not hasattr(config.backbone, "second"):
        raise UserError(
            f"objective dd1 trains a one-step student, objective.model.backbone is {configs.kind_of(config.backbone)}; "
            "set its kind to one_step"
        )
    if config.backbone.regress != (regression > 0):
        raise UserError(
            f"objective.regression is {regression}, objective.model.backbone.regress is {config.backbone.regress}; "
            "set both, or none"
        )
