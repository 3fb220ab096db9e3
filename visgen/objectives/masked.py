"""Masked prediction of continuous tokens: a random set is hidden, and the head learns each hidden token's law.

Source: MAR (Li et al. 2024, arXiv 2406.11838, sections 3.4 and 4). The share that is hidden follows a normal law around
1 cut to [least, 1]; which tokens, is drawn for every sample. The encoder reads the known tokens alone, the head the
hidden ones alone. Shares are not drawn but spread evenly over the steps, and those of a step are the same in all
processes, so that no process waits for another; tokens are posterior means, where the authors draw from the posterior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.checks import Scale, Share
from visgen.config import UserError, plugin, plugin_config
from visgen.data import Batch, Data
from visgen.decode.noise import Noise
from visgen.model import Model, ModelConfig
from visgen.nn.keyed import Rng, uniform
from visgen.objectives import Logs, Objective
from visgen.objectives._tokens import Previewed, by_band, check_preview, drawn, read_tokenizer, tokens_of

GOLDEN = (math.sqrt(5) - 1) / 2  # whose multiples modulo 1 are spread as evenly as can be


@dataclass(frozen=True)
class PreviewConfig(Previewed):
    """As of every objective."""

    sampler: Any = plugin("visgen.samplers", "masked")


def _model() -> ModelConfig:
    return ModelConfig(
        grid=(1, 16, 16),
        channels=16,
        backbone=plugin_config("visgen.backbones", "mar"),
        head=plugin_config("visgen.heads", "diffusion"),
    )


@dataclass(frozen=True)
class Config:
    """Masked prediction.

    Attributes:
        model: backbone, condition, head, grid and channels.
        tokenizer: run directory or safetensors file of a continuous tokenizer. Needed when the data are pixels (they
            are encoded on the fly) and for previews; kept beside the run.
        least: the least share of tokens that is hidden; the greatest is 1. Published: 0.7; small models then do worse
            where more is known (`held_out/loss_tenth`).
        spread: standard deviation of the normal law around 1 that the share follows between the two.
        preview: images for the logger.
    """

    model: ModelConfig = field(default_factory=_model)
    tokenizer: Path | None = None
    least: Share = 0.7
    spread: Scale = 0.25
    preview: PreviewConfig = field(default_factory=PreviewConfig)


class Masked(Objective):
    """`nets["model"]` returns the head's mean loss over the hidden tokens of a batch."""

    export = "model"
    shards = True
    held_out_values = ("loss", "loss_tenth")

    def __init__(self, config: Config) -> None:
        self.config = config
        self.nets = {"model": MaskedNet(Model(config.model))}
        kind = configs.kind_of(config.model.backbone)
        if self.exported().backbone.sampler != "masked":
            raise UserError(f"objective masked trains a masked backbone, objective.model.backbone is {kind}; use mar")
        self.frozen: dict[str, nn.Module] = {}

    def setup(self, data: Data) -> None:
        self.frozen |= read_tokenizer(self.config.tokenizer, self.exported(), data)

    def share(self, u: float) -> float:
        """Quantile u of the law of the share that is hidden."""
        normal = NormalDist(1, self.config.spread)
        low = normal.cdf(self.config.least)
        return normal.inv_cdf(low + u * (0.5 - low)) if self.config.least < 1 else 1.0

    def hidden(self, step: int) -> int:
        """Number of tokens that are hidden at `step`, at least one."""
        return max(1, math.ceil(self.share((0.5 + step * GOLDEN) % 1) * self.exported().tokens))

    def loss(self, name: str, nets: dict[str, nn.Module], batch: Batch, step: int, rng: Rng) -> tuple[Tensor, Logs]:
        tokens = tokens_of(batch, self.frozen).float()
        count, model = self.hidden(step), self.exported()
        order = uniform(tokens.shape[:2], rng, tokens.device).argsort(1)
        drop = uniform((len(tokens),), rng, tokens.device) < self.config.model.condition.dropout
        draws = model.head.draws(tokens[:, :count].shape, rng, tokens.device)
        loss, logs = nets[name](tokens, batch, drop, order, count, draws)
        return loss, logs | {"hidden": torch.full((), count / model.tokens, device=tokens.device)}

    def held_out(self, model: Any, batch: Batch) -> Logs:
        """The loss at the middle share and at a tenth, which every image comes to while it is drawn, whether training
        hides so few or not; with sets, times and noise that are the same at every evaluation."""
        tokens = tokens_of(batch, self.frozen).float()
        order = Noise(torch.arange(len(tokens), device=tokens.device)).order(model.tokens)
        losses = []
        for share in (self.share(0.5), 0.1):
            h, target = hidden_states(model, tokens, batch, None, order, math.ceil(share * model.tokens))
            losses.append(model.head.loss(h, target).mean())
        return dict(zip(self.held_out_values, losses, strict=True))

    def check_preview(self) -> None:
        if "tokenizer" in self.frozen:
            check_preview(self.exported(), self.config.preview)

    def preview(self, model: nn.Module, batch: Batch, seed: int) -> Tensor | None:
        return drawn(model, self.frozen.get("tokenizer"), self.config.preview, seed)


class MaskedNet(nn.Module):
    """tokens [B, N, C], an order of each sample [B, N] whose first `count` are hidden -> (loss, logs)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, batch: Batch, drop: Tensor | None, order: Tensor, count: int, draws: Any
    ) -> tuple[Tensor, Logs]:
        h, target = hidden_states(self.model, tokens, batch, drop, order, count)
        errors = self.model.head.errors(h, target, draws)  # type: ignore[operator]
        loss, each = errors.mse.mean() + errors.vb.mean(), errors.mse.detach()
        logs = {"loss": loss.detach(), "mse": each.mean(), "vb": errors.vb.detach().mean()}
        return loss, logs | by_band(each, draws.time)


def hidden_states(
    model: Any, tokens: Tensor, batch: Any, drop: Tensor | None, order: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """h [B, count, D] and tokens [B, count, C] of the hidden places."""

    def taken(x: Tensor, places: Tensor) -> Tensor:
        return x.gather(1, places.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    hidden, known = order[:, :count], order[:, count:]
    h = model.backbone(taken(tokens, known), known, cond=model.condition(batch, drop))
    return taken(h, hidden), taken(tokens, hidden)
