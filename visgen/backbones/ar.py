"""LlamaGen's autoregressive transformer (Sun et al. 2024, arXiv 2406.06525, section 3.2).

Pre-norm blocks x + Attn(rms(x)), x + SwiGLU(rms(x)); 2-D rotary positions whose prefix rows are zero; raster order.

Vectors may stand in any order (causal MAR, Li et al. 2024, arXiv 2406.11838, section 3.4): a token is rotated by its
own place, and the slot before it is told that place by an embedding, added to its input and to what it predicts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor, nn

from visgen.backbones._trunk import Trunk, TrunkConfig
from visgen.checks import Positive, Rate, UserError
from visgen.conditions import Prefix
from visgen.layout import Layout
from visgen.nn.cache import KVCache
from visgen.nn.mlp import CodeEmbedding

if TYPE_CHECKING:
    from visgen.backbones._ar_fused import FusedAR


@dataclass(frozen=True)
class Config(TrunkConfig):
    """Autoregressive transformer; the defaults are LlamaGen-B.

    Attributes:
        continuous: tokens are vectors, which a linear map embeds; the model's head is then `diffusion`.
        order: of vectors, in which they are trained and drawn: raster, or random, one for each image.
        code_channels: read a code by its vector of so many channels (the tokenizer's), through an MLP in place of a
            table; such a model can be told vectors that are no codes (`objectives/dd2_teacher.py`).
    """

    token_dropout: Rate = 0.1
    residual_dropout: Rate = 0.1
    mlp_dropout: Rate = 0.1
    continuous: bool = False
    order: Literal["raster", "random"] = "raster"
    code_channels: Positive | None = None


class ARTransformer(Trunk):
    """Causal transformer over `[prefix | tokens]`; slot P - 1 + k predicts token k."""

    tok_embeddings: Any

    def add_inputs(self, vocab: int) -> None:
        self.continuous = self.config.continuous
        if self.continuous:
            self.sampler = "causal"
        self.ordered = self.config.order == "random"
        if self.ordered and not self.continuous:
            raise UserError("backbone order random is for vectors; set continuous, or leave it out")
        if self.ordered:
            self.targets = nn.Embedding(self.layout.tokens, self.width)
            self.head_positions = nn.Embedding(self.layout.tokens, self.width)
        channels = self.config.code_channels
        if channels is None:
            self.tok_embeddings = (nn.Linear if self.continuous else nn.Embedding)(vocab, self.width)
            return
        if self.continuous:
            raise UserError("backbone.code_channels are of codes, backbone.continuous is of vectors; set one of them")
        self.tok_embeddings = CodeEmbedding(vocab, channels, self.width)

    @property
    def codes(self) -> Tensor | None:
        """[V, C] where codes are read by their vectors."""
        return getattr(self.tok_embeddings, "codes", None)

    def embed(self, tokens: Tensor, pos: Tensor | None, cond: Prefix, level: Tensor | None = None) -> Tensor:
        """Input vectors of the window [B, W, D]: the condition's at prefix slots, code embeddings elsewhere."""
        embedded = self.tok_embeddings(tokens.to(self.norm.weight.dtype) if self.continuous else tokens)
        return self.behind(embedded, cond.vectors.to(embedded.dtype), pos)

    def forward(
        self,
        tokens: Tensor,
        pos: Tensor | None,
        *,
        cond: Prefix,
        level: Tensor | None = None,
        control: Tensor | None = None,
        cache: KVCache | None = None,
        order: Tensor | None = None,
    ) -> Tensor:
        """As in the contract.

        Args:
            order: [B, N] the place, in raster order, of the token that stands n-th; None: n.
        """
        x = self.embed(tokens, pos, cond, level)  # [B, W, D]
        if not self.ordered:
            return self.run(x, pos, cond, control, cache)
        if order is None:
            order = torch.arange(self.layout.tokens, device=x.device).expand(len(x), -1)
        h = self.run(x + self._told(self.targets, pos, order, x.shape[1]), pos, cond, control, cache, order)
        return h + self._told(self.head_positions, pos, order, x.shape[1])

    def _told(self, table: nn.Embedding, pos: Tensor | None, order: Tensor, width: int) -> Tensor:
        """Of every slot of the window, the embedding [B, W, D] of the place whose token it predicts, or zero."""
        slots = torch.arange(width, device=order.device).unsqueeze(0) if pos is None else pos
        index = (slots + 1 - self.layout.prefix).expand(len(order), -1)
        predicts = (index >= 0) & (index < self.layout.tokens)
        return table(order.gather(1, index.clamp(0, self.layout.tokens - 1))) * predicts.unsqueeze(-1)

    def at(self, layout: Layout) -> Self:
        if self.ordered:
            raise UserError("a model of random order has embeddings of its own places alone; leave size out")
        return super().at(layout)

    def fused(self) -> FusedAR | None:
        if self.continuous or self.config.code_channels is not None:
            return None
        from visgen.backbones._ar_fused import FusedAR  # needs Triton

        return FusedAR(self)
