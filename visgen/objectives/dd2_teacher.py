"""Distilled Decoding 2, stage 0: a teacher that reads code vectors, so that it can be told what is no code.

(arXiv 2510.21003, appendix E.4.) The teacher's table of embeddings gives way to an MLP of the code's vector, which is
first fitted to the table; then the whole model is tuned until it says what the teacher said. Only `objectives/dd2.py`
with `prefix: continuous` needs it.

The paper tunes by the ordinary loss of next tokens. Here the target is the teacher's whole law, given tokens that it
drew itself: the same optimum without the noise of a draw, and no data. A share of rows, the condition's dropout, has no
condition, for guidance needs that law too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from visgen.checks import Natural
from visgen.config import UserError, plugin_config
from visgen.data import Batch
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.model import Model, ModelConfig
from visgen.nn.keyed import Rng, uniform
from visgen.objectives import Logs
from visgen.objectives._distilled import Distillation, TeacherConfig, asked, features, rows, start_from_teacher
from visgen.samplers._teacher import Teacher


@dataclass(frozen=True)
class Config(TeacherConfig):
    """Stage 0 of Distilled Decoding 2.

    Attributes:
        teacher, precision, captured: as of every distillation (`_distilled.TeacherConfig`).
        model: the teacher's, but for `backbone.code_channels`.
        guidance, warp: by which the teacher draws the tokens; those that the student will learn.
        fit_steps: steps in which the MLP alone is fitted to the table.
    """

    model: ModelConfig = field(
        default_factory=lambda: ModelConfig(backbone=plugin_config("visgen.backbones", "ar", code_channels=8))
    )
    guidance: Guidance = field(default_factory=Guidance)
    warp: Warp = field(default_factory=Warp)
    fit_steps: Natural = 2000


class DD2Teacher(Distillation):
    """`nets["model"]` returns the cross-entropy of the teacher's law, or at first the error of the embeddings."""

    export = "model"
    needs_laws = True
    held_out_values = ("nats_per_token", "excess")

    def __init__(self, config: Config) -> None:
        model = Model(config.model)
        if getattr(model.backbone, "codes", None) is None or model.backbone.taught is not None:
            raise UserError(
                "objective dd2_teacher trains a model that reads code vectors; set objective.model.backbone to kind ar "
                "and its code_channels to the tokenizer's channels"
            )
        super().__init__(config, model)
        self.nets = {"model": ReaderNet(model)}

    @property
    def taught(self) -> tuple[Guidance, Warp]:
        return self.config.guidance, self.config.warp

    def start(self, model: Any, teacher: Teacher) -> None:
        if teacher.model.backbone.codes is not None:
            raise UserError(f"objective.teacher {self.config.teacher} reads code vectors already; use it as it is")
        start_from_teacher(model, teacher.model)

    def loss(self, name: str, nets: dict[str, nn.Module], batch: Batch, step: int, rng: Rng) -> tuple[Tensor, Logs]:
        batch = self.mapped(batch, rng)
        tokens, teacher = self.tokens(batch, self.seeds(batch, rng)), self.frozen["teacher"]
        rate = self.config.model.condition.dropout
        drop = uniform((rows(batch),), rng, tokens.device) < rate if rate else None
        with torch.no_grad():
            wanted = _logits(teacher, tokens, asked(batch), drop)
        table = teacher.backbone.tok_embeddings.weight.float()  # type: ignore[union-attr]
        return nets[name](tokens, wanted, table, step < self.config.fit_steps, asked(batch), drop)

    def held_out(self, model: Any, batch: Batch) -> Logs:
        """Cross-entropy of the teacher's law with the condition, and what of it is not the teacher's own entropy."""
        batch = self.mapped(batch)
        tokens = self.tokens(batch, self.seeds(batch))
        wanted = _logits(self.frozen["teacher"], tokens, asked(batch), None)
        nats, excess = _surprise(_logits(model, tokens, asked(batch), None), wanted)
        return {"nats_per_token": nats, "excess": excess}

    def preview(self, model: nn.Module, batch: Batch, seed: int) -> None:
        """None: its images are the teacher's."""


class ReaderNet(nn.Module):
    """Tokens [B, N], the teacher's logits [B, N, V], its table [V, D] -> (loss, logs)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        tokens: Tensor,
        wanted: Tensor,
        table: Tensor,
        fitting: bool,
        batch: dict[str, Any],
        drop: Tensor | None,
    ) -> tuple[Tensor, Logs]:
        backbone: Any = self.model.backbone
        found = backbone.tok_embeddings(backbone.codes)
        error = (found.float() - table).square().mean() / table.square().mean()
        nats, excess = _surprise(_logits(self.model, tokens, batch, drop), wanted)
        # both, so that every parameter has a gradient in every step, if of zeros
        loss = error + 0 * nats if fitting else nats + 0 * error
        return loss, {"embedding_error": error.detach(), "excess": excess.detach()}


def _logits(model: Any, tokens: Tensor, batch: dict[str, Any], drop: Tensor | None) -> Tensor:
    """[B, N, V] float32, unguided."""
    h = features(model, tokens, batch, drop).unsqueeze(0)
    return model.head.dist(h, torch.ones(1, *tokens.shape, device=tokens.device)).logits


def _surprise(logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy of the law of `wanted` [B, N, V] in nats a token, and that less its entropy."""
    law = wanted.log_softmax(-1)
    nats = -(law.exp() * logits.log_softmax(-1)).sum(-1).mean()
    return nats, nats + (law.exp() * law).sum(-1).mean()
