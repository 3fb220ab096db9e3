"""A window of `ar.py` in five kernels a layer: QKV, attention, output, gate and up, down.

RMS norms (beyond a few rows kernels of their own), rotary positions, cache write, SwiGLU and residual sums live inside
them (`nn/fused/`). Weights are read where they lie; what is added is a few buffers of one step.
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
from visgen.nn.fused.embed import embed
from visgen.nn.fused.linear import Workspace, linear, rms_norm
from visgen.nn.rope import rope_2d


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
        block: Any
        for i, block in enumerate(net.layers):
            attn, mlp = block.attention, block.feed_forward
            for j, place in enumerate(where):
                if place == i:
                    add_control(given, control[j], index)  # type: ignore[index]  # x is a view of it
            qkv = linear(x, attn.wqkv.weight, ws, gain=block.attention_norm.weight, eps=eps)
            keys, values = cache.keys[i], cache.values[i]
            decode_attention(qkv, self.rotation, keys, values, pos, self.group, self.reach, visible, mixed)
            linear(mixed, attn.wo.weight, ws, residual=x, out=x)
            gated = linear(x, mlp.w1.weight, ws, gain=block.ffn_norm.weight, eps=eps, up=mlp.w3.weight)
            linear(gated, mlp.w2.weight, ws, residual=x, out=x)
        return rms_norm(x, net.norm.weight, eps).unflatten(0, given.shape[:2])
