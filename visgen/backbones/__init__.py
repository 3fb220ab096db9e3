"""Backbones: tokens of a window -> hidden states. The same forward trains and decodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from visgen.checks import UserError
from visgen.conditions import Prefix
from visgen.layout import Grid, Layout
from visgen.nn.cache import KVCache


class Backbone(nn.Module, ABC):
    """Built as `Backbone(config, layout, vocab)`; `layout` includes the condition's prefix slots.

    Attributes:
        width: D of the hidden states.
        layout: slots and who sees whom.
        continuous: whether its tokens are vectors; `vocab` is then their width C.
        denoises: whether it reads noised tokens, so that its head only has to say what is predicted of them.
        sampler: the kind of sampler that decodes it.
        cached: a decode goes over a cache of all slots, which the engine makes and whose prefix it fills.
        snaps: whether its tokens are codes that are drawn as vectors: a head of vectors draws them, the nearest codes
            are the tokens (`draw`, `codes`).
        shift: slot P - shift + k holds what predicts token k: 1, the slot before its own; or 0, its own.
        ordered: tokens may stand in any order: its `forward` also takes `order` [B, N], the place of the n-th, or None
            for raster order.
        taught: of a student, the (guidance, warp) of its teacher, which its weights hold; it is decoded by passes over
            all slots.
    """

    width: int
    layout: Layout
    continuous: bool = False
    denoises: bool = False
    sampler: str = "ar"
    cached: bool = True
    snaps: bool = False
    shift: int = 1
    ordered: bool = False
    taught: Any = None

    @classmethod
    def arrange(cls, config: Any, grid: Grid, prefix: int, coords: Tensor | None = None) -> Layout:
        """The layout that a backbone of `config` wants for tokens of `grid` under a condition of `prefix` slots, with
        coords [P, 3] where they are of places."""
        return Layout.raster(grid).with_prefix(prefix, coords)

    @abstractmethod
    def forward(
        self,
        tokens: Tensor,
        pos: Tensor | None,
        *,
        cond: Prefix,
        level: Tensor | None = None,
        control: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Hidden states of a window.

        Args:
            tokens: [B, W] ids of the window's slots (those of prefix slots are ignored), or vectors [B, W, C].
            pos: [B, W] slots of the window. None: the training pass over the prefix and all given tokens.
            cond: condition slots [B, P, D].
            level: time of noised tokens, 0 (clean) to 1000; below 0: the window is clean. Of a student [B, W], above 0
                where a token is noise.
            control: [J, B, N, D], what is added to the slot that predicts token k before each of J layers, evenly
                over the depth (`nn/control.py`); None adds nothing.
            cache: keys and values of earlier slots; the window's own are written into it.

        Returns:
            h [B, W, D]; slot s holds what predicts the token of slot s + `shift`.
        """

    def at(self, layout: Layout) -> Backbone:
        """The same weights, not copied, over the slots of another grid.

        Raises:
            UserError: its weights are of one grid.
        """
        raise UserError(f"backbone {type(self).__name__} draws the size alone that it was trained at; leave size out")

    @abstractmethod
    def make_cache(self, rows: int, device: torch.device, dtype: torch.dtype) -> KVCache:
        """An empty cache for `rows` sequences."""

    def fused(self) -> Callable[[Tensor, Tensor, Prefix, KVCache, Tensor | None], Tensor] | None:
        """A faster twin of `forward` for windows on a GPU, or None: `(tokens [B, N], index [B, W], cond of K B rows,
        cache, control) -> h [K B, W, D]` of the slots that predict the tokens at index, row r being image r mod B.
        Condition and control are in the weights' type, and contiguous. It shares the weights, which must not move."""
        return None

    def fused_pass(self) -> Callable[..., Tensor] | None:
        """A faster twin of `forward` over whole sequences on a GPU, for inference, or None. It shares the weights."""
        return None
