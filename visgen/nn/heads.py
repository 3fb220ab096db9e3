"""Queries, keys and values out of one product, turned by their positions.

The way back is a kernel of its own: three gradients are turned and written side by side, each value read and written
once. A compiler makes a concatenation with branches of it, which is slower.

Compiled, torch 2.11 gives no gradient to an output of an autograd function whose last call is a `to` without effect;
`rotate` makes none.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visgen.nn.rope import rotate

FUSED = importlib.util.find_spec("triton") is not None


def split_heads(packed: Tensor, rotation: Tensor, sizes: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Turned queries and keys, and values, [B, H, W, d] each.

    Args:
        packed: [B, W, (sum of sizes) d], [queries | keys | values].
        rotation: [B or 1, W, d / 2, 2], of `nn.rope.rope_2d`; it gets no gradient.
        sizes: heads of queries, of keys, of values.
    """
    q, k, v = _Split.apply(packed, rotation, tuple(sizes))
    return q, k, v


def joined(dq: Tensor, dk: Tensor, dv: Tensor, rotation: Tensor) -> Tensor:
    """The gradient of `packed` from those of the heads; the eager twin of `fused.dense.turn_back`."""
    back = torch.stack([rotation[..., 0], -rotation[..., 1]], -1)
    return torch.cat([rotate(dq, back), rotate(dk, back), dv], 1).transpose(1, 2).flatten(2)


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, rotation: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(rotation)
        q, k, v = packed.unflatten(-1, (sum(sizes), -1)).transpose(1, 2).split(sizes, dim=1)
        return rotate(q, rotation), rotate(k, rotation), v

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, None, None]:
        (rotation,) = ctx.saved_tensors
        fused = FUSED and dq.is_cuda
        return (_joined if fused else joined)(dq, dk, dv, rotation), None, None


@torch.library.custom_op("visgen::joined", mutates_args=())
def _joined(dq: Tensor, dk: Tensor, dv: Tensor, rotation: Tensor) -> Tensor:
    from visgen.nn.fused.dense import turn_back

    return turn_back(dq, dk, dv, rotation)


@_joined.register_fake
def _(dq: Tensor, dk: Tensor, dv: Tensor, rotation: Tensor) -> Tensor:
    heads = dq.shape[1] + dk.shape[1] + dv.shape[1]
    return dq.new_empty(dq.shape[0], dq.shape[2], heads * dq.shape[3])
