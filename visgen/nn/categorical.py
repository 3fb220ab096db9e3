"""The categorical law over a vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class NoiseLike(Protocol):
    """What a law asks of `decode.noise.Noise`."""

    seeds: Tensor  # [B]

    def gumbel(self, index: Tensor, lanes: int, stream: int, iteration: Tensor | int = 0) -> Tensor: ...

    def uniform(self, index: Tensor, lanes: int, stream: int, iteration: Tensor | int = 0) -> Tensor: ...


def note(unsound: Tensor, values: Tensor) -> None:
    """Raise the flag unsound [1] where one of the values is NaN or infinite: on the device, in one pass over them."""
    low, high = values.aminmax()
    unsound += (high.float() - low.float()).isfinite().logical_not()  # inf - inf is NaN


@dataclass
class Categorical:
    """Law of tokens by float32 logits [B, W, V], not necessarily normalised; -inf excludes a token."""

    logits: Tensor

    fused = False  # no field: whether the law has a `test`, which does all that a window of drafts asks by one kernel

    @property
    def vocab(self) -> int:
        return self.logits.shape[-1]

    def probs(self) -> Tensor:
        """[B, W, V], rows sum to 1."""
        return self.logits.softmax(dim=-1)

    def likeliest(self) -> Tensor:
        """The most likely tokens: ids [B, W]."""
        return self.logits.argmax(-1)

    def log_prob(self, tokens: Tensor) -> Tensor:
        """Log-likelihood of tokens [B, W] in nats."""
        return self.logits.log_softmax(dim=-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)

    def sample(self, noise: Tensor) -> Tensor:
        """Gumbel-max: argmax of logits + noise [B, W, V] (standard Gumbel) -> ids [B, W]."""
        return (self.logits + noise).argmax(dim=-1)

    def draw(
        self,
        noise: NoiseLike,
        index: Tensor,
        stream: int,
        iteration: Tensor | int = 0,
        where: Tensor | None = None,
    ) -> Tensor:
        """Draws the tokens at positions index [B, W] by the Gumbels of (seed, index, stream, iteration): ids [B, W].

        Only the tokens in `where` [B, W] are looked at, so a kernel may leave out the others (this one does not).
        """
        return self.sample(noise.gumbel(index, self.vocab, stream, iteration))

    def acceptance(self, draft: Tensor, drawn_from: Categorical) -> Tensor:
        """Probability min(1, p(d) / q(d)) of keeping draft d [B, W], drawn from the law q: [B, W].

        Speculative sampling, Leviathan et al. 2023 (arXiv 2211.17192), section 2.3. A draft that q excludes is refused.
        """
        return (self.log_prob(draft) - drawn_from.log_prob(draft)).exp().clamp(max=1).nan_to_num(nan=0.0)

    def accept(
        self,
        draft: Tensor,
        drawn_from: Categorical,
        noise: NoiseLike,
        index: Tensor,
        stream: int,
        iteration: Tensor | int = 0,
        where: Tensor | None = None,
    ) -> Tensor:
        """Keeps a draft [B, W] of `drawn_from` with probability `acceptance`: bool [B, W]; `where` as in `draw`."""
        return noise.uniform(index, 1, stream, iteration).squeeze(-1) < self.acceptance(draft, drawn_from)

    def leftover(self, drawn_from: Categorical) -> Categorical:
        """The law norm(max(p - q, 0)) of the token that replaces a refused draft (same source); p where p = q."""
        rest = (self.probs() - drawn_from.probs()).clamp(min=0)
        empty = rest.sum(-1, keepdim=True) < 1e-12  # only rounding refuses a draft there
        return self.like(torch.where(empty, self.logits, rest.log()))

    def residual(
        self,
        drawn_from: Categorical,
        noise: NoiseLike,
        index: Tensor,
        stream: int,
        iteration: Tensor | int = 0,
        where: Tensor | None = None,
    ) -> Tensor:
        """Draws from `leftover`: ids [B, W]; `where` as in `draw`."""
        return self.leftover(drawn_from).draw(noise, index, stream, iteration, where)

    def overlap(self, other: Categorical) -> Tensor:
        """Sum of min(p, q) [B, W], which is 1 - TV(p, q): how often a draft of q is accepted."""
        return torch.minimum(self.probs(), other.probs()).sum(-1)

    def like(self, logits: Tensor) -> Categorical:
        """Another law of the same kind."""
        return dataclasses.replace(self, logits=logits)

    def warped(self, warp: Callable[[Tensor], Tensor]) -> Categorical:
        """The law after a filter on its logits (temperature, top-k, top-p)."""
        return self.like(warp(self.logits))

    def pin(self, tokens: Tensor, mask: Tensor) -> Categorical:
        """All mass on tokens [B, W] where mask [B, W] is true."""
        certain = torch.full_like(self.logits, -torch.inf).scatter_(-1, tokens.unsqueeze(-1), 0.0)
        return self.like(torch.where(mask.unsqueeze(-1), certain, self.logits))
