"""Rotary position embedding of token grids (2-D as in LlamaGen, spec section 2.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from visgen.checks import UserError


def rope_2d(coords: Tensor, head_dim: int, base: float = 10000.0) -> Tensor:
    """Rotation of every slot: coords [..., 3] (t, y, x) int -> [..., head_dim / 2, 2] float32 (cos, sin).

    The first half of the pairs turns with y, the second with x, at frequencies base^(-2i / (head_dim / 2)). Slots with
    negative coordinates (condition prefix) get cos = sin = 0, so their queries and keys become the zero vector.
    """
    half = head_dim // 2
    steps = torch.arange(half // 2, device=coords.device, dtype=torch.float32)
    frequency = base ** (-2.0 * steps / half)  # [half / 2]
    angle = torch.cat([coords[..., axis, None].float() * frequency for axis in (1, 2)], dim=-1)
    rotation = torch.stack([angle.cos(), angle.sin()], dim=-1)  # [..., half, 2]
    return rotation * (coords[..., :1, None] >= 0)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Turns the interleaved pairs (2i, 2i+1) of x [B, H, W, d] by rotation [B or 1, W, d/2, 2]; float32 inside."""
    pairs = x.float().unflatten(-1, (-1, 2))  # [B, H, W, d/2, 2]
    cos, sin = rotation.unsqueeze(1).unbind(-1)  # [B, 1, W, d/2]
    a, b = pairs.unbind(-1)
    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2).to(x.dtype)


def check_head_dim(head_dim: int) -> None:
    """2-D rotation needs pairs on both axes."""
    if head_dim % 4:
        raise UserError(
            f"head dimension {head_dim} (width / heads) must be a multiple of 4: half of its pairs turn with y, half "
            "with x; change width or heads"
        )
