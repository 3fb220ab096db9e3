"""Precision and recall of generated images, with errors (Kynkäänniemi et al. 2019, "Improved Precision and Recall").

A set's manifold is the union of balls around its features, each reaching to the point's k-th nearest other point.
Precision: share of generated images inside the real manifold. Recall: share of real images inside the generated one.
Recall grows with the number of generated images: numbers of other N are other metrics.

Distances are float64; the ADM suite computes them in float16, which moves its values by 0.001 to 0.0025.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visgen.config import UserError
from visgen.metrics.images import require_finite
from visgen.metrics.intervals import interval
from visgen.metrics.protocol import Score

ROWS = 1024  # of a block of distances
BLOCKS = 5  # of the manifold's set, whose spread tells its part of the error


def precision_recall(generated: Tensor, reference: Tensor, k: int = 3) -> dict[str, Score]:
    """`precision` and `recall` of features [N, D] against [M, D], on their device.

    A share has two errors. That of the images that are looked up is the binomial one. That of the set which makes the
    manifold comes from 5 disjoint parts of it: each makes a manifold of its own, and the spread of their shares over
    sqrt(5) is the error of the whole, as far as the variance falls as 1/M. Between overlapping sets it does (true
    spread within a tenth in simulation). Of sets so far apart that the wide balls of a few outliers decide, at shares
    below 0.7, the error is up to 1.5 times too small. A jackknife says 1.7 times too much.

    Raises:
        UserError: too few images for k neighbours, features that are not finite.
    """
    sets = {"generated": generated.double(), "reference": reference.double()}
    for name, x in sets.items():
        require_finite(x, what=f"{name} features")
        if len(x) <= k:
            raise UserError(f"precision and recall need more than k = {k} {name} images, got {len(x)}; give more")
    gen, ref = sets.values()
    return {"precision": _share(gen, ref, k, len(gen), len(ref)), "recall": _share(ref, gen, k, len(gen), len(ref))}


def _share(x: Tensor, y: Tensor, k: int, n: int, n_ref: int) -> Score:
    """Share of x [N, D] inside the manifold of y [M, D]."""
    inside = covered(x, y, k)
    value, terms = float(inside.mean()), {"k": float(k)}
    blocks = min(BLOCKS, len(y) // (k + 1))
    if blocks < 2:
        return Score(value, n=n, n_ref=n_ref, terms=terms, note=f"no error: {len(y)} images make no two blocks")
    place = torch.arange(len(y), device=y.device) % blocks
    parts = torch.stack([covered(x, y[place == b], k).mean() for b in range(blocks)])
    own, other = float(inside.var()) / len(x), float(parts.var()) / blocks
    se = math.sqrt(own + other)
    terms |= {"se_looked_up": math.sqrt(own), "se_manifold": math.sqrt(other)}
    return Score(value, se=se, ci95=interval(value, se, blocks - 1), n=n, n_ref=n_ref, terms=terms)


def covered(x: Tensor, y: Tensor, k: int) -> Tensor:
    """Does each of x [N, D] lie in a ball of y [M, D]? [N] float64, 1 or 0."""
    radii = torch.cat([_nearest(y, start, k) for start in range(0, len(y), ROWS)])  # [M]
    return torch.cat([(_squared(rows, y) <= radii).any(1) for rows in x.split(ROWS)]).double()


def _nearest(x: Tensor, start: int, k: int) -> Tensor:
    """Squared distance of each of the rows from `start` on to its k-th nearest other row of x [N, D]."""
    d = _squared(x[start : start + ROWS], x)
    place = torch.arange(len(d), device=x.device)
    d[place, place + start] = torch.inf
    return d.topk(k, largest=False).values[:, -1]


def _squared(x: Tensor, y: Tensor) -> Tensor:
    """Squared distances [B, M]; of equal rows 0 up to rounding."""
    d = x.square().sum(1, keepdim=True) + y.square().sum(1) - 2 * x @ y.T
    return d.clamp_(min=0)
