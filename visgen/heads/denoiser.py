"""Denoising head: one linear map to what a noised token is predicted to be, noise or velocity.

Source: ACDiT's final layer (arXiv 2412.07720), whose norm and modulation are the backbone's. The path of noise is a
part of the model, for sampling must walk the one that was trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from visgen.heads import Head
from visgen.nn.diffusion import Path, Predicts, Schedule


@dataclass(frozen=True)
class Config:
    """Denoising head.

    Attributes:
        predicts: epsilon, on the variance-preserving path of `schedule` (ACDiT as published); velocity, on the
            straight path.
        schedule: betas of the former, by the names of `diffusers`.
    """

    predicts: Predicts = "epsilon"
    schedule: Schedule = "linear"


class Denoiser(Head):
    """h [B, W, D] -> prediction [B, W, C], initialised to zero."""

    continuous = True
    denoises = True

    def __init__(self, config: Config, width: int, vocab: int) -> None:
        super().__init__()
        self.config = config
        self.path = Path(config.predicts, config.schedule)
        self.output = nn.Linear(width, vocab)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)

    def loss(self, h: Tensor, target: Tensor) -> Tensor:
        """Mean squared error over the channels of every token."""
        return (self.output(h).float() - target.float()).square().mean(-1)

    def dist(self, h: Tensor, weights: Tensor) -> Tensor:
        """The guided prediction: sum_k weights_k prediction_k in float32; weights sum to 1 over k."""
        return (self.output(h).float() * weights.unsqueeze(-1)).sum(0)
