"""Two Gaussian chains that meet as often as chance allows: the reflection maximal coupling of their steps.

Both chains step by noise of the same width s. Given the other chain's mean m', noise z and next state m' + s z, a step
from N(m, s^2) is that very state with probability min(1, N(m' + s z; m, s^2) / N(m' + s z; m', s^2)), and else
m + s times z reflected across the plane between the means (Bou-Rabee, Eberle and Zimmer 2020, arXiv 1805.00452; for
diffusion models De Bortoli et al. 2025, arXiv 2501.05370). Over z and the uniform draw it has the law
N(m, s^2) whatever m' is, also where the chains are at different states: so chains that parted may meet again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

TINY = 1e-30  # of a squared distance, below which there is no direction to reflect along; the draft is kept there


class Step(NamedTuple):
    """A step of many chains.

    Attributes:
        state: [..., C] after it.
        met: [...] bool, whether it is the other chain's, bit for bit.
        gap: [...] distance of the means before it, in units of the noise.
    """

    state: Tensor
    met: Tensor
    gap: Tensor


def coupled(mean: Tensor, other: Tensor, noise: Tensor, spread: Tensor, log_uniform: Tensor, followed: Tensor) -> Step:
    """A step of law N(mean, spread^2) that follows another chain's where it can; logarithms of densities, float32.

    Args:
        mean, other: [..., C] means of this chain's and of the other chain's step.
        noise: [..., C] by which the other chain stepped.
        spread: standard deviation of both, above 0.
        log_uniform: [...] logarithm of a uniform draw that is independent of everything else.
        followed: [..., C] where the other chain stepped to, copied where the chains meet.
    """
    gap = (other - mean) / spread
    size, along = gap.square().sum(-1), (gap * noise).sum(-1)
    met = log_uniform <= -along - size / 2
    mirrored = mean + spread * (noise - 2 * gap * (along / size.clamp(min=TINY)).unsqueeze(-1))
    return Step(torch.where(met.unsqueeze(-1), followed, mirrored), met, size.sqrt())
