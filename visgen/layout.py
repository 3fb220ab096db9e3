"""Layout: coordinates and visibility groups of a token grid.

One rule covers the family: slot j is visible to slot i iff j is clean and `group[j] <= group[i]` (`<` where i is a
noised copy), or i and j lie in the same noised block. Raster AR: group = index. Blocks: group = block. One group:
full attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

Grid = tuple[int, int, int]  # (T, H, W) in tokens


@dataclass(frozen=True)
class Layout:
    """Slots of a sequence: `prefix` condition slots, then the tokens.

    Attributes:
        coords: [S, 3] int64 (t, y, x) of every slot; prefix slots carry -1, unless they are of places.
        group: [S] int64, visibility group; prefix slots are causal among themselves and seen by all tokens.
        prefix: number P of prefix slots; S = P + N.
    """

    coords: Tensor
    group: Tensor
    prefix: int = 0

    @property
    def slots(self) -> int:
        return self.group.numel()

    @property
    def tokens(self) -> int:
        return self.slots - self.prefix

    @staticmethod
    def raster(grid: Grid) -> Layout:
        """Every token its own group, in raster order: autoregression token by token."""
        coords = grid_coords(grid)
        return Layout(coords, torch.arange(len(coords)))

    @staticmethod
    def full(grid: Grid) -> Layout:
        """All tokens in one group: bidirectional attention."""
        coords = grid_coords(grid)
        return Layout(coords, torch.zeros(len(coords), dtype=torch.int64))

    def with_prefix(self, prefix: int, coords: Tensor | None = None) -> Layout:
        """The same tokens behind `prefix` condition slots, which have coords [P, 3] of their own or none (-1)."""
        if self.prefix:
            raise ValueError(f"layout has {self.prefix} prefix slots already")
        own = torch.full((prefix, 3), -1) if coords is None else coords
        coords = torch.cat([own, self.coords])
        group = torch.cat([torch.arange(-prefix, 0), self.group])
        return Layout(coords, group, prefix)

    def visible(self, query: Tensor, key: Tensor | None = None) -> Tensor:
        """Slots query [..., W] (and key [K], default all S) -> bool [..., W, K]: may the query attend to the key?"""
        group = self.group.to(query.device)
        keys = group if key is None else group[key]
        return keys <= group[query].unsqueeze(-1)


def grid_coords(grid: Grid) -> Tensor:
    """[N, 3] int64 (t, y, x) of every token of a grid, in raster order."""
    axes = [torch.arange(n) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
