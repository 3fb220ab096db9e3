"""A label and a control map as a prefix: one slot for each control token, then the label's.

The usual way to condition a transformer, and what ControlAR's conditional decoding (`nn/control.py`) is compared with
(arXiv:2410.02705, section 3.2): the sequence is twice as long, and each token must look its control token up. A control
slot stands at its cell of the grid, so that the rotary positions tell where it belongs; it sees the slots before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visgen.checks import Positive, Share
from visgen.conditions import Condition, Prefix
from visgen.config import UserError, plugin
from visgen.layout import grid_coords
from visgen.nn.control import ControlEncoder, check_map, hints_of
from visgen.nn.mlp import Projection


@dataclass(frozen=True)
class Config:
    """Prefilled control.

    Attributes:
        control: the kind of map, and the encoder that reads it.
        grid: of the tokens, the model's.
        classes: number of classes, the data's; row `classes` of the table is the null class.
        dropout: probability that training drops a sample's label and map together.
    """

    control: Any = plugin("visgen.controls", "canny")
    grid: tuple[Positive, Positive, Positive] = (1, 16, 16)
    classes: Positive = 1000
    dropout: Share = 0.1


class Prefill(Condition):
    """map [B, T, 3, H, W] and label [B] -> N + 1 prefix slots; the null condition is zeros and the null class."""

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.config = config
        cells = grid_coords(config.grid)
        self.prefix = len(cells) + 1
        self.coords = torch.cat([cells, torch.full((1, 3), -1)])
        self.embedding_table = nn.Embedding(config.classes + 1, width)
        encoder = ControlEncoder(config.control.encoder)
        self.control = nn.ModuleDict({"encoder": encoder, "adapter": Projection(encoder.width, width)})

    def forward(self, batch: Mapping[str, Any], drop: Tensor | None = None) -> Prefix:
        hints = hints_of(batch)
        if not hints:
            raise UserError("the batch holds no control `map`, which this model reads as its prefix; give it one")
        if len(hints) != 1 or hints[0].strength != 1.0 or hints[0].region is not None:
            raise UserError("a model with its control as a prefix reads one map, at strength 1 and in all places")
        label: Tensor = batch["label"]
        maps = hints[0].map
        check_map(maps, self.config.grid)
        frames, rows, columns = self.config.grid
        features = self.control["encoder"](maps.flatten(0, 1), (rows, columns), self.config.control.resize)
        tokens = self.control["adapter"](features).unflatten(0, (-1, frames)).flatten(1, 2)  # [B or 1, N, D]
        tokens = tokens.expand(len(label), -1, -1)
        if drop is not None:
            label = torch.where(drop, self.config.classes, label)
            tokens = torch.where(drop[:, None, None], 0, tokens)
        return Prefix(torch.cat([tokens, self.embedding_table(label).unsqueeze(1)], 1))

    def null(self, given: Prefix) -> Prefix:
        rows, _, width = given.vectors.shape
        null = self.embedding_table.weight[-1].expand(rows, 1, width)
        return Prefix(torch.cat([torch.zeros_like(given.vectors[:, 1:]), null.to(given.vectors.dtype)], 1))
