"""Training at many resolutions: each step has one size, drawn from those of which the tokens are few enough.

ControlAR (arXiv:2410.02705, section 3.3) draws height and width for each batch, and encodes the resized images anew.
Its released code tests the sum of rows and columns instead of their product, so that it always takes the largest size;
here it is the product, as in the paper. Positions are those of the true grid (`backbone.rope_columns` gives the weights
of ControlAR theirs).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from visgen.checks import Positive
from visgen.config import UserError


@dataclass(frozen=True)
class SizesConfig:
    """Sizes of training images.

    Attributes:
        sides: heights and widths in pixels, each with each, multiples of the tokenizer's stride; none: one size.
        most_tokens: an image's tokens at most.
    """

    sides: tuple[Positive, ...] = ()
    most_tokens: Positive = 2304


def allowed(config: SizesConfig, stride: int) -> list[tuple[int, int]]:
    """The (height, width) in pixels to draw from.

    Raises:
        UserError: a side that is no multiple of the stride, or no size of few enough tokens.
    """
    for side in config.sides:
        if side % stride:
            raise UserError(
                f"objective.sizes.sides has {side}, which is no multiple of the tokenizer's stride {stride}"
            )
    sizes = [(h, w) for h in config.sides for w in config.sides if (h // stride) * (w // stride) <= config.most_tokens]
    if not sizes:
        raise UserError(f"objective.sizes.most_tokens {config.most_tokens} is less than any size has; raise it")
    return sizes


def size_of_step(sizes: list[tuple[int, int]], step: int) -> tuple[int, int]:
    """The same for all processes and micro-batches of a step."""
    return random.Random(step).choice(sizes)


def resized(pixels: Tensor, size: tuple[int, int], step: int, exact: bool = False) -> Tensor:
    """Images [B, T, 3, H, W] cropped to the aspect of `size`, at a place that the step draws, and resized to it.

    Args:
        exact: of maps: nearest pixels instead of bilinear ones with antialiasing.
    """
    height, width = pixels.shape[-2:]
    scale = min(height / size[0], width / size[1])
    rows, columns = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    place = random.Random(~step)
    top, left = place.randint(0, height - rows), place.randint(0, width - columns)
    cut = pixels[..., top : top + rows, left : left + columns].flatten(0, 1)
    if exact:
        out = F.interpolate(cut, size, mode="nearest-exact")
    else:
        out = F.interpolate(cut, size, mode="bilinear", align_corners=False, antialias=True)
    return out.unflatten(0, pixels.shape[:2])
