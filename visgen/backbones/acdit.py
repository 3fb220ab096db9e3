"""ACDiT: a diffusion transformer that is autoregressive over blocks (Hu et al. 2024, arXiv 2412.07720).

Every block of tokens is denoised by a full DiT (Peebles & Xie 2022, arXiv 2212.09748, adaLN-Zero) that also reads the
clean blocks before it. One block of the whole grid is DiT; one token is autoregression token by token. The clean copies
run through the same weights without any condition: no time, no label, shift and scale 0, gate 1. Their keys and values
therefore serve every time, label and guidance branch.

Two rotations: `axial` turns the dimensions of each axis among themselves, as the paper says; `acdit_legacy` is what the
released code does and its weights need (`nn/rope.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visgen.backbones import Backbone
from visgen.checks import Depth, Positive, Scale
from visgen.conditions import Prefix
from visgen.config import UserError
from visgen.layout import Grid, Layout
from visgen.nn.attention import check_heads
from visgen.nn.blockwise import Attend, BlockCache, Kernel, Streams
from visgen.nn.cache import KVCache
from visgen.nn.diffusion import sinusoids
from visgen.nn.norm import RMSNorm
from visgen.nn.rope import axis_base, axis_split, check_head_dim, rope_acdit, rope_axes, rotate, rotate_halves

FREQUENCIES = 256  # of the embedding of time


@dataclass(frozen=True)
class Config:
    """Blockwise diffusion transformer; the defaults are ACDiT-B for ImageNet-256.

    Attributes:
        block: (t, y, x) tokens of a block; its sides divide the grid's. The whole grid: DiT.
        layers, heads, width: depth L, attention heads H, width D; the head dimension is D / H.
        mlp: hidden width of the MLP over D.
        qk_norm: RMS norm of queries and keys; the authors found video to need it.
        rope: how positions turn queries and keys.
        rope_base: base of the frequencies of every axis; None: the authors', from its length.
        norm_eps: epsilon of the RMS norms.
        attention: how it is computed, in training and, for blocks of whole tiles of 128 tokens, in decoding; auto is
            FlexAttention on a GPU for heads of 16 channels and more, a dense mask elsewhere.
    """

    block: tuple[Positive, Positive, Positive] = (1, 16, 16)
    layers: Depth = 12
    heads: Positive = 12
    width: Positive = 768
    mlp: Scale = 4.0
    qk_norm: bool = True
    rope: Literal["axial", "acdit_legacy"] = "axial"
    rope_base: Scale | None = None
    norm_eps: Scale = 1e-6
    attention: Kernel = "auto"


class ACDiT(Backbone):
    """Tokens [B, W, C] of blocks -> what predicts their noise.

    The training pass (`pos` None) takes [clean tokens of all blocks but the last | noised tokens] in the layout's
    order, level [B, blocks], and returns h [B, N, D] of the noised ones. A window is one block: pos [1, W], level [1].
    """

    continuous = True
    denoises = True
    sampler = "blockwise"
    cached = False
    coords: Tensor  # [N, 3]

    def __init__(self, config: Config, layout: Layout, vocab: int) -> None:
        super().__init__()
        self.config, self.layout, self.width = config, layout, config.width
        check_heads(config.width, config.heads)
        head_dim = config.width // config.heads
        check_head_dim(head_dim)
        self.axes = (0, 1, 2) if layout.grid[0] > 1 else (1, 2)
        self.split = axis_split(head_dim, len(self.axes))
        self.bases = [config.rope_base or axis_base(layout.grid[a]) for a in self.axes]
        self.register_buffer("coords", layout.coords, persistent=False)
        self.streams = Streams(layout, config.attention, head_dim)
        self.embed = nn.Linear(vocab, config.width, bias=False)
        self.time = nn.Sequential(
            nn.Linear(FREQUENCIES, config.width), nn.SiLU(), nn.Linear(config.width, config.width)
        )
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.width, eps=config.norm_eps)
        self.modulation = nn.Linear(config.width, 2 * config.width)
        self._init()

    @classmethod
    def arrange(cls, config: Config, grid: Grid, prefix: int, coords: Tensor | None = None) -> Layout:
        """Blocks of the grid; the condition is no slot but modulates the noised tokens."""
        if prefix != 1:
            raise UserError(
                f"model.backbone acdit takes a condition of one vector, such as label; this one has {prefix} slots"
            )
        return Layout.blocks(grid, config.block)

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
        assert level is not None, "a noised token has a time"
        if pos is None:
            clean = self.layout.tokens - self.layout.block
            attends: list[Attend] = [self.streams] * len(self.layers)
            pos = torch.cat([torch.arange(n, device=tokens.device) for n in (clean, self.layout.tokens)]).unsqueeze(0)
        else:
            assert isinstance(cache, BlockCache) and level.shape == (1,)
            clean = tokens.shape[1] - cond.vectors.shape[1] * self.layout.block  # 0 with a cache that keeps blocks
            attends, level = cache.window(pos), level.unsqueeze(0)
        table = self.rotation(pos)
        x = self.embed(tokens.to(self.embed.weight.dtype)).unflatten(1, (-1, self.layout.block))  # [B, blocks, W, D]
        about = F.silu(self.embed_time(level) + cond.vectors.to(x.dtype))  # [B, noised blocks, D]
        for layer, attend in zip(self.layers, attends, strict=True):
            x = layer(x, about, level < 0, table, attend)
        x = self.norm(x[:, clean // self.layout.block :])
        shift, scale = self.modulation(about).unsqueeze(2).chunk(2, -1)
        return (x * (1 + scale) + shift).flatten(1, 2)

    def embed_time(self, level: Tensor) -> Tensor:
        """level [B, blocks] -> [B, blocks, D]; sinusoids (cos | sin) in float32, whatever the weights' type."""
        return self.time(sinusoids(level, FREQUENCIES).to(self.embed.weight.dtype))

    def place(self, pos: Tensor) -> Tensor:
        """Coordinates (t, y, x) of slots; beyond the layout the same blocks follow again, later in time."""
        t, y, x = self.coords[pos % self.layout.tokens].unbind(-1)
        return torch.stack([t + pos // self.layout.tokens * self.layout.grid[0], y, x], -1)

    def raster(self, pos: Tensor) -> Tensor:
        """Raster index of slots, where the tokens of the tokenizer stand."""
        t, y, x = self.place(pos).unbind(-1)
        return (t * self.layout.grid[1] + y) * self.layout.grid[2] + x

    def rotation(self, pos: Tensor) -> Tensor:
        """What `turn` needs of slots pos [1, W]."""
        coords = self.place(pos)[..., -len(self.axes) :]
        make = rope_axes if self.config.rope == "axial" else rope_acdit
        return make(coords, self.split, self.bases)

    def make_cache(
        self, rows: int, device: torch.device, dtype: torch.dtype, blocks: int = 1, branches: int = 1
    ) -> BlockCache:
        """A cache for `rows` images that denoises with blocks - 1 clean ones before it."""
        head_dim = self.width // self.config.heads
        sizes = self.config.layers, rows, self.config.heads, head_dim, self.layout.block
        return BlockCache(*sizes, blocks, branches, device, dtype, self.config.attention)

    def _init(self) -> None:
        """Xavier for every matrix, N(0, 0.02) for the embedding of time, zero for modulations (DiT, section 3.2)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.time:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear) and name.endswith("modulation"):
                nn.init.zeros_(module.weight)


class Block(nn.Module):
    """x + g Attn(m(rms(x))), x + g MLP(m(rms(x))) with m(x) = x (1 + scale) + shift, per block of tokens."""

    plain: Tensor  # [6, 1]

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.width, eps=config.norm_eps)
        hidden = int(config.width * config.mlp)
        self.ffn = nn.Sequential(
            nn.Linear(config.width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, config.width)
        )
        self.modulation = nn.Linear(config.width, 6 * config.width)
        plain = torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0, 1.0]).unsqueeze(-1)  # shift, scale, gate of clean blocks, twice
        self.register_buffer("plain", plain, persistent=False)

    def forward(
        self,
        x: Tensor,  # [B, blocks, W, D]: clean ones, then noised ones
        about: Tensor,  # [B, noised blocks, D]
        clean: Tensor,  # [B or 1, noised blocks] bool: those that are to be run clean all the same
        table: Tensor,
        attend: Attend,
    ) -> Tensor:
        parts = self.modulation(about).unflatten(-1, (6, -1))  # shift, scale, gate of attention, then of the MLP
        plain = self.plain.to(parts.dtype)
        parts = torch.where(clean[..., None, None], plain, parts)
        before = x.shape[1] - parts.shape[1]
        if before:
            parts = torch.cat([plain.expand(len(parts), before, -1, parts.shape[-1]), parts], 1)
        shift, scale, gate, shift_ffn, scale_ffn, gate_ffn = parts.unsqueeze(2).unbind(3)  # [B, blocks, 1, D]
        h = (self.attention_norm(x) * (1 + scale) + shift).flatten(1, 2)
        x = x + gate * self.attention(h, table, attend).view_as(x)
        return x + gate_ffn * self.ffn(self.ffn_norm(x) * (1 + scale_ffn) + shift_ffn)


class Attention(nn.Module):
    """softmax(q k / sqrt(d)) v with biases; q and k are normalised, then turned."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.heads, head_dim = config.heads, config.width // config.heads
        self.turn = rotate if config.rope == "axial" else rotate_halves
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.query_norm, self.key_norm = (
            RMSNorm(head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity() for _ in range(2)
        )
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor, table: Tensor, attend: Attend) -> Tensor:  # [B, S, D]
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, S, d]
        q, k = (self.turn(norm(y), table).to(v.dtype) for norm, y in ((self.query_norm, q), (self.key_norm, k)))
        return self.out(attend(q, k, v).transpose(1, 2).flatten(2))
