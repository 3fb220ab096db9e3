"""Convolutional encoder and decoder in the layout of taming-transformers and LlamaGen.

Source: Esser et al., "Taming Transformers", arXiv:2012.09841, appendix; sizes of LlamaGen, arXiv:2406.06525. Every
block normalises first (GroupNorm, eps 1e-6), then applies SiLU. Fully convolutional: any side that is a multiple of
the stride `2 ** (len(multipliers) - 1)` works; attention is global at the lowest resolution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Size of an `Encoder` or `Decoder`."""

    width: int = 128  # channels at the highest resolution
    multipliers: tuple[int, ...] = (1, 1, 2, 2, 4)  # times width, from the highest to the lowest resolution
    res_blocks: int = 2  # per level
    attention: bool = True  # after each ResBlock of the lowest level and in the middle
    dropout: float = 0.0
    norm_groups: int = 32  # of GroupNorm; widths that it does not divide use their greatest common divisor
    local: bool = False  # 1x1 ResBlocks and norms per position: features see a few pixels around their patch, no more

    @property
    def stride(self) -> int:
        return 2 ** (len(self.multipliers) - 1)


class Encoder(nn.Module):
    """Pixels -> features at `1 / shape.stride` of the resolution."""

    def __init__(self, shape: Shape, out_channels: int, in_channels: int = 3) -> None:
        super().__init__()
        widths = [shape.width * m for m in shape.multipliers]
        self.conv_in = nn.Conv2d(in_channels, shape.width, 3, padding=1)
        self.levels = nn.ModuleList()
        before, lowest = shape.width, len(widths) - 1
        for i, width in enumerate(widths):
            channels = [before] + [width] * shape.res_blocks
            resample = nn.Identity() if i == lowest else Down(width)
            self.levels.append(Level(shape, channels, shape.attention and i == lowest, resample))
            before = width
        self.middle = middle(shape, before)
        self.norm_out = norm(shape, before)
        self.conv_out = conv(shape, before, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, out_channels, H / stride, W / stride]."""
        x = self.conv_in(x)
        for level in self.levels:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(self.middle(x))))


class Decoder(nn.Module):
    """Mirror of `Encoder` with one ResBlock more per level; level 0 is the lowest resolution. Linear output."""

    def __init__(self, shape: Shape, in_channels: int, out_channels: int = 3) -> None:
        super().__init__()
        widths = [shape.width * m for m in reversed(shape.multipliers)]
        self.conv_in = nn.Conv2d(in_channels, widths[0], 3, padding=1)
        self.middle = middle(shape, widths[0])
        self.levels = nn.ModuleList()
        before, highest = widths[0], len(widths) - 1
        for i, width in enumerate(widths):
            channels = [before] + [width] * (shape.res_blocks + 1)
            resample = nn.Identity() if i == highest else Up(width)
            self.levels.append(Level(shape, channels, shape.attention and i == 0, resample))
            before = width
        self.norm_out = norm(shape, before)
        self.conv_out = conv(shape, before, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """[B, in_channels, h, w] -> [B, 3, h * stride, w * stride]."""
        x = self.middle(self.conv_in(x))
        for level in self.levels:
            x = level(x)
        return self.conv_out(F.silu(self.norm_out(x)))


class Level(nn.Module):
    """ResBlocks through `channels`, attention after each if wanted, then the change of resolution."""

    def __init__(self, shape: Shape, channels: Sequence[int], attention: bool, resample: nn.Module) -> None:
        super().__init__()
        self.res = nn.ModuleList(ResBlock(shape, i, o) for i, o in pairwise(channels))
        self.attn = nn.ModuleList(AttnBlock(shape, o) if attention else nn.Identity() for o in channels[1:])
        self.resample = resample

    def forward(self, x: Tensor) -> Tensor:
        for res, attn in zip(self.res, self.attn, strict=True):
            x = attn(res(x))
        return self.resample(x)


class ResBlock(nn.Module):
    """norm, SiLU, conv, norm, SiLU, dropout, conv, added to a skip (1x1 conv where the width changes)."""

    def __init__(self, shape: Shape, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = norm(shape, in_channels)
        self.conv1 = conv(shape, in_channels, out_channels)
        self.norm2 = norm(shape, out_channels)
        self.dropout = nn.Dropout(shape.dropout)
        self.conv2 = conv(shape, out_channels, out_channels)
        self.skip = nn.Identity() if in_channels == out_channels else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(self.dropout(F.silu(self.norm2(h))))
        return self.skip(x) + h


class AttnBlock(nn.Module):
    """Single-head self-attention over all positions with 1x1 convolutions, residual."""

    def __init__(self, shape: Shape, channels: int) -> None:
        super().__init__()
        self.norm = norm(shape, channels)
        self.q = nn.Conv2d(channels, channels, 1)
        self.k = nn.Conv2d(channels, channels, 1)
        self.v = nn.Conv2d(channels, channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (conv(h).flatten(2).transpose(1, 2).unsqueeze(1) for conv in (self.q, self.k, self.v))  # [B,1,HW,C]
        mixed = F.scaled_dot_product_attention(q, k, v)  # scale 1 / sqrt(C)
        return x + self.out(mixed.squeeze(1).transpose(1, 2).reshape(x.shape))


class Down(nn.Module):
    """Halves the resolution: zero padding right and below, 3x3 convolution of stride 2."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Up(nn.Module):
    """Doubles the resolution: nearest neighbour, 3x3 convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def middle(shape: Shape, channels: int) -> nn.Sequential:
    """ResBlock, attention if the shape has it, ResBlock."""
    blocks: list[nn.Module] = [ResBlock(shape, channels, channels) for _ in range(2)]
    if shape.attention:
        blocks.insert(1, AttnBlock(shape, channels))
    return nn.Sequential(*blocks)


def conv(shape: Shape, in_channels: int, out_channels: int) -> nn.Conv2d:
    """3x3 convolution; 1x1 in a local shape."""
    side = 1 if shape.local else 3
    return nn.Conv2d(in_channels, out_channels, side, padding=side // 2)


def norm(shape: Shape, channels: int) -> nn.Module:
    """GroupNorm; in a local shape every position is normalised on its own, for GroupNorm's statistics carry the whole
    image to each position."""
    if shape.local:
        return PositionNorm(channels, eps=1e-6)
    return group_norm(channels, shape.norm_groups)


def group_norm(channels: int, groups: int = 32) -> nn.GroupNorm:
    """GroupNorm, eps 1e-6, with as many of the wanted groups as divide the channels."""
    return nn.GroupNorm(math.gcd(channels, groups), channels, eps=1e-6)


class PositionNorm(nn.LayerNorm):
    """LayerNorm over the channels of each position of [B, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)
