"""Rotary position embedding of token grids: 2-D as in LlamaGen (arXiv 2406.06525), and by axis as in ACDiT."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
    pairs = x.float().unflatten(-1, (-1, 2))  # [B, H, W, d/2, 2] of (a, b)
    cos, sin = rotation.unsqueeze(1).unbind(-1)  # [B, 1, W, d/2]
    across = torch.stack([-sin, sin], dim=-1)
    turned = pairs * cos.unsqueeze(-1) + pairs.flip(-1) * across  # (a cos - b sin, b cos + a sin), each read in a row
    turned = turned.flatten(-2)
    return turned if x.dtype == turned.dtype else turned.to(x.dtype)  # torch 2.11: see `nn.heads`


def check_head_dim(head_dim: int) -> None:
    """2-D rotation needs pairs on both axes."""
    if head_dim % 4:
        raise UserError(
            f"head dimension {head_dim} (width / heads) must be a multiple of 4: half of its pairs turn with y, half "
            "with x; change width or heads"
        )


# ----------------------------------------------------------------------------------- tokens of t, y and x (ACDiT)


def axis_split(head_dim: int, axes: int) -> tuple[int, ...]:
    """Dimensions of a head per axis: halves for (y, x); 2 : 3 : 3 for (t, y, x), as even numbers."""
    if axes == 2:
        return head_dim // 2, head_dim // 2
    side = 3 * head_dim // 16 * 2
    return head_dim - 2 * side, side, side


def axis_base(length: int) -> float:
    """ACDiT's base for an axis of so many positions: the next multiple of 100 above 8 length / pi."""
    return 100.0 * (math.floor(8 * length / math.pi) // 100 + 1)


def rope_axes(coords: Tensor, split: Sequence[int], bases: Sequence[float]) -> Tensor:
    """Rotation of every slot: coords [..., A] int -> [..., head_dim / 2, 2] float32 (cos, sin), for `rotate`.

    The pairs of each axis' own dimensions turn with its coordinate, at frequencies base^(-2k / dimensions), so a score
    depends on relative positions alone.
    """
    angles = []
    for axis, (size, base) in enumerate(zip(split, bases, strict=True)):
        steps = torch.arange(size // 2, device=coords.device, dtype=torch.float32)
        angles.append(coords[..., axis, None].float() * base ** (-2.0 * steps / size))
    angle = torch.cat(angles, -1)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def rope_acdit(coords: Tensor, split: Sequence[int], bases: Sequence[float]) -> Tensor:
    """ACDiT's released tables: coords [..., A] int -> [..., head_dim, 2] float32 (cos, sin), for `rotate_halves`.

    Frequencies are base^(-k / (n - 1)) for the n = dimensions / 2 pairs of an axis, and stand twice in its segment.
    """
    angles = []
    for axis, (size, base) in enumerate(zip(split, bases, strict=True)):
        steps = torch.arange(size // 2, device=coords.device, dtype=torch.float32)
        angle = coords[..., axis, None].float() * base ** (-steps / max(size // 2 - 1, 1))
        angles += [angle, angle]
    angle = torch.cat(angles, -1)
    return torch.stack([angle.cos(), angle.sin()], dim=-1)


def rotate_halves(x: Tensor, table: Tensor) -> Tensor:
    """x cos + (-x2 | x1) sin with x = (x1 | x2) [B, H, W, d], by table [B or 1, W, d, 2]; float32 inside.

    ACDiT's released code pairs dimension j with j + d / 2 of the whole head, though the tables are per axis: the two
    members of a pair turn with other axes. That is no rotation, and its weights need it.
    """
    cos, sin = table.unsqueeze(1).unbind(-1)  # [B, 1, W, d]
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
