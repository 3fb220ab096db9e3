"""Attention of blockwise denoising: the skip-causal mask in training, a cache of clean blocks in decoding.

Source: ACDiT (Hu et al. 2024, arXiv 2412.07720, section 3.2). A noised block sees itself and the clean copies of
earlier blocks; a clean block sees itself and earlier clean ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from visgen.layout import Layout, seen
from visgen.nn.cache import KVCache

Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # (q, k, v [R, H, W, d], layer) -> [R, H, W, d]
Kernel = Literal["auto", "flex", "dense"]


class Streams:
    """Attention over the slots of `layout.doubled()`.

    Args:
        kernel: flex skips what the mask leaves out (FlexAttention, compiled); dense is plain attention under a mask;
            auto is flex on a GPU.
    """

    def __init__(self, layout: Layout, kernel: Kernel = "auto") -> None:
        self.layout, self.kernel = layout, kernel
        self.device: torch.device | None = None
        self.mask: Any = None  # [S, S] bool, or FlexAttention's

    def prepare(self, device: torch.device) -> None:
        """Makes the mask where it is not there already. A training step does so before the compiled forward."""
        if self.device != device:
            self.device, self.mask = device, self._blocks(device) if self._flexes(device) else self._dense(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int = 0) -> Tensor:
        if self.layout.block == self.layout.tokens:  # one block: there is no clean stream
            return F.scaled_dot_product_attention(q, k, v)
        self.prepare(q.device)
        if not self._flexes(q.device):
            return F.scaled_dot_product_attention(q, k, v, self.mask)
        flex = _flex() if q.device.type == "cuda" else _plain_flex()
        return flex(q, k, v, block_mask=self.mask)

    def _flexes(self, device: torch.device) -> bool:
        return self.kernel == "flex" or (self.kernel == "auto" and device.type == "cuda")

    def _dense(self, device: torch.device) -> Tensor:
        layout = self.layout.doubled()
        return layout.visible(torch.arange(layout.slots, device=device))  # [S, S]

    def _blocks(self, device: torch.device) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        layout = self.layout.doubled()
        assert layout.noised is not None
        group, noised = layout.group.to(device), layout.noised.to(device)

        def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return seen(group[query], noised[query], group[key], noised[key])

        return create_block_mask(allowed, None, None, layout.slots, layout.slots, device=device)


def _plain_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@functools.cache
def _flex() -> Any:
    return torch.compile(_plain_flex(), dynamic=False)


class BlockCache(KVCache):
    """Keys and values of the clean blocks, once for all guidance branches, which clean blocks do not depend on.

    A ring of `blocks` blocks: block g stands at g modulo blocks. While g is denoised, branch 0 writes its keys and
    values there and each other branch in a block of its own behind the ring; committing g is running the window once
    more, clean, so that the last to be written there are the clean ones. A noised block sees blocks - 1 clean ones.

    Args:
        rows: images, not rows of branches.
        block: tokens W of a block.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        heads: int,
        head_dim: int,
        block: int,
        blocks: int,
        branches: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(layers, rows, heads, (blocks + branches - 1) * block, head_dim, device, dtype)
        self.rows, self.block, self.blocks, self.branches = rows, block, blocks, branches

    def window(self, pos: Tensor) -> Attend:
        """Attention of one block of all rows (row r is image r modulo `rows`), whose slots are pos [1, W].

        No value of `pos` is read by the host.
        """
        k, w, ring = self.branches, self.block, self.blocks
        group = pos[:, :1] // w  # [1, 1]
        behind = torch.arange(ring, ring + k - 1, device=pos.device).unsqueeze(1)
        own = torch.cat([group % ring, behind])  # [K, 1] the block that each branch writes
        written = (own * w + pos % w).reshape(1, -1)  # [1, K W]
        slots = torch.arange((ring + k - 1) * w, device=pos.device) // w  # [S] block of every slot
        before = (slots < ring) & (slots < group) & (slots != group % ring)  # [1, S]
        mask = (before | (slots == own)).repeat_interleave(w, 0)  # [K W, S]

        def attend(q: Tensor, key: Tensor, value: Tensor, layer: int) -> Tensor:
            q, key, value = (self._folded(part) for part in (q, key, value))  # [B, H, K W, d]
            keys, values = self.update(layer, key, value, written)
            out = F.scaled_dot_product_attention(q, keys.to(q.dtype), values.to(q.dtype), mask)
            return out.unflatten(2, (k, w)).permute(2, 0, 1, 3, 4).flatten(0, 1)

        return attend

    def _folded(self, x: Tensor) -> Tensor:
        """[K B, H, W, d] -> [B, H, K W, d]: the branches of an image read one cache."""
        return x.unflatten(0, (self.branches, self.rows)).permute(1, 2, 0, 3, 4).flatten(2, 3)
