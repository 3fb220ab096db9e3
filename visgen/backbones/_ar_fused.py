"""A window of `ar.py` in five kernels a layer: QKV, attention, output, gate and up, down.

RMS norms (beyond a few rows kernels of their own), rotary positions, cache write, SwiGLU and residual sums live inside
them (`nn/fused/`). Weights are read where they lie; what is added is a few buffers of one step.

Attention waits for the memory, the products of many rows for the cache that all programs share: so the products of a
layer fetch a part of what the next layer attends to.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from visgen.conditions import Prefix
from visgen.nn.cache import KVCache
from visgen.nn.control import places
from visgen.nn.fused.attention import check_head_dim, decode_attention, reach_of
from visgen.nn.fused.control import add_control
from visgen.nn.fused.described import Later
from visgen.nn.fused.embed import embed
from visgen.nn.fused.linear import Workspace, fetches, linear, rms_norm
from visgen.nn.rope import rope_2d

ROOM = 24 << 20  # bytes of the next layer's cache that a layer's products fetch, of the 50 MB that programs share
SHARES = (0.25, 0.4, 0.35)  # of the products of output, gate and up, and down


class FusedAR:
    """`(tokens [B, N], index [B, W], cond, cache, control [J, R, N, D]) -> h [R, W, D]`, as `ARTransformer.forward` on
    every row.

    Args:
        net: an `ARTransformer` in eval mode.

    Raises:
        UserError: a head size that the kernels do not have.
    """

    def __init__(self, net: Any) -> None:
        config, layout = net.config, net.layout
        self.net, self.eps = net, config.norm_eps
        device = net.tok_embeddings.weight.device
        head_dim = config.width // config.heads
        check_head_dim(head_dim)
        self.rotation = rope_2d(net.coords, head_dim, config.rope_base).contiguous()  # [S, d/2, 2]
        group = layout.group.to(device)
        self.group, self.reach = group.int(), reach_of(group)
        self.workspace = Workspace(device)

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, index: Tensor, cond: Prefix, cache: KVCache, control: Tensor | None = None
    ) -> Tensor:
        net, ws, eps = self.net, self.workspace, self.eps
        visible = None if cond.visible is None else cond.visible.view(torch.uint8)
        given, pos = embed(tokens, index, net.tok_embeddings.weight, cond.vectors)
        x = given.flatten(0, 1)  # [R W, D]
        mixed = torch.empty_like(x)
        where = [] if control is None else places(len(control), len(net.layers))
        ends = self._ends(x, cache)
        block: Any
        for i, block in enumerate(net.layers):
            attn, mlp = block.attention, block.feed_forward
            for j, place in enumerate(where):
                if place == i:
                    add_control(given, control[j], index)  # type: ignore[index]  # x is a view of it
            qkv = linear(x, attn.wqkv.weight, ws, gain=block.attention_norm.weight, eps=eps)
            keys, values = cache.keys[i], cache.values[i]
            near = ends[-1] if i else 0
            decode_attention(qkv, self.rotation, keys, values, pos, self.group, self.reach, visible, mixed, near)
            out, wide, down = self._later(cache, i + 1, pos, ends)
            linear(mixed, attn.wo.weight, ws, residual=x, out=x, later=out)
            gated = linear(x, mlp.w1.weight, ws, gain=block.ffn_norm.weight, eps=eps, up=mlp.w3.weight, later=wide)
            linear(gated, mlp.w2.weight, ws, residual=x, out=x, later=down)
        return rms_norm(x, net.norm.weight, eps).unflatten(0, given.shape[:2])

    def _ends(self, x: Tensor, cache: KVCache) -> list[int]:
        """Up to which slot of every row and head each product of a layer fetches the next one's cache."""
        _, rows, heads, slots, head_dim = cache.keys.shape
        most = min(slots, ROOM // (2 * rows * heads * head_dim * x.element_size()))
        layer: Any = self.net.layers[0]
        wide = layer.feed_forward.w1.weight
        inner = x.new_empty(len(x), len(wide))
        products = (x, layer.attention.wo.weight, False), (x, wide, True), (inner, layer.feed_forward.w2.weight, False)
        able = [share * fetches(*product) for share, product in zip(SHARES, products, strict=True)]
        return [round(most * sum(able[: i + 1]) / (sum(able) or 1)) for i in range(len(able))]

    def _later(self, cache: KVCache, layer: int, pos: Tensor, ends: list[int]) -> list[Later | None]:
        """What each product of the layer before `layer` fetches for it."""
        if layer == len(self.net.layers) or not ends[-1]:
            return [None] * len(ends)
        keys, values = cache.keys[layer], cache.values[layer]
        return [
            Later(keys, values, pos, self.reach, first, end) for first, end in zip([0, *ends[:-1]], ends, strict=True)
        ]
