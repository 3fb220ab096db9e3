"""What the convolutional tokenizers share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from visgen.config import UserError
from visgen.nn.conv import Shape


def shapes(config: Any) -> tuple[Shape, Shape]:
    """Sizes of the encoder and the decoder that a tokenizer's settings ask for."""
    if config.local_encoder and config.attention:
        raise UserError("tokenizer.local_encoder sees patches, attention the whole image; set attention to false")
    decoder = Shape(
        config.decoder_width or config.width,
        config.multipliers,
        config.res_blocks,
        config.attention,
        config.dropout,
        config.norm_groups,
    )
    return replace(decoder, width=config.width, local=config.local_encoder), decoder
