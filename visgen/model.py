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
from visgen.layout import Grid
from visgen.tokenizers import Tokenizer


@dataclass(frozen=True)
class ModelConfig:
    """What a model is made of.

    Attributes:
        grid: (T, H, W) of its tokens; must be the tokenizer's.
        vocab: number of codes; must be the tokenizer's.
        backbone, condition, head: plugins.
        channels: width C of continuous tokens, which have no vocab; must be the tokenizer's.
    """

    grid: tuple[Positive, Positive, Positive] = (1, 16, 16)
    vocab: Positive = 16384
    backbone: Any = plugin("visgen.backbones", "ar")
    condition: Any = plugin("visgen.conditions", "label")
    head: Any = plugin("visgen.heads", "categorical")
    channels: Positive | None = None


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
        kind = configs.implementation(config.backbone)
        self._check_parts(kind.continuous, configs.implementation(config.head).continuous)  # type: ignore[attr-defined]
        layout = kind.arrange(config.backbone, config.grid, self.condition.prefix)  # type: ignore[attr-defined]
        self.backbone = configs.build(config.backbone, layout, config.channels or config.vocab)
        self.head = configs.build(config.head, width, config.channels or config.vocab)

    def _check_parts(self, backbone: bool, head: bool) -> None:
        """Refuses parts of which some are for continuous tokens and some are not."""
        config, wanted = self.config, "continuous tokens" if backbone else "codes"
        if head != backbone:
            raise UserError(
                f"model.backbone {configs.kind_of(config.backbone)} is for {wanted}, model.head "
                f"{configs.kind_of(config.head)} is not; choose a head for them"
            )
        if backbone != (config.channels is not None):
            remedy = "set it to the tokenizer's" if backbone else "leave it out"
            raise UserError(
                f"model.channels is {config.channels}, model.backbone {configs.kind_of(config.backbone)} is for "
                f"{wanted}; {remedy}"
            )

    @property
    def continuous(self) -> bool:
        """Whether tokens are vectors."""
        return self.config.channels is not None

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
        grid, its_grid = tuple(self.config.grid), tuple(tokenizer.grid)
        if its_grid[0] == 1:  # it takes any number of frames, one by one
            its_grid = (grid[0], *its_grid[1:])
        for name, mine, its in (
            ("grid", grid, its_grid),
            ("vocab", None if self.continuous else self.config.vocab, tokenizer.vocab),
            ("channels", self.config.channels, None if tokenizer.vocab else tokenizer.channels),
        ):
            if mine != its:
                raise UserError(
                    f"{where}: its {name} is {its}, the model's is {mine}; use the tokenizer the model was trained with"
                )

    def parameter_device(self) -> torch.device:
        return next(self.parameters()).device
