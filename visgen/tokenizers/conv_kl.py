"""Small convolutional autoencoder with a Gaussian bottleneck, trained by objective `vq` like `conv_vq`.

Source: the KL-regularised autoencoder of latent diffusion (Rombach et al. 2022, arXiv 2112.10752, section 3.1) on the
networks of `nn/conv.py`. Mean and deviation of every latent channel are measured while it trains and normalise its
tokens, so that no scale has to be found afterwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
from torch import Tensor, nn

from visgen.checks import Depth, Positive, Range, Rate, Weight
from visgen.nn.conv import Decoder, Encoder
from visgen.tokenizers._continuous import ContinuousTokenizer
from visgen.tokenizers._conv import shapes


@dataclass(frozen=True)
class Config:
    image_size: Positive = 32  # side in pixels
    channels: Positive = 4  # of a latent
    patch: Positive = 1  # latent positions along each side of a token
    width: Positive = 64  # channels at full resolution
    decoder_width: Positive | None = None  # of the decoder, the encoder's if none
    # times width, per resolution; the stride is 2 ** (their number - 1)
    multipliers: Annotated[tuple[Positive, ...], Range(1)] = (1, 2, 2)
    res_blocks: Depth = 1  # per resolution in the encoder; the decoder has one more
    attention: bool = False  # at the lowest resolution
    dropout: Rate = 0.0
    norm_groups: Positive = 32  # of GroupNorm
    local_encoder: bool = False  # a latent sees its patch and a few pixels around it, as in conv_vq
    kl: Weight = 1e-4  # weight of the KL divergence, nats a latent value, beside pixel losses that are means
    decay: Rate = 0.99  # of the moving statistics that normalise the latents


class ConvKL(ContinuousTokenizer):
    """Encoder, Gaussian bottleneck, decoder."""

    code_parts = ("encoder", "normaliser")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        encoder, decoder = shapes(config)
        self._describe(config.image_size, decoder.stride, config.channels, config.patch, config.kl)
        self.encoder = Encoder(encoder, 2 * config.channels)
        self.normaliser = Normaliser(config.channels, config.decay)
        self.decoder = Decoder(decoder, config.channels)

    def _posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encoder(images).chunk(2, 1)
        return mean, log_variance.clamp(-30, 20)

    def _normalised(self, latents: Tensor) -> Tensor:
        return self.normaliser(latents)

    def _images(self, latents: Tensor, normalised: bool) -> Tensor:
        latents = self.normaliser.inverse(latents) if normalised else latents
        return self.decoder(latents.to(self.decoder.conv_in.weight.dtype))

    def _observe(self, latents: Tensor) -> None:
        self.normaliser.observe(latents)


class Normaliser(nn.Module):
    """Moving mean and mean square of every channel, alike on every process; one update a step of the optimiser."""

    micro_batch = (0, 1)  # which of how many micro-batches of a step the next training forward sees; set by the loop
    pending: Tensor  # [2, C]
    mean: Tensor  # [C]
    square: Tensor  # [C]
    steps: Tensor

    def __init__(self, channels: int, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("pending", torch.zeros(2, channels), persistent=False)  # sums of this step so far
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("square", torch.ones(channels))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, latents: Tensor) -> Tensor:  # [B, C, h, w]
        return (latents - self.mean[:, None, None]) / self._deviation()

    def inverse(self, latents: Tensor) -> Tensor:
        return latents * self._deviation() + self.mean[:, None, None]

    @torch.no_grad()
    def observe(self, latents: Tensor) -> None:
        """Enter the latents of one micro-batch; the first steps are plain means."""
        part, parts = self.micro_batch
        found = torch.stack([latents.mean((0, 2, 3)), latents.square().mean((0, 2, 3))])
        self.pending.copy_(self.pending + found if part else found)
        if part < parts - 1:
            return
        found = self.pending / parts
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(found)
            found = found / dist.get_world_size()
        share = torch.clamp(1 / (self.steps + 1), min=1 - self.decay)
        self.mean.lerp_(found[0], share)
        self.square.lerp_(found[1], share)
        self.steps += 1

    def _deviation(self) -> Tensor:  # [C, 1, 1]
        return (self.square - self.mean.square()).clamp(min=1e-8).sqrt()[:, None, None]
