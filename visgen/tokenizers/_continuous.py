"""What continuous tokenizers share: a Gaussian posterior per position, patches of latents, frames one by one.

A token is a patch of `patch` x `patch` latent positions, its values in the order (row, column, channel), channel
fastest, as ACDiT orders them (arXiv 2412.07720). Tokens are posterior means, normalised, so that equal pixels are equal
tokens; training of the tokenizer draws from the posterior (Kingma & Welling 2013, arXiv 1312.6114).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from visgen.config import UserError
from visgen.tokenizers import Reconstruction, Tokenizer

PIXELS = 2**23  # that go through a network at once, in encode and decode


class ContinuousTokenizer(Tokenizer):
    """A subclass calls `_describe` and implements the network: `_posterior`, `_normalised`, `_images`."""

    vocab = None
    stride: int
    patch: int
    kl_weight: float

    def _describe(self, image_size: int, stride: int, latent_channels: int, patch: int, kl_weight: float) -> None:
        self.stride, self.patch, self.kl_weight = stride, patch, kl_weight
        self._check_sides(image_size, image_size, "tokenizer.image_size")
        side = image_size // (stride * patch)
        self.image_size, self.grid = (image_size, image_size), (1, side, side)
        self.channels = latent_channels * patch * patch

    @abstractmethod
    def _posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 3, H, W] -> mean and log variance [B, C, h, w]."""

    @abstractmethod
    def _normalised(self, latents: Tensor) -> Tensor:
        """Latents [B, C, h, w] of about zero mean and unit variance."""

    @abstractmethod
    def _images(self, latents: Tensor, normalised: bool) -> Tensor:
        """Latents [B, C, h, w] -> [B, 3, H, W], not clamped."""

    def _observe(self, latents: Tensor) -> None:
        """Sees the latents of a training step."""

    def forward(self, pixels: Tensor) -> Reconstruction:
        """Training pass: [B, T, 3, H, W] in [-1, 1] -> unclamped reconstruction and the weighted KL divergence from
        the standard normal, in nats a latent value."""
        self._check_sides(pixels.shape[-2], pixels.shape[-1], "the image")
        images = pixels.flatten(0, 1)
        if self.codes_frozen:
            with torch.no_grad():
                latents = self._posterior(images)[0]
            return Reconstruction(self._images(latents, False).unflatten(0, pixels.shape[:2]), None)
        mean, log_variance = (part.float() for part in self._posterior(images))
        latents = mean
        if self.training:
            latents = mean + torch.randn_like(mean) * (log_variance / 2).exp()
            self._observe(latents.detach())
        kl = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        found = self._images(latents, False).unflatten(0, pixels.shape[:2])
        metrics = {"kl_nats": kl.detach(), "posterior_std": (log_variance / 2).exp().mean().detach()}
        return Reconstruction(found, None, {"kl": self.kl_weight * kl}, metrics)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """[B, T, 3, H, W] in [-1, 1] -> tokens [B, T h w, C] float32, raster order, frame by frame.

        Raises:
            UserError: a side is no multiple of the stride times the patch.
        """
        self._check_sides(pixels.shape[-2], pixels.shape[-1], "the image")
        made = [self._normalised(self._posterior(part)[0].float()) for part in self._parts(pixels.flatten(0, 1))]
        latents, p = torch.cat(made), self.patch
        cells = latents.unflatten(-1, (-1, p)).unflatten(-3, (-1, p))  # [B T, c, h, p, w, p]
        return cells.permute(0, 2, 4, 3, 5, 1).reshape(pixels.shape[0], -1, self.channels)

    def decode(self, tokens: Tensor, grid: tuple[int, int, int] | None = None) -> Tensor:
        """Tokens [B, N, C] -> [B, T, 3, H, W] in [-1, 1].

        Args:
            tokens: N = T h w.
            grid: (T, h, w) of the tokens; by default frames of the size that the tokenizer was made for.
        """
        count, (_, h, w) = tokens.shape[1], self.grid
        frames, h, w = grid or (count // (h * w), h, w)
        if frames * h * w != count or count == 0:
            raise UserError(
                f"cannot decode {count} tokens as a grid of {(frames, h, w)}; frames of this tokenizer have "
                f"{self.grid[1]} x {self.grid[2]}"
            )
        p = self.patch
        cells = tokens.reshape(-1, h, w, p, p, self.channels // p**2).permute(0, 5, 1, 3, 2, 4)
        latents = cells.flatten(4).flatten(2, 3)  # [B T, c, h p, w p]
        made = [self._images(part, True) for part in self._parts(latents, self.stride**2)]
        return torch.cat(made).unflatten(0, (-1, frames)).clamp(-1, 1)

    def embed(self, ids: Tensor) -> Tensor:
        """Continuous tokens are their own vectors."""
        return ids

    def grid_of(self, pixels: Tensor) -> tuple[int, int, int]:
        """(T, h, w) of the tokens of [B, T, 3, H, W]."""
        side = self.stride * self.patch
        return pixels.shape[1], pixels.shape[-2] // side, pixels.shape[-1] // side

    def _parts(self, images: Tensor, area: int = 1) -> tuple[Tensor, ...]:
        """[B, ...] in parts whose pictures have at most `PIXELS`; `area` pixels per position."""
        return images.split(max(1, PIXELS // (images.shape[-1] * images.shape[-2] * area)))

    def _check_sides(self, height: int, width: int, what: str) -> None:
        side = self.stride * self.patch
        if height % side or width % side or not height or not width:
            near = max(side, round(height / side) * side)
            raise UserError(
                f"{what} is {height} x {width} px; its sides must be multiples of {side}, the stride {self.stride} "
                f"times the patch {self.patch}, e.g. {near}"
            )
