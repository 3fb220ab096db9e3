"""Nearest training images: are generated images new, or copies?

A model that memorised its training set scores perfectly by any distance between distributions. What tells it apart is
the distance of each image to its nearest training image, against that of held-out images, which cannot be copies.
Distances are 1 - cosine between features, so in [0, 2].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from visgen.metrics.intervals import normal_p
from visgen.metrics.protocol import Score


def nearest(x: Tensor, views: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
    """The k nearest of M training images to each of N images.

    Args:
        x: features [N, D].
        views: features [V, M, D] of V views of every training image, such as its mirror image; an image is as near as
            its nearest view.

    Returns:
        Distances [N, k] float64, ascending, and the images' indices [N, k].
    """
    unit = F.normalize(views.double(), dim=-1)
    found = [
        (rows @ unit.mT).amax(0).topk(k) for rows in F.normalize(x.double(), dim=-1).split(512)
    ]  # [V, B, M] -> [B, k]
    return (1 - torch.cat([f.values for f in found])).clamp(min=0), torch.cat([f.indices for f in found])


def closer(x: Tensor, y: Tensor) -> Score:
    """Probability that one of x [N] is less than one of y [M], ties count half: 1/2 for equal laws, 1 for copies.

    The area under the ROC curve, with the error of DeLong et al. 1988, eq. 3 (by placements: of each value among the
    other set). `terms` holds the two-sided p of the hypothesis 1/2.
    """
    ahead, behind = _share_above(x, y), 1 - _share_above(y, x)  # [N], [M]
    value = float(ahead.mean())
    se = math.sqrt(float(ahead.var()) / len(x) + float(behind.var()) / len(y))
    return Score(value, se=se, n=len(x), n_ref=len(y), terms={"p": normal_p(value - 0.5, se)})


def _share_above(x: Tensor, y: Tensor) -> Tensor:
    """For each of x [N], the share of y [M] above it, ties count half."""
    y = y.sort().values
    return 1 - (torch.searchsorted(y, x) + torch.searchsorted(y, x, right=True)) / (2 * len(y))


def share_below(x: Tensor, y: Tensor, level: float) -> Score:
    """Share of x [N] below the `level` quantile of y [M]; for equal laws it is about `level`.

    The error adds that of the share to that of the quantile, sqrt(level (1 - level) / M), which supposes that the two
    laws are alike near it. `terms` holds the quantile.
    """
    quantile = torch.quantile(y, level)
    share = float((x < quantile).double().mean())
    se = math.sqrt(share * (1 - share) / len(x) + level * (1 - level) / len(y))
    return Score(share, se=se, n=len(x), n_ref=len(y), terms={"quantile": float(quantile)})


def suspects(distance: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """What to show of N images: half of `count` are the nearest ones, which a sceptic asks for, and half are evenly
    spaced over the quantiles of the others, which says how typical those are. Indices, nearest first."""
    ranked = distance.argsort(stable=True)
    first = ranked[: (count + 1) // 2]
    others = ranked[len(first) :]
    spaced = torch.linspace(0, len(others) - 1, min(count // 2, len(others))).round().long()
    return first, others[spaced]


def histograms(sets: Mapping[str, Tensor], marks: Sequence[float], bins: int = 80) -> Image.Image:
    """One histogram of values >= 0 below the other on a common axis from 0; grey lines at `marks`."""
    left, width, height = 10, 8 * bins, 110
    high = max(float(values.max()) for values in sets.values()) or 1.0
    picture = Image.new("RGB", (width + 2 * left, height * len(sets) + 24), "white")
    draw = ImageDraw.Draw(picture)
    x = [left + mark / high * width for mark in marks]
    for row, (name, values) in enumerate(sets.items()):
        foot = (row + 1) * height
        counts = torch.histc(values.float(), bins, 0, high)
        for i, count in enumerate((counts / counts.max()).tolist()):
            if count:
                draw.rectangle((left + 8 * i, foot - count * (height - 24), left + 8 * i + 6, foot), fill="steelblue")
        draw.line((left, foot, left + width, foot), fill="black")
        text = f"{name}: {len(values)}, median {float(values.median()):.3g}"
        draw.text((left, foot - height + 6), text, fill="black")
    for mark in x:
        draw.line((mark, 24, mark, height * len(sets)), fill="grey")
    for i in range(5):
        value = f"{i * high / 4:.3g}"
        draw.text((left + i * (width - 30) / 4, height * len(sets) + 6), value, fill="black")
    return picture
