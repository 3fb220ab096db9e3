"""MAR: a masked autoencoder over continuous tokens (Li et al. 2024, arXiv 2406.11838, section 3.4).

The encoder reads the known tokens behind `buffer` slots that hold the condition; the decoder sees their outputs at
their places, a mask token everywhere else, and gives every place what predicts its token. Attention is bidirectional,
so any set of tokens may follow any other. Positions are learned: three tables, for the encoder, the decoder and the
head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visgen.backbones import Backbone
from visgen.checks import Depth, Positive, Rate, Scale
from visgen.conditions import Prefix
from visgen.config import UserError
from visgen.layout import Grid, Layout
from visgen.nn.attention import check_heads
from visgen.nn.cache import KVCache

Layers = Callable[..., Tensor]  # `through`, or its faster twin


@dataclass(frozen=True)
class Config:
    """Masked transformer; the defaults are MAR-B's.

    Attributes:
        layers: of the encoder, and of the decoder.
        heads, width: attention heads H, width D; the head dimension is D / H.
        mlp: hidden width of the MLP over D.
        buffer: slots M before the tokens, all of which begin as the condition.
        dropout: of attention, and after every projection of attention and MLP.
        norm_eps: epsilon of the layer norms but the first, whose is 1e-6.
    """

    layers: Depth = 12
    heads: Positive = 12
    width: Positive = 768
    mlp: Scale = 4.0
    buffer: Positive = 64
    dropout: Rate = 0.1
    norm_eps: Scale = 1e-6


class MAR(Backbone):
    """Known tokens [B, W, C] at pos [B, W] of the grid -> h [B, N, D] of all places, in raster order; or
    [B, A, D] of the places `asked` [B, A].

    `pos` None: all tokens, in raster order. `level` [B, W]: a token is hidden, as if it were not given, where it is 0
    or more; None: none is.
    """

    continuous = True
    sampler = "masked"
    cached = False

    def __init__(self, config: Config, layout: Layout, vocab: int) -> None:
        super().__init__()
        self.config, self.layout, self.width = config, layout, config.width
        check_heads(config.width, config.heads)
        slots = config.buffer + layout.tokens
        self.embed = nn.Linear(vocab, config.width)
        self.embed_norm = nn.LayerNorm(config.width, eps=1e-6)
        self.encoder = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.encoder_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.bridge = nn.Linear(config.width, config.width)
        self.decoder = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.decoder_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mask_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.encoder_positions = nn.Parameter(torch.empty(1, slots, config.width))
        self.decoder_positions = nn.Parameter(torch.empty(1, slots, config.width))
        self.head_positions = nn.Parameter(torch.empty(1, layout.tokens, config.width))
        self._init()

    @classmethod
    def arrange(cls, config: Config, grid: Grid, prefix: int, coords: Tensor | None = None) -> Layout:
        """One group of all tokens; the condition fills the buffer."""
        if prefix != 1:
            raise UserError(
                f"model.backbone mar takes a condition of one vector, such as label; this one has {prefix} slots"
            )
        return Layout.full(grid)

    def forward(
        self,
        tokens: Tensor,
        pos: Tensor | None,
        *,
        cond: Prefix,
        level: Tensor | None = None,
        control: Tensor | None = None,
        cache: KVCache | None = None,
        asked: Tensor | None = None,
    ) -> Tensor:
        if pos is None:
            pos = torch.arange(self.layout.tokens, device=tokens.device).expand(len(tokens), -1)
        return self._run(through, tokens, pos, cond, level, asked)

    def fused_pass(self) -> Callable[..., Tensor]:
        from visgen.backbones import _mar_fused  # needs Triton

        def run(
            tokens: Tensor, pos: Tensor, *, cond: Prefix, level: Tensor | None = None, asked: Tensor | None = None
        ) -> Tensor:
            return self._run(_mar_fused.through, tokens, pos, cond, level, asked)

        return run

    def _run(
        self, layers: Layers, tokens: Tensor, pos: Tensor, cond: Prefix, level: Tensor | None, asked: Tensor | None
    ) -> Tensor:
        return self._decode(layers, self._encode(layers, tokens, pos, cond, level), pos, level, asked)

    def _encode(self, layers: Layers, tokens: Tensor, pos: Tensor, cond: Prefix, level: Tensor | None) -> Tensor:
        """Known tokens [B, W, C] -> [B, M + W, D]; nothing that is not hidden depends on what is."""
        buffer = self.config.buffer
        given = self.embed(tokens.to(self.embed.weight.dtype))
        x = torch.cat([cond.vectors.to(given.dtype).expand(-1, buffer, -1), given], 1)
        own = self.encoder_positions[0, buffer:][pos]
        places = torch.cat([self.encoder_positions[:, :buffer].expand(len(x), -1, -1), own], 1)
        x, mask = self.embed_norm(x + places), None
        if level is not None:
            mask = F.pad(level < 0, (buffer, 0), value=True)[:, None, None]  # [B, 1, 1, M + W]
        return self.bridge(layers(self.encoder, self.encoder_norm, x, mask))

    def _decode(
        self, layers: Layers, encoded: Tensor, pos: Tensor, level: Tensor | None, asked: Tensor | None
    ) -> Tensor:
        """[B, M + W, D] of the known tokens -> h [B, N, D], or of the places asked for, whose last layer alone has no
        others: all need the keys of all."""
        buffer = self.config.buffer
        found, blank = encoded[:, buffer:], self.mask_token.to(encoded.dtype)
        if level is not None:
            found = torch.where((level < 0).unsqueeze(-1), found, blank)
        x = blank.expand(len(found), self.layout.tokens, -1)
        x = x.scatter(1, pos.unsqueeze(-1).expand_as(found), found)
        x = torch.cat([encoded[:, :buffer], x], 1) + self.decoder_positions
        x = layers(self.decoder, self.decoder_norm, x, None, None if asked is None else asked + buffer)
        return x[:, buffer:] + self.head_positions if asked is None else x + self.head_positions[0][asked]

    def make_cache(self, rows: int, device: torch.device, dtype: torch.dtype, **blocks: Any) -> KVCache:
        raise UserError("a masked model attends in both directions, which no cache can hold; use --sampler.kind masked")

    def _init(self) -> None:
        """Xavier for every matrix, N(0, 0.02) for positions and the mask token, as published."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        for table in (self.mask_token, self.encoder_positions, self.decoder_positions, self.head_positions):
            nn.init.normal_(table, std=0.02)


def through(
    blocks: nn.ModuleList, norm: nn.Module, x: Tensor, mask: Tensor | None = None, asked: Tensor | None = None
) -> Tensor:
    """x [B, S, D] through blocks and the norm behind them, of which the last asks for the slots [B, A] alone.

    Args:
        mask: [B, 1, 1, S] bool, the slots that are seen.
    """
    for i, block in enumerate(blocks, 1):
        x = block(x, mask, asked if i == len(blocks) else None)
    found: Tensor = norm(x)
    return found


class Block(nn.Module):
    """x + Attn(LN(x)), x + MLP(LN(x)), as in ViT (Dosovitskiy et al. 2020, arXiv 2010.11929), with exact GELU."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        hidden = int(config.width * config.mlp)
        self.ffn = nn.Sequential(
            nn.Linear(config.width, hidden),
            nn.GELU(),
            nn.Dropout(config.dropout),
            nn.Linear(hidden, config.width),
            nn.Dropout(config.dropout),
        )

    def forward(  # [B, S, D], [B, 1, 1, S] bool
        self, x: Tensor, mask: Tensor | None = None, asked: Tensor | None = None
    ) -> Tensor:
        """Of all slots, or of those asked for, [B, A]."""
        normed = self.attention_norm(x)
        x = (x if asked is None else _at(x, asked)) + self.attention(normed, mask, asked)
        return x + self.ffn(self.ffn_norm(x))


class Attention(nn.Module):
    """softmax(q k / sqrt(d)) v with biases, over all slots that the mask shows."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, self.rate = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None, asked: Tensor | None = None) -> Tensor:
        return self.dropout(self.out(self.attend(x, mask, asked)))

    def attend(self, x: Tensor, mask: Tensor | None, asked: Tensor | None = None) -> Tensor:
        """What the output's product reads: [B, S, D], or [B, A, D] of the slots asked for."""
        if asked is None:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, S, d]
        else:
            weight, bias, width = self.qkv.weight, self.qkv.bias, x.shape[-1]
            q = F.linear(_at(x, asked), weight[:width], bias[:width]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            kv = F.linear(x, weight[width:], bias[width:])
            k, v = kv.unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        found = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=rate)
        return found.transpose(1, 2).flatten(2)


def _at(x: Tensor, slots: Tensor) -> Tensor:
    """[B, S, D] at slots [B, A] -> [B, A, D]."""
    return x.gather(1, slots.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
