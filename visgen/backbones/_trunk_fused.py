"""A pass of `_trunk.py` over all slots at once, for inference: what stands between its products reads and writes each
value once (`nn/fused/dense.py`), and residual sums are part of the products before them.

Rotary positions take PyTorch eight kernels over float32, here one. Nothing is compiled but three small kernels, so the
first pass is soon done.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visgen.conditions import Prefix
from visgen.nn.cache import KVCache
from visgen.nn.control import at_slots, places
from visgen.nn.fused.dense import gate, turn
from visgen.nn.fused.linear import rms_norm
from visgen.nn.rope import rope_2d


class FusedTrunk:
    """As `Trunk.forward` of `net` in eval mode, with pos None. It shares the weights, which must not move."""

    def __init__(self, net: Any) -> None:
        config = net.config
        self.net, self.eps = net, config.norm_eps
        self.rotation = rope_2d(net.coords, config.width // config.heads, config.rope_base).contiguous()  # [S, d/2, 2]

    @torch.no_grad()
    def __call__(
        self,
        tokens: Tensor,
        pos: None,
        *,
        cond: Prefix,
        level: Tensor | None = None,
        control: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        net = self.net
        given = net.embed(tokens, pos, cond, level).contiguous()  # [B, S, D]
        mask, x = net.mask(given, None, cond), given.flatten(0, 1)
        where: list[int] = []
        if control is not None:
            where = places(len(control), len(net.layers))
            control = at_slots(control, None, net.layout.prefix + 1 - net.shift, given.shape[1])
        for i, block in enumerate(net.layers):
            for j, place in enumerate(where):
                if place == i:
                    given += control[j]  # type: ignore[index]  # x is a view of it
            mixed = self._mixed(block.attention, rms_norm(x, block.attention_norm.weight, self.eps), given, mask)
            x.addmm_(mixed, block.attention.wo.weight.T)
            normed, mlp = rms_norm(x, block.ffn_norm.weight, self.eps), block.feed_forward
            gated = F.linear(normed, mlp.w1.weight)
            gate(gated, F.linear(normed, mlp.w3.weight))
            x.addmm_(gated, mlp.w2.weight.T)
        return rms_norm(x, net.norm.weight, self.eps).view_as(given)

    def _mixed(self, attention: Any, normed: Tensor, like: Tensor, mask: Tensor | None) -> Tensor:
        """Attention over normed rows [B S, D] of sequences `like` [B, S, D], without its last projection."""
        queries, shared = attention.heads, attention.kv_heads
        packed = F.linear(normed, attention.wqkv.weight).view(*like.shape[:2], -1)
        turn(packed, self.rotation[: like.shape[1]], queries + shared)
        q, k, v = packed.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2).split([queries, shared, shared], dim=1)
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=queries != shared)
        return out.transpose(1, 2).flatten(2).flatten(0, 1)
