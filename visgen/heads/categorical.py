"""Categorical head: one linear map to logits over the codebook."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn import functional as F

from visgen.checks import Share
from visgen.heads import Head
from visgen.nn.guided import Guided
from visgen.nn.projected import Projected


@dataclass(frozen=True)
class Config:
    """Categorical head.

    Attributes:
        label_smoothing: mass spread evenly over the vocabulary in the training loss; in eval mode there is none, so
            that the loss is a likelihood.
    """

    label_smoothing: Share = 0.0


class CategoricalHead(Head):
    """h [B, W, D] -> logits [B, W, V]; initialised to zero, so training starts at ln V (LlamaGen section 2.7)."""

    regions = ("loss",)

    def __init__(self, config: Config, width: int, vocab: int) -> None:
        super().__init__()
        self.config = config
        self.output = nn.Linear(width, vocab, bias=False)
        nn.init.zeros_(self.output.weight)

    def loss(self, h: Tensor, target: Tensor) -> Tensor:
        logits = self.output(h).float().flatten(0, -2)  # [B W, V], codes in a row: their sum reads memory as it lies
        smoothing = self.config.label_smoothing if self.training else 0.0
        loss = F.cross_entropy(logits, target.flatten(), reduction="none", label_smoothing=smoothing)
        return loss.view_as(target)

    def dist(self, h: Tensor, weights: Tensor) -> Guided:
        """Guidance acts on logits: sum_k weights_k logits_k in float32; weights sum to 1 over k."""
        return Guided(self.output(h), weights)  # [K, B, W, V]

    def law(self, h: Tensor) -> Projected:
        return Projected(h, self.output.weight)
