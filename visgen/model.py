"""A generative model: backbone, condition and head over one token grid."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.backbones import Backbone
from visgen.checks import Positive
from visgen.conditions import Condition
from visgen.config import UserError, plugin
from visgen.heads import Head
from visgen.layout import Grid, Layout
from visgen.tokenizers import Tokenizer


@dataclass(frozen=True)
class ModelConfig:
    """What a model is made of.

    Attributes:
        grid: (T, H, W) of its tokens; must be the tokenizer's.
        vocab: number of codes; must be the tokenizer's.
        backbone, condition, head: plugins.
    """

    grid: tuple[Positive, Positive, Positive] = (1, 16, 16)
    vocab: Positive = 16384
    backbone: Any = plugin("visgen.backbones", "ar")
    condition: Any = plugin("visgen.conditions", "label")
    head: Any = plugin("visgen.heads", "categorical")


class Model(nn.Module):
    """Backbone, condition and head. `h = model.backbone(...)`, `model.head` turns h into a loss or a law."""

    backbone: Backbone
    condition: Condition
    head: Head

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.backbone.width
        self.condition = configs.build(config.condition, width)
        for table in self.condition.modules():
            if isinstance(table, nn.Linear | nn.Embedding):
                nn.init.normal_(table.weight, std=0.02)
        layout = Layout.raster(config.grid).with_prefix(self.condition.prefix)
        self.backbone = configs.build(config.backbone, layout, config.vocab)
        self.head = configs.build(config.head, width, config.vocab)

    @property
    def grid(self) -> Grid:
        return self.config.grid

    @property
    def tokens(self) -> int:
        """Number N of tokens."""
        return self.backbone.layout.tokens

    def loss(self, tokens: Tensor, batch: Mapping[str, Any], drop: Tensor | None) -> Tensor:
        """Teacher-forced loss per token [B, N] of tokens [B, N] under the batch's condition."""
        cond = self.condition(batch, drop)
        h = self.backbone(tokens[:, :-1], None, cond=cond)  # [B, P + N - 1, D]
        return self.head.loss(h[:, self.condition.prefix - 1 :], tokens)

    def check_tokenizer(self, tokenizer: Tokenizer, where: str = "tokenizer") -> None:
        """Refuses a tokenizer whose tokens are not the ones this model was made for."""
        for name, mine, its in (
            ("grid", tuple(self.config.grid), tuple(tokenizer.grid)),
            ("vocab", self.config.vocab, tokenizer.vocab),
        ):
            if mine != its:
                raise UserError(
                    f"{where}: its {name} is {its}, the model's is {mine}; use the tokenizer the model was trained with"
                )

    def parameter_device(self) -> torch.device:
        return next(self.parameters()).device
