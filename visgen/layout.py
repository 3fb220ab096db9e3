"""Layout: coordinates and visibility groups of a token grid.

One rule covers the family: slot j is visible to slot i iff j is clean and `group[j] <= group[i]` (`<` where i is a
noised copy), or i and j lie in the same noised block. Raster AR: group = index. Blocks: group = block. One group:
full attention.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from visgen.checks import UserError

Grid = tuple[int, int, int]  # (T, H, W) in tokens


@dataclass(frozen=True)
class Layout:
    """Slots of a sequence: `prefix` condition slots, then the tokens.

    Attributes:
        coords: [S, 3] int64 (t, y, x) of every slot; prefix slots carry -1, unless they are of places.
        group: [S] int64, visibility group; prefix slots are causal among themselves and seen by all tokens.
        prefix: number P of prefix slots; S = P + N.
        block: number of tokens of each group.
        grid: of the tokens.
        noised: [S] bool, the slots that hold noised copies (`doubled`); None where there are none.
    """

    coords: Tensor
    group: Tensor
    prefix: int = 0
    block: int = 1
    grid: Grid = (0, 0, 0)
    noised: Tensor | None = None
    _ranks: dict[torch.device, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

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
        return Layout(coords, torch.arange(len(coords)), grid=grid)

    @staticmethod
    def full(grid: Grid) -> Layout:
        """All tokens in one group: bidirectional attention."""
        coords = grid_coords(grid)
        return Layout(coords, torch.zeros(len(coords), dtype=torch.int64), block=len(coords), grid=grid)

    @staticmethod
    def blocks(grid: Grid, block: Grid) -> Layout:
        """Blocks of (t, y, x) tokens, each its own group: raster order over the blocks, and inside each of them.

        (1, 1, 1) is `raster`, the whole grid is `full`, (t, H, W) are blocks of t frames.

        Raises:
            UserError: the block does not divide the grid.
        """
        if any(n % b for n, b in zip(grid, block, strict=True)):
            fitting = ["/".join(str(b) for b in range(1, n + 1) if n % b == 0) for n in grid]
            raise UserError(
                f"block {tuple(block)} does not divide the grid {tuple(grid)} (t, y, x) of tokens; its sides may be "
                f"{', '.join(fitting)}"
            )
        coords = grid_coords(grid)
        inside = torch.tensor(block, device=coords.device)
        which, within = coords // inside, coords % inside
        count = [n // b for n, b in zip(grid, block, strict=True)]
        group = (which[:, 0] * count[1] + which[:, 1]) * count[2] + which[:, 2]
        place = (within[:, 0] * block[1] + within[:, 1]) * block[2] + within[:, 2]
        size = block[0] * block[1] * block[2]
        order = (group * size + place).argsort()
        return Layout(coords[order], group[order], block=size, grid=grid)

    def doubled(self) -> Layout:
        """The slots that blockwise denoising is trained on: [clean tokens of all groups but the last | a noised copy of
        all tokens]. No noised copy sees the clean last group, so it is left out (ACDiT, arXiv 2412.07720)."""
        clean = self.tokens - self.block
        noised = torch.arange(clean + self.tokens, device=self.group.device) >= clean
        coords, group = (torch.cat([part[:clean], part]) for part in (self.coords, self.group))
        return Layout(coords, group, block=self.block, grid=self.grid, noised=noised)

    def with_prefix(self, prefix: int, coords: Tensor | None = None) -> Layout:
        """The same tokens behind `prefix` condition slots, which have coords [P, 3] of their own or none (-1)."""
        if self.prefix:
            raise ValueError(f"layout has {self.prefix} prefix slots already")
        own = torch.full((prefix, 3), -1) if coords is None else coords
        coords = torch.cat([own, self.coords])
        group = torch.cat([torch.arange(-prefix, 0), self.group])
        return Layout(coords, group, prefix, self.block, self.grid)

    def ranks(self, device: torch.device) -> Tensor:
        """[S] int32: 2 group, and 1 more where the slot holds a noised copy, for `seen`. Copied there once: a step that
        is being captured may not copy from the host."""
        if device not in self._ranks:
            copies = 0 if self.noised is None else self.noised
            self._ranks[device] = (2 * self.group + copies).int().to(device)
        return self._ranks[device]

    def visible(self, query: Tensor, key: Tensor | None = None) -> Tensor:
        """Slots query [..., W] (and key [K], default all S) -> bool [..., W, K]: may the query attend to the key?"""
        ranks = self.ranks(query.device)
        return seen(ranks[query].unsqueeze(-1), ranks if key is None else ranks[key])


def seen(query: Tensor, key: Tensor) -> Tensor:
    """May a slot of rank `query` attend to one of rank `key`? Clean slots: to clean ones of no later group. Noised
    copies: to clean ones of earlier groups, and to noised ones of their own."""
    last = query - 3 * (query & 1)  # a copy in group g has rank 2 g + 1, a clean slot of the group before 2 g - 2
    return (key == query) | ((key & 1 == 0) & (key <= last))


def grid_coords(grid: Grid) -> Tensor:
    """[N, 3] int64 (t, y, x) of every token of a grid, in raster order."""
    axes = [torch.arange(n) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
