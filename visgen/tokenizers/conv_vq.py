"""Convolutional tokenizer with a discrete bottleneck; LlamaGen's VQ-16 and VQ-8 are two of its settings.

Source: LlamaGen, arXiv:2406.06525 (VQ-16: multipliers 1,1,2,2,4; VQ-8: 1,2,2,4), the networks of `nn/conv.py`.
Frames are tokenized one by one. Any resolution whose sides are multiples of the stride can be encoded; `grid` and
`image_size` are those that it was made for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from visgen.checks import Depth, Positive, Range, Rate
from visgen.config import UserError, build, plugin
from visgen.nn.conv import Decoder, Encoder
from visgen.tokenizers import Reconstruction, Tokenizer
from visgen.tokenizers._conv import shapes


@dataclass(frozen=True)
class Config:
    image_size: Positive = 256  # side in pixels
    width: Positive = 128  # channels at full resolution
    decoder_width: Positive | None = None  # of the decoder, the encoder's if none
    # times width, per resolution; the stride is 2 ** (their number - 1)
    multipliers: Annotated[tuple[Positive, ...], Range(1)] = (1, 1, 2, 2, 4)
    res_blocks: Depth = 2  # per resolution in the encoder; the decoder has one more
    z_channels: Positive = 256  # between encoder or decoder and the 1x1 convolutions around the quantizer
    attention: bool = True  # at the lowest resolution
    dropout: Rate = 0.0
    norm_groups: Positive = 32  # of GroupNorm
    # A code of a local encoder sees its patch and a few pixels around it. Else the codes of empty background carry what
    # the rest of the image lacks room for: a better round trip, but tokens that are hard to predict
    local_encoder: bool = False
    quantizer: Any = plugin("visgen.quantizers", "vq")


class ConvVQ(Tokenizer):
    """Encoder, 1x1 convolution, quantizer, 1x1 convolution, decoder."""

    code_parts = ("encoder", "to_code", "quantizer")

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        encoder, decoder = shapes(config)
        self.stride = decoder.stride
        self._check_sides(config.image_size, config.image_size, "tokenizer.image_size")
        side = config.image_size // self.stride
        self.image_size, self.grid = (config.image_size, config.image_size), (1, side, side)
        self.quantizer = build(config.quantizer)
        self.vocab, self.channels = self.quantizer.vocab, self.quantizer.channels
        self.encoder = Encoder(encoder, config.z_channels)
        self.to_code = nn.Conv2d(config.z_channels, self.channels, 1)
        self.from_code = nn.Conv2d(self.channels, config.z_channels, 1)
        self.decoder = Decoder(decoder, config.z_channels)

    def forward(self, pixels: Tensor) -> Reconstruction:
        """Training pass: [B, T, 3, H, W] in [-1, 1] -> unclamped reconstruction, ids [B, T h w], losses."""
        if self.codes_frozen:
            ids = self.encode(pixels)
            return Reconstruction(self._pixels(self.embed(ids), self.grid_of(pixels)), ids)
        quantized = self.quantizer(self._vectors(pixels))
        out = self._pixels(quantized.vectors, self.grid_of(pixels))
        return Reconstruction(out, quantized.ids, quantized.losses, quantized.metrics)

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """[B, T, 3, H, W] in [-1, 1] -> ids [B, T h w] int64, raster order, frame by frame.

        Raises:
            UserError: a side is no multiple of the stride.
        """
        return self.quantizer.encode(self._vectors(pixels))

    def decode(self, tokens: Tensor, grid: tuple[int, int, int] | None = None) -> Tensor:
        """ids [B, N] or code vectors [B, N, C] -> [B, T, 3, H, W] in [-1, 1].

        Args:
            tokens: N = T h w.
            grid: (T, h, w) of the tokens; by default frames of the size that the tokenizer was made for.
        """
        vectors = self.embed(tokens) if tokens.dim() == 2 else tokens
        count, (_, h, w) = tokens.shape[1], self.grid
        grid = grid or (count // (h * w), h, w)
        if grid[0] * grid[1] * grid[2] != count or count == 0:
            raise UserError(
                f"cannot decode {count} tokens as a grid of {grid}; frames of this tokenizer have {h} x {w}"
            )
        return self._pixels(vectors, grid).clamp(-1, 1)

    def embed(self, ids: Tensor) -> Tensor:
        """ids [B, N] -> code vectors [B, N, C]."""
        return self.quantizer.embed(ids)

    def grid_of(self, pixels: Tensor) -> tuple[int, int, int]:
        """(T, h, w) of the tokens of [B, T, 3, H, W]."""
        return pixels.shape[1], pixels.shape[-2] // self.stride, pixels.shape[-1] // self.stride

    def _vectors(self, pixels: Tensor) -> Tensor:
        """[B, T, 3, H, W] -> vectors before quantisation [B, T h w, C]."""
        self._check_sides(pixels.shape[-2], pixels.shape[-1], "the image")
        features = self.to_code(self.encoder(pixels.flatten(0, 1)))  # [B T, C, h, w]
        return features.flatten(2).transpose(1, 2).reshape(pixels.shape[0], -1, self.channels)

    def _pixels(self, vectors: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """[B, T h w, C] -> [B, T, 3, H, W]."""
        frames, h, w = grid
        x = vectors.reshape(-1, h, w, self.channels).permute(0, 3, 1, 2)
        out = self.decoder(self.from_code(x.to(self.from_code.weight.dtype)))
        return out.unflatten(0, (-1, frames))

    def _check_sides(self, height: int, width: int, what: str) -> None:
        if height % self.stride or width % self.stride or not height or not width:
            near = max(self.stride, round(height / self.stride) * self.stride)
            raise UserError(
                f"{what} is {height} x {width} px; its sides must be multiples of the stride {self.stride}, e.g. {near}"
            )
