"""The student of Distilled Decoding 1: all tokens from their noise in one causal pass (arXiv 2412.17153, section 4).

The trunk of the teacher, an `ar`, with three changes (read from the authors' released code):

- a token's slot reads its noise or, where the token is known already, its code: both vectors, by one linear map, with
  an embedding that says which of the two they are (prefix slots count as known);
- slot P + k predicts token k itself, not token k + 1, so token k sees its own noise and all that comes before it;
- beside the logits a second output may regress the code itself: a norm without weights, shifted and scaled by a learned
  table plus the last condition slot, and a linear map (PixArt's last layer, arXiv 2310.00426).

The teacher's guidance and filters are parts of what is learned, so they stand here, in the file of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from visgen.backbones._trunk import Trunk, TrunkConfig
from visgen.checks import Natural, Positive
from visgen.conditions import Prefix
from visgen.config import UserError
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.layout import Layout


@dataclass(frozen=True)
class Config(TrunkConfig):
    """One-step student; the defaults are those of a LlamaGen-B teacher, whose size it must have.

    Attributes:
        channels: width C of a code vector; must be the tokenizer's.
        second: the first token of the second pass that it is trained for; 0: one pass alone.
        regress: give each token a second output, its code vector.
        guidance, warp: of the teacher's probabilities, which the student learns; whoever uses it cannot change them.
    """

    channels: Positive = 8
    second: Natural = 0
    regress: bool = False
    guidance: Guidance = field(default_factory=Guidance)
    warp: Warp = field(default_factory=Warp)


class OneStep(Trunk):
    """Causal transformer over `[prefix | noise or codes]`; slot P + k predicts token k.

    Attributes:
        codes: [V, C] float32, the tokenizer's, scaled by `nn.mixture.scale_of`; set before training.
    """

    sampler = "one_step"
    cached = False
    shift = 0
    codes: Tensor

    def __init__(self, config: Config, layout: Layout, vocab: int) -> None:
        super().__init__(config, layout, vocab)
        self.taught = config.guidance, config.warp
        if config.second >= layout.tokens:
            raise UserError(f"backbone.second {config.second} must be below the number of tokens, {layout.tokens}")

    def add_inputs(self, vocab: int) -> None:
        channels, width = self.config.channels, self.width
        self.register_buffer("codes", torch.randn(vocab, channels))
        self.input = nn.Linear(channels, width)
        self.known = nn.Embedding(2, width)  # 1: known already, 0: noise
        if self.config.regress:
            self.modulation = nn.Parameter(torch.randn(2, width) * width**-0.5)  # shift, scale
            self.output = nn.Linear(width, channels)

    def embed(self, tokens: Tensor, pos: Tensor | None, cond: Prefix, level: Tensor | None) -> Tensor:
        """Input vectors of the window [B, W, D].

        Args:
            tokens: vectors [B, W, C], or ids [B, W] of known tokens.
            level: [B, W], above 0 where a vector is noise; None: all are known.
        """
        values = tokens if tokens.is_floating_point() else self.codes[tokens]
        embedded = self.input(values.to(self.input.weight.dtype))
        known = torch.ones_like(values[..., 0], dtype=torch.int64) if level is None else (level <= 0).long()
        embedded = embedded + self.known(known).to(embedded.dtype)
        return self.behind(embedded, (cond.vectors + self.known.weight[1]).to(embedded.dtype), pos)

    def vectors(self, h: Tensor, cond: Prefix) -> Tensor:
        """The second output: h [B, W, D] -> scaled code vectors [B, W, C] float32."""
        shift, scale = (self.modulation.unsqueeze(1) + cond.vectors[:, -1]).unsqueeze(2)  # each [B, 1, D]
        x = F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift
        return self.output(x.to(self.output.weight.dtype)).float()
