"""Conditions: what an image is asked to show, as prefix slots of the sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Prefix(NamedTuple):
    """Condition slots of B rows."""

    vectors: Tensor  # [B, P, D]
    visible: Tensor | None = None  # [B, P] bool, False = padding that nothing may attend to; None = all visible

    @staticmethod
    def cat(parts: list[Prefix]) -> Prefix:
        """Stacks rows: the guidance branches of one batch."""
        visible = None if parts[0].visible is None else torch.cat([p.visible for p in parts if p.visible is not None])
        return Prefix(torch.cat([p.vectors for p in parts]), visible)


class Condition(nn.Module, ABC):
    """Built as `Condition(config, width)`.

    Attributes:
        prefix: number P of slots.
        coords: [P, 3] int64 (t, y, x), of slots that stand for places of the image; None: no slot does.
    """

    prefix: int
    coords: Tensor | None = None

    @abstractmethod
    def forward(self, batch: Mapping[str, Any], drop: Tensor | None = None) -> Prefix:
        """Condition of a batch; rows where drop [B] bool is true get the null condition (guidance training)."""

    @abstractmethod
    def null(self, given: Prefix) -> Prefix:
        """The null condition for the rows of `given` (which keep their padding)."""
