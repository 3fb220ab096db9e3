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
from visgen.nn.cache import KVCache, write

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q, k, v [R, H, W, d] -> [R, H, W, d]
Kernel = Literal["auto", "flex", "dense"]
LEAST = 16  # channels of a head that FlexAttention's kernels take
TILE = 128  # queries, and keys, that FlexAttention takes or leaves together


class Streams:
    """Attention over the slots of `layout.doubled()`.

    Args:
        kernel: flex skips what the mask leaves out (FlexAttention, compiled); dense is plain attention under a mask;
            auto is flex on a GPU for heads that its kernels take.
        head_dim: channels of a head.
    """

    def __init__(self, layout: Layout, kernel: Kernel, head_dim: int) -> None:
        self.layout, self.kernel, self.head_dim = layout, kernel, head_dim
        self.device: torch.device | None = None
        self.mask: Any = None  # [S, S] bool, or FlexAttention's
        self.flex: Any = None  # FlexAttention, where it is used

    def prepare(self, device: torch.device) -> None:
        """Makes the mask where it is not there already. A training step does so before the compiled forward."""
        if self.device != device:
            flexes = _flexes(self.kernel, device, self.head_dim)
            self.mask = self._blocks(device) if flexes else self._dense(device)
            self.device, self.flex = device, _flex(device) if flexes else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.layout.block == self.layout.tokens:  # one block: there is no clean stream
            return F.scaled_dot_product_attention(q, k, v)
        self.prepare(q.device)
        if self.flex is None:
            return F.scaled_dot_product_attention(q, k, v, self.mask)
        return self.flex(q, k, v, block_mask=self.mask)

    def _dense(self, device: torch.device) -> Tensor:
        layout = self.layout.doubled()
        return layout.visible(torch.arange(layout.slots, device=device))  # [S, S]

    def _blocks(self, device: torch.device) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        layout = self.layout.doubled()
        ranks = layout.ranks(device)

        def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return seen(ranks[query], ranks[key])

        return create_block_mask(allowed, None, None, layout.slots, layout.slots, device=device)


def _flexes(kernel: Kernel, device: torch.device, head_dim: int) -> bool:
    return kernel == "flex" or (kernel == "auto" and device.type == "cuda" and head_dim >= LEAST)


def _flex(device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return _compiled_flex() if device.type == "cuda" else flex_attention


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


class BlockCache(KVCache):
    """Keys and values of the clean blocks, once for all guidance branches, which clean blocks do not depend on.

    A ring of `blocks` blocks: block g stands at g modulo blocks. While g is denoised, branch 0 writes its keys and
    values there and each other branch in a block of its own behind the ring; committing g is running the window once
    more, clean, so that the last to be written there are the clean ones. A noised block sees blocks - 1 clean ones.

    Blocks that are not seen are skipped by FlexAttention, where W is a multiple of its tile; a dense mask computes all.

    Args:
        rows: images, not rows of branches.
        block: tokens W of a block.
        kernel: as of `Streams`.
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
        kernel: Kernel = "auto",
    ) -> None:
        super().__init__(layers, rows, heads, (blocks + branches - 1) * block, head_dim, device, dtype)
        self.rows, self.block, self.blocks, self.branches = rows, block, blocks, branches
        flexes = _flexes(kernel, self.keys.device, head_dim)
        self.tiled = _Tiled(self) if flexes and block % TILE == 0 else None

    def window(self, pos: Tensor) -> list[Attend]:
        """Attention, by layer, of one block of all rows (row r is image r modulo `rows`), whose slots are pos [1, W].

        No value of `pos` is read by the host.
        """
        k, w, ring = self.branches, self.block, self.blocks
        group = pos[:, :1] // w  # [1, 1]
        behind = torch.arange(ring, ring + k - 1, device=pos.device).unsqueeze(1)
        own = torch.cat([group % ring, behind])  # [K, 1] the block that each branch writes
        written = (own * w + pos % w).reshape(1, -1)  # [1, K W]
        places = torch.arange(ring + k - 1, device=pos.device)
        before = (places < ring) & (places < group) & (places != group % ring)  # [1, places]
        seen = before | (places == own)  # [K, places]
        if self.tiled is not None:
            self.tiled.show(seen)
        mask = None if self.tiled else seen.repeat_interleave(w, 0).repeat_interleave(w, 1)  # [K W, S]
        layers = range(len(self.keys))
        return [_Window(self, self.keys[i], self.values[i], written, mask) for i in layers]

    def fold(self, x: Tensor) -> Tensor:
        """[K B, H, W, d] -> [B, H, K W, d]: the branches of an image read one cache."""
        return x.unflatten(0, (self.branches, self.rows)).permute(1, 2, 0, 3, 4).flatten(2, 3)


class _Window:
    """Attention of one layer, by its tensors and not its number, so that what is compiled for one serves all layers.

    Args:
        keys, values: [B, H, S, d] of the layer, in the cache.
        written: [1, K W] slots of the cache.
        mask: [K W, S], or None where tiles are skipped.
    """

    def __init__(self, cache: BlockCache, keys: Tensor, values: Tensor, written: Tensor, mask: Tensor | None) -> None:
        self.cache, self.keys, self.values, self.written, self.mask = cache, keys, values, written, mask

    def __call__(self, q: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = self.cache
        q, key, value = (cache.fold(part) for part in (q, key, value))  # [B, H, K W, d]
        write(self.keys, self.values, key, value, self.written)
        keys, values = self.keys.to(q.dtype), self.values.to(q.dtype)
        if cache.tiled is not None:
            out = cache.tiled(q, keys, values)
        else:
            out = F.scaled_dot_product_attention(q, keys, values, self.mask)
        return out.unflatten(2, (cache.branches, cache.block)).permute(2, 0, 1, 3, 4).flatten(0, 1)


class _Tiled:
    """FlexAttention over the places of a cache. Which of them are seen lies in tensors that stay where they are, so one
    compiled kernel, and one graph, serves every block."""

    def __init__(self, cache: BlockCache) -> None:
        from torch.nn.attention.flex_attention import BlockMask

        places, device = cache.blocks + cache.branches - 1, cache.keys.device
        self.flex = _flex(device)
        self.each, width = cache.block // TILE, cache.block
        self.seen = seen = torch.ones(cache.branches, places, dtype=torch.bool, device=device)

        def allowed(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return seen[query // width, key // width]  # for the plain form; the kernel takes whole tiles

        self.count, self.order = self._tiles(seen)
        given = (torch.zeros_like(self.count), self.order.clone(), self.count, self.order)
        lengths = cache.branches * width, places * width
        self.mask = BlockMask.from_kv_blocks(*given, BLOCK_SIZE=TILE, mask_mod=allowed, seq_lengths=lengths)

    def _tiles(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """seen [K, places] -> of every tile of queries, how many tiles of keys it sees [1, 1, Q], and them first
        [1, 1, Q, tiles]; int32."""
        tiles = seen.repeat_interleave(self.each, 0).repeat_interleave(self.each, 1)
        order = (~tiles).to(torch.uint8).argsort(dim=-1, stable=True)
        return tiles.sum(-1).int()[None, None], order.int()[None, None]

    def show(self, seen: Tensor) -> None:
        """The places that the queries of every branch see from now on, [K, places]."""
        count, order = self._tiles(seen)
        self.seen.copy_(seen)
        self.count.copy_(count)
        self.order.copy_(order)

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return self.flex(q, keys, values, block_mask=self.mask)
