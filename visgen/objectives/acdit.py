"""Blockwise denoising: every block of tokens from its own noise, given the clean blocks before it.

Source: ACDiT (Hu et al. 2024, arXiv 2412.07720, section 3.3). Each block of a sample has an independent time; clean and
noised copies go through the model at once. The loss is the plain mean squared error over all noised tokens. Tokens are
posterior means, where the authors draw from the posterior anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from visgen.config import UserError, plugin, plugin_config
from visgen.data import Batch, Data
from visgen.decode.noise import Noise, Stream
from visgen.model import Model, ModelConfig
from visgen.nn.diffusion import TIMES
from visgen.nn.keyed import Rng, normal, uniform
from visgen.objectives import Logs, Objective
from visgen.objectives._tokens import Previewed, by_band, check_preview, drawn, read_tokenizer, tokens_of


@dataclass(frozen=True)
class PreviewConfig(Previewed):
    """As of every objective."""

    sampler: Any = plugin("visgen.samplers", "blockwise")


def _model() -> ModelConfig:
    return ModelConfig(
        grid=(1, 32, 32),
        channels=4,
        backbone=plugin_config("visgen.backbones", "acdit"),
        head=plugin_config("visgen.heads", "denoiser"),
    )


@dataclass(frozen=True)
class Config:
    """Blockwise denoising.

    Attributes:
        model: backbone, condition, head, grid and channels; the head says what is predicted, on which path.
        tokenizer: run directory or safetensors file of a continuous tokenizer. Needed when the data are pixels (they
            are encoded on the fly) and for previews; kept beside the run.
        times: how training draws a block's time: uniform (as published), or logit_normal, more in the middle.
        preview: images for the logger.
    """

    model: ModelConfig = field(default_factory=_model)
    tokenizer: Path | None = None
    times: Literal["uniform", "logit_normal"] = "uniform"
    preview: PreviewConfig = field(default_factory=PreviewConfig)


class Blocks(Objective):
    """`nets["model"]` returns the mean squared error of the batch's noised tokens."""

    export = "model"
    shards = True
    held_out_values = ("mse",)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.nets = {"model": BlocksNet(Model(config.model))}
        if not self.exported().backbone.denoises:
            raise UserError("objective acdit trains a model of vectors; set objective.model.channels and its backbone")
        self.frozen: dict[str, nn.Module] = {}

    def setup(self, data: Data) -> None:
        self.frozen |= read_tokenizer(self.config.tokenizer, self.exported(), data)

    def loss(self, name: str, nets: dict[str, nn.Module], batch: Batch, step: int, rng: Rng) -> tuple[Tensor, Logs]:
        tokens = tokens_of(batch, self.frozen).float()
        model: Any = self.exported()
        blocks = model.tokens // model.backbone.layout.block
        model.backbone.streams.prepare(tokens.device)
        model.head.path.prepare(tokens.device)
        time = model.head.path.draw((len(tokens), blocks), rng, self.config.times, tokens.device)
        noise = normal(tokens.shape, rng, tokens.device)
        drop = uniform((len(tokens),), rng, tokens.device) < self.config.model.condition.dropout
        return nets[name](tokens, batch, drop, time, noise)

    def held_out(self, model: Any, batch: Batch) -> Logs:
        """The error under noise and times that are the same at every evaluation."""
        tokens = tokens_of(batch, self.frozen).float()
        layout = model.backbone.layout
        fixed = Noise(torch.arange(len(tokens), device=tokens.device))
        at = torch.arange(layout.tokens, device=tokens.device).unsqueeze(0)
        time = fixed.uniform(at[:, : layout.tokens // layout.block], 1, Stream.ACCEPT).squeeze(-1) * (TIMES - 1)
        noise = fixed.normal(at, tokens.shape[-1], Stream.DENOISE)
        return {"mse": error(model, tokens, batch, None, time.round(), noise).mean()}

    def check_preview(self) -> None:
        if "tokenizer" in self.frozen:
            check_preview(self.exported(), self.config.preview)

    def preview(self, model: nn.Module, batch: Batch, seed: int) -> Tensor | None:
        return drawn(model, self.frozen.get("tokenizer"), self.config.preview, seed)


class BlocksNet(nn.Module):
    """tokens [B, N, C] in raster order, their noise and their blocks' times -> (mean squared error, logs)."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, tokens: Tensor, batch: Batch, drop: Tensor | None, time: Tensor, noise: Tensor
    ) -> tuple[Tensor, Logs]:
        found = error(self.model, tokens, batch, drop, time, noise)
        loss, each = found.mean(), found.detach()
        logs = {"mse": loss.detach()}
        return loss, logs | by_band(each, time)


def error(model: Any, tokens: Tensor, batch: Any, drop: Tensor | None, time: Tensor, noise: Tensor) -> Tensor:
    """Mean squared error of every block [B, blocks] of tokens and noise [B, N, C], both in raster order."""
    layout, path = model.backbone.layout, model.head.path
    order = model.backbone.raster(torch.arange(layout.tokens, device=tokens.device))
    tokens, noise = tokens[:, order], noise[:, order]
    each = time.repeat_interleave(layout.block, 1).unsqueeze(-1)  # [B, N, 1]
    noised = path.noised(tokens, noise, each)
    before = layout.tokens - layout.block
    streams = torch.cat([tokens[:, :before], noised], 1)
    h = model.backbone(streams, None, cond=model.condition(batch, drop), level=time)
    found = model.head.loss(h, path.target(tokens, noise))
    return found.unflatten(1, (-1, layout.block)).mean(-1)
