"""Class labels: one learned vector per class, one more for the null class (LlamaGen section 2.5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visgen.checks import Positive, Share
from visgen.conditions import Condition, Prefix


@dataclass(frozen=True)
class Config:
    """Label condition.

    Attributes:
        classes: number of classes, the data's; row `classes` of the table is the null class.
        dropout: probability that training replaces a sample's label by the null class.
    """

    classes: Positive = 1000
    dropout: Share = 0.1


class Label(Condition):
    """labels [B] int64 in [0, classes) -> one prefix slot."""

    prefix = 1

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.config = config
        self.embedding_table = nn.Embedding(config.classes + 1, width)

    def forward(self, batch: Mapping[str, Any], drop: Tensor | None = None) -> Prefix:
        label: Tensor = batch["label"]
        if drop is not None:
            label = torch.where(drop, self.config.classes, label)
        return Prefix(self.embedding_table(label).unsqueeze(1))  # [B, 1, D]

    def null(self, given: Prefix) -> Prefix:
        label = torch.full(given.vectors.shape[:1], self.config.classes, device=given.vectors.device)
        return Prefix(self.embedding_table(label).unsqueeze(1))
