"""The networks of Distilled Decoding 2 (arXiv 2510.21003): a causal trunk over vectors, and a head that moves a token.

Generator and guidance network are of this one kind (sections 3.2 and 3.3, appendix C.5); the model's head, a small MLP
(`heads/diffusion.py`, MAR's, predicting velocity), reads the trunk's f_i and a noised token:

    guidance     v = head(q_i^t, t, f_i),  f_i a function of clean tokens before i: the score of token i given these
    generator    q_i = a e_i - t0 head(a e_i, t0, f_i),  f_i a function of the noise before i

with e_i ~ N(0, I), `start` t0 and a = sqrt(t0^2 + (1 - t0)^2), which is what a noised code of unit variance has. The
paper's t0 is 1; there the networks after tuning give the mean of all codes, whatever the noise, so a start below 1 is a
saner one (as the sigma_init of SiD, arXiv 2404.04057). A token is the code nearest to q_i.

The trunk is the teacher's; slot P - 1 + k holds f_k. Tokens and noise enter through an MLP of vectors, since the
generator's are not codes. Not published: the head's size, MAR's seems to fit the number of parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
from torch import Tensor

from visgen.backbones._trunk import Trunk, TrunkConfig
from visgen.checks import Positive, Range
from visgen.conditions import Prefix
from visgen.decode.guidance import Guidance
from visgen.decode.warp import Warp
from visgen.layout import Layout
from visgen.nn.diffusion import TIMES
from visgen.nn.mlp import CodeEmbedding

Start = Annotated[float, Range(0, 1, "(]")]


@dataclass(frozen=True)
class Config(TrunkConfig):
    """Generator and guidance network; the defaults are those of a LlamaGen-B teacher, whose size it must have.

    Attributes:
        channels: width C of a code vector; must be the tokenizer's.
        start: t0, the time that the generator's noise is taken for, above 0 and at most 1, the paper's.
        guidance, warp: of the teacher's probabilities, which the student learns; whoever uses it cannot change them.
    """

    channels: Positive = 8
    start: Start = 1.0
    guidance: Guidance = field(default_factory=Guidance)
    warp: Warp = field(default_factory=Warp)


class FlowStep(Trunk):
    """Causal transformer over `[prefix | code vectors or noise]`; slot P - 1 + k says what the head does to token k."""

    sampler = "one_step"
    cached = False
    snaps = True

    def __init__(self, config: Config, layout: Layout, vocab: int) -> None:
        super().__init__(config, layout, vocab)
        self.taught = config.guidance, config.warp

    def add_inputs(self, vocab: int) -> None:
        self.tok_embeddings = CodeEmbedding(vocab, self.config.channels, self.width)

    @property
    def codes(self) -> Tensor:
        """[V, C] float32, scaled by `nn.mixture.scale_of`."""
        return self.tok_embeddings.codes

    def embed(self, tokens: Tensor, pos: Tensor | None, cond: Prefix, level: Tensor | None) -> Tensor:
        """Input vectors of the window [B, W, D]; tokens are vectors [B, W, C], or ids [B, W] of codes."""
        embedded = self.tok_embeddings(tokens)
        return self.behind(embedded, cond.vectors.to(embedded.dtype), pos)

    def draw(self, noise: Tensor, h: Tensor, head: Any) -> Tensor:
        """The generator's tokens q [B, W, C] float32, from noise [B, W, C] and h [B, W, D] of the same tokens."""
        t = self.config.start
        x = noise.float() * math.hypot(t, 1 - t)
        time = head.about(torch.full((1,), t * TIMES, device=x.device))
        return x - t * head.predict(x, time, head.condition(h))[0]
