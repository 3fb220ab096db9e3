"""The causal transformer that `ar` and its one-step students share (LlamaGen, arXiv 2406.06525, section 3.2).

Pre-norm blocks x + Attn(rms(x)), x + SwiGLU(rms(x)); 2-D rotary positions whose prefix rows are zero; raster order.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from visgen.backbones import Backbone
from visgen.checks import Depth, Positive, Rate, Scale
from visgen.conditions import Prefix
from visgen.layout import Layout
from visgen.nn.attention import Attention, check_heads
from visgen.nn.cache import KVCache
from visgen.nn.control import at_slots, places
from visgen.nn.dropout import Dropout
from visgen.nn.mlp import DropPath, SwiGLU
from visgen.nn.norm import RMSNorm
from visgen.nn.rope import check_head_dim, rope_2d


@dataclass(frozen=True)
class TrunkConfig:
    """Size of the transformer; the defaults are LlamaGen-B's, without dropout.

    Attributes:
        layers, heads, width: depth L, attention heads H, width D; the head dimension is D / H.
        kv_heads: key/value heads, shared by groups of query heads; None means H.
        mlp_multiple_of: the SwiGLU hidden width is rounded up to a multiple of this.
        rope_base: base of the rotary frequencies.
        norm_eps: epsilon of the RMS norms.
        token_dropout: dropout on the input embeddings, prefix included.
        residual_dropout, mlp_dropout: dropout after the attention's and the MLP's last projection.
        drop_path: stochastic depth, rising linearly from 0 to this over the layers.
        rope_columns: give token k the position (k // rope_columns, k mod rope_columns), whatever the grid, instead of
            its true one: ControlAR's weights of many resolutions have 48.
    """

    layers: Depth = 12
    heads: Positive = 12
    width: Positive = 768
    kv_heads: Positive | None = None
    mlp_multiple_of: Positive = 256
    rope_base: Scale = 10000.0
    norm_eps: Scale = 1e-5
    token_dropout: Rate = 0.0
    residual_dropout: Rate = 0.0
    mlp_dropout: Rate = 0.0
    drop_path: Rate = 0.0
    rope_columns: Positive | None = None


class Trunk(Backbone):
    """Causal transformer over `[prefix | tokens]`. What a slot holds is up to `embed`, what it predicts to `shift`.

    Args:
        config: a `TrunkConfig`, with what the subclass adds.
    """

    coords: Tensor  # [S, 3]

    def __init__(self, config: Any, layout: Layout, vocab: int) -> None:
        super().__init__()
        self.config, self.layout, self.width = config, layout, config.width
        check_heads(config.width, config.heads, config.kv_heads)
        check_head_dim(config.width // config.heads)
        self.register_buffer("coords", self._positions(layout), persistent=False)
        self.add_inputs(vocab)
        self.dropout = Dropout(config.token_dropout)
        rates = torch.linspace(0, config.drop_path, config.layers, device="cpu").tolist()
        self.layers = nn.ModuleList(Block(config, rate) for rate in rates)
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.apply(_init)

    @abstractmethod
    def add_inputs(self, vocab: int) -> None:
        """Makes the modules that `embed` reads."""

    @abstractmethod
    def embed(self, tokens: Tensor, pos: Tensor | None, cond: Prefix, level: Tensor | None) -> Tensor:
        """Input vectors of the window [B, W, D], or of the prefix and all given tokens."""

    def behind(self, embedded: Tensor, vectors: Tensor, pos: Tensor | None) -> Tensor:
        """The window [B, W, D] of embedded tokens, with the condition's vectors [B, P, D] at prefix slots."""
        if pos is None:
            return torch.cat([vectors, embedded], dim=1)
        index = pos.clamp(max=self.layout.prefix - 1).unsqueeze(-1).expand(-1, -1, self.width)
        return torch.where((pos < self.layout.prefix).unsqueeze(-1), vectors.gather(1, index), embedded)

    def _positions(self, layout: Layout) -> Tensor:
        """[S, 3]."""
        coords, columns = layout.coords.clone(), self.config.rope_columns
        if columns is not None:
            k = torch.arange(layout.tokens, device=coords.device)
            coords[layout.prefix :, 1], coords[layout.prefix :, 2] = k // columns, k % columns
        return coords

    def at(self, layout: Layout) -> Self:
        other = copy.copy(self)
        other.layout = layout
        other._buffers = {**self._buffers, "coords": self._positions(layout).to(self.coords.device)}
        return other

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
        return self.run(self.embed(tokens, pos, cond, level), pos, cond, control, cache)

    def run(
        self,
        x: Tensor,
        pos: Tensor | None,
        cond: Prefix,
        control: Tensor | None,
        cache: KVCache | None,
        order: Tensor | None = None,
    ) -> Tensor:
        """Input vectors [B, W, D] -> hidden states; tokens stand in raster order, or in `order` [B, N]."""
        slots = torch.arange(x.shape[1], device=x.device).unsqueeze(0) if pos is None else pos
        coords = self.coords[slots if order is None else self._raster(slots, order)]
        rotation = rope_2d(coords, self.width // self.config.heads, self.config.rope_base)
        mask = self.mask(x, pos, cond)
        x = self.dropout(x)
        where: list[int] = []
        if control is not None:
            where, control = (
                places(len(control), len(self.layers)),
                at_slots(control, pos, self.layout.prefix + 1 - self.shift, x.shape[1]),
            )
        for i, block in enumerate(self.layers):
            for j, place in enumerate(where):
                if place == i:
                    x = x + control[j]  # type: ignore[index]
            x = block(x, rotation, mask, pos, cache, i)
        return self.norm(x)

    def _raster(self, slots: Tensor, order: Tensor) -> Tensor:
        """Slots [B or 1, W] of tokens that stand in `order` [B, N] -> the slots [B, W] of their places."""
        prefix, slots = self.layout.prefix, slots.expand(len(order), -1)
        places = prefix + order.gather(1, (slots - prefix).clamp(min=0))
        return torch.where(slots < prefix, slots, places)

    def mask(self, x: Tensor, pos: Tensor | None, cond: Prefix) -> Tensor | None:
        """[B or 1, 1, W, S] bool, or None where plain causal attention over the window says the same."""
        if pos is None and cond.visible is None:
            return None
        keys = x.shape[1] if pos is None else self.layout.slots
        slots = torch.arange(keys, device=x.device)
        query = slots.unsqueeze(0) if pos is None else pos  # [B or 1, W]
        mask = self.layout.visible(query, slots)  # [B or 1, W, S]
        if cond.visible is not None:
            present = torch.nn.functional.pad(cond.visible, (0, keys - self.layout.prefix), value=True)
            mask = mask & present.unsqueeze(1) | (query.unsqueeze(-1) == slots)  # a padding slot sees itself
        return mask.unsqueeze(1)

    def fused_pass(self) -> Callable[..., Tensor] | None:
        """Of students alone, whose tokens are drawn by passes over all slots."""
        if self.taught is None:
            return None
        from visgen.backbones._trunk_fused import FusedTrunk  # needs Triton

        return FusedTrunk(self)

    def make_cache(self, rows: int, device: torch.device, dtype: torch.dtype) -> KVCache:
        heads = self.config.kv_heads or self.config.heads
        head_dim = self.width // self.config.heads
        return KVCache(self.config.layers, rows, heads, self.layout.slots, head_dim, device, dtype)


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, config: Any, drop_path: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config.width, config.heads, config.kv_heads, config.residual_dropout)
        self.ffn_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.feed_forward = SwiGLU(config.width, config.mlp_multiple_of, config.mlp_dropout)
        self.drop_path = DropPath(drop_path)

    def forward(
        self,
        x: Tensor,  # [B, W, D]
        rotation: Tensor,
        mask: Tensor | None,
        pos: Tensor | None,
        cache: KVCache | None,
        layer: int,
    ) -> Tensor:
        x = x + self.drop_path(self.attention(self.attention_norm(x), rotation, mask, pos, cache, layer))
        return x + self.drop_path(self.feed_forward(self.ffn_norm(x)))


def _init(module: nn.Module) -> None:
    """Every matrix N(0, 0.02) (LlamaGen section 2.7)."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
