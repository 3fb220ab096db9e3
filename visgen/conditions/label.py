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
        views: above 1, the model is also told which of so many views of a cached image it reads, and samples as it
            reads plain ones, view 0. Mirrors and shifts then delay memorising without being drawn (distribution
            augmentation, Jun et al. 2020, ICML).
    """

    classes: Positive = 1000
    dropout: Share = 0.1
    views: Positive = 1


class Label(Condition):
    """labels [B] int64 in [0, classes), and perhaps views [B] int64 in [0, views) -> one prefix slot."""

    prefix = 1

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.config = config
        self.embedding_table = nn.Embedding(config.classes + 1, width)
        self.view_table = nn.Embedding(config.views, width) if config.views > 1 else None

    def forward(self, batch: Mapping[str, Any], drop: Tensor | None = None) -> Prefix:
        label: Tensor = batch["label"]
        if drop is not None:
            label = torch.where(drop, self.config.classes, label)
        return self._prefix(label, batch.get("view"))

    def null(self, given: Prefix) -> Prefix:
        return self._prefix(torch.full(given.vectors.shape[:1], self.config.classes, device=given.vectors.device), None)

    def _prefix(self, label: Tensor, view: Tensor | None) -> Prefix:
        vectors = self.embedding_table(label)
        if self.view_table is not None:
            vectors = vectors + self.view_table(torch.zeros_like(label) if view is None else view)
        return Prefix(vectors.unsqueeze(1))  # [B, 1, D]
