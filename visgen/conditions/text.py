"""Text: frozen T5 features of a caption, projected to prefix slots (LlamaGen, arXiv:2406.06525, section 3.2).

`batch["text"]` [B, P, C] holds the features and `batch["text_mask"]` [B, P] bool says which slots are real. Real slots
stand at the *right* end (`left_pad`), so the slot before the first image token always carries text. The null condition
is a stored random buffer, never trained, and keeps the padding of the caption that it stands in for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from visgen.checks import Positive, Share
from visgen.conditions import Condition, Prefix
from visgen.config import UserError
from visgen.nn.mlp import Projection


@dataclass(frozen=True)
class Config:
    """Text condition; the defaults are LlamaGen's (flan-t5-xl).

    Attributes:
        tokens: number P of prefix slots.
        channels: width C of the text features.
        dropout: probability that training replaces a sample's text by the null text.
        encoder: the T5 whose features these are, a directory or Hub id; sampling takes it unless told another.
        clean: whether captions were cleaned before it (`visgen.prompts.clean_caption`).
    """

    tokens: Positive = 120
    channels: Positive = 2048
    dropout: Share = 0.1
    encoder: str = "google/flan-t5-xl"
    clean: bool = True


class Text(Condition):
    """text [B, P, C], text_mask [B, P] bool (absent: all real) -> P prefix slots, padding invisible."""

    uncond_embedding: Tensor  # [P, C]

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.config, self.prefix = config, config.tokens
        self.cap_proj = Projection(config.channels, width)
        self.register_buffer("uncond_embedding", torch.randn(config.tokens, config.channels) / config.channels**0.5)

    def forward(self, batch: Mapping[str, Any], drop: Tensor | None = None) -> Prefix:
        if "text" not in batch:
            raise UserError(
                f"the batch holds no `text` features ({', '.join(batch) or 'nothing'} only), on which this model is "
                f"conditioned; give it data with [B, {self.config.tokens}, {self.config.channels}] of them, or labels "
                "as its condition"
            )
        text: Tensor = batch["text"]
        mask: Tensor | None = batch.get("text_mask")
        wanted = (self.config.tokens, self.config.channels)
        if tuple(text.shape[1:]) != wanted:
            raise UserError(
                f"text features are {list(text.shape)}, the model wants [B, {wanted[0]}, {wanted[1]}]; "
                "pad them with left_pad and use the text encoder that the model was trained with"
            )
        if mask is not None and mask.shape != text.shape[:2]:
            raise UserError(f"text_mask is {list(mask.shape)}, it must be {list(text.shape[:2])} as the features")
        vectors = self.cap_proj(text.to(self.cap_proj.fc1.weight.dtype))  # [B, P, D]
        if drop is not None:
            vectors = torch.where(drop[:, None, None], self._null_vectors(), vectors)
        return Prefix(vectors, None if mask is None else mask.bool())

    def null(self, given: Prefix) -> Prefix:
        return Prefix(self._null_vectors().expand_as(given.vectors), given.visible)

    def _null_vectors(self) -> Tensor:
        """[P, D]."""
        return self.cap_proj(self.uncond_embedding.to(self.cap_proj.fc1.weight.dtype))


def left_pad(features: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Moves the real slots to the right end, in order, and zeroes the padding.

    Args:
        features: [B, P, C].
        mask: [B, P], true where a slot is real; padding may stand anywhere.

    Returns:
        features [B, P, C] and mask [B, P] bool, as `Text` wants them.
    """
    mask = mask.bool()
    order = mask.to(torch.uint8).argsort(dim=1, stable=True)  # [B, P]: padding first, both in their order
    moved = features.gather(1, order.unsqueeze(-1).expand_as(features))
    mask = mask.gather(1, order)
    return torch.where(mask.unsqueeze(-1), moved, 0), mask
