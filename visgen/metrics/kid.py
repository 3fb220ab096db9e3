"""Kernel Inception Distance: the unbiased squared MMD under k(x, y) = (x.y / D + 1)^3, with an honest error.

Binkowski et al. 2018. The spread over overlapping random subsets that is usually printed is not an error of anything.
Here: the mean over disjoint blocks with a t interval (large sets), or a delete-one-group jackknife of the full
U-statistic (small sets).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from visgen.config import UserError
from visgen.metrics.images import AllReduce, require_once
from visgen.metrics.intervals import interval, jackknife
from visgen.metrics.protocol import Score

BLOCK = 1000  # images per block at least
MIN_BLOCKS = 5  # below this many blocks their mean has no useful error: jackknife


class FeatureBank:
    """The features of `n` images by index, [n, D] float32; processes fill their own rows and add up."""

    def __init__(self, dim: int, n: int, device: torch.device | str = "cpu") -> None:
        self.features = torch.zeros(n, dim, device=device)
        self.seen = torch.zeros(n, dtype=torch.int64, device=device)  # [n]

    def update(self, features: Tensor, index: Tensor) -> None:
        """Stores features [B, D] of images `index` [B]."""
        index = index.to(self.features.device)
        self.features[index] = features.to(self.features)
        self.seen.index_add_(0, index, torch.ones_like(index))

    def reduce(self, all_reduce: AllReduce) -> None:
        """Adds the other processes' rows."""
        self.features, self.seen = all_reduce(self.features), all_reduce(self.seen)

    def all(self) -> Tensor:
        """[n, D].

        Raises:
            UserError: an image did not come exactly once.
        """
        require_once(self.seen, "image")
        return self.features


def kid(x: Tensor, y: Tensor, *, method: str = "auto", groups: int = 25, seed: int = 0) -> Score:
    """KID of features x [N, D] against y [M, D], not multiplied by 1000.

    Args:
        method: `blocks`: B = min(50, min(N, M) // 1000) disjoint blocks; `jackknife`: `groups` groups of the full
            U-statistic, O((N + M)^2 D); `auto`: blocks where there are at least 5.
        seed: of the fixed permutation of both sets before they are cut up, since stored sets are often sorted by class.

    Raises:
        UserError: too few images for the method, features that are not finite, unequal widths.
    """
    if x.ndim != 2 or y.ndim != 2 or x.shape[1] != y.shape[1]:
        raise UserError(f"KID: features have shapes {tuple(x.shape)} and {tuple(y.shape)}; expected [N, D] and [M, D]")
    for name, values in (("x", x), ("y", y)):
        bad = (~torch.isfinite(values).all(1)).nonzero()
        if bad.numel():
            raise UserError(f"KID: features of image {int(bad[0])} of {name} are not finite; look at that image")
    smaller = min(len(x), len(y))
    blocks = min(50, smaller // BLOCK)
    if method == "auto":
        method = "blocks" if blocks >= MIN_BLOCKS else "jackknife"
    x, y = (_permuted(v.double(), seed) for v in (x, y))
    if method == "blocks":
        if blocks < 2:
            raise UserError(f"KID: {smaller} images make {blocks} blocks of {BLOCK}; use method='jackknife'")
        return _over_blocks(x, y, blocks)
    if method != "jackknife":
        raise UserError(f"KID: method '{method}' is unknown; allowed: auto, blocks, jackknife")
    groups = min(groups, smaller // 2)
    if groups < 2:
        raise UserError(f"KID: {smaller} images are too few for an error; use at least 4")
    return _jackknifed(x, y, groups)


def _permuted(features: Tensor, seed: int) -> Tensor:
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    return features[order.to(features.device)]


def _over_blocks(x: Tensor, y: Tensor, blocks: int) -> Score:
    values = [
        _unbiased([float(v) for v in (_off_diagonal(a), _off_diagonal(b), _kernel_sum(a, b))], len(a), len(b))
        for a, b in zip(x.tensor_split(blocks), y.tensor_split(blocks), strict=True)
    ]
    mean = math.fsum(values) / blocks
    se = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (blocks - 1) / blocks)
    return Score(
        mean, se=se, ci95=interval(mean, se, blocks - 1), n=len(x), n_ref=len(y), terms={"blocks": float(blocks)}
    )


def _jackknifed(x: Tensor, y: Tensor, groups: int) -> Score:
    """Leaves out the g-th group of both sets at once, from the kernel sums between all pairs of groups."""
    parts_x, parts_y = x.tensor_split(groups), y.tensor_split(groups)
    xx, yy, xy = (_between(a, b) for a, b in ((parts_x, parts_x), (parts_y, parts_y), (parts_x, parts_y)))  # [G, G]
    for sums, parts in ((xx, parts_x), (yy, parts_y)):
        sums.diagonal().copy_(torch.stack([_off_diagonal(part) for part in parts]).cpu())
    whole = [float(sums.sum()) for sums in (xx, yy, xy)]
    left = []
    for g in range(groups):
        rest = [float(s.sum() - s[g].sum() - s[:, g].sum() + s[g, g]) for s in (xx, yy, xy)]
        left.append(_unbiased(rest, len(x) - len(parts_x[g]), len(y) - len(parts_y[g])))
    value = _unbiased(whole, len(x), len(y))
    se, _ = jackknife(value, left)
    return Score(
        value,
        se=se,
        ci95=interval(value, se, groups - 1),
        n=len(x),
        n_ref=len(y),
        terms={"groups": float(groups)},
        leave_out=tuple(left),
    )


def _between(rows: tuple[Tensor, ...], columns: tuple[Tensor, ...]) -> Tensor:
    return torch.stack([torch.stack([_kernel_sum(a, b) for b in columns]) for a in rows]).cpu()


def _unbiased(sums: list[float], n: int, m: int) -> float:
    """Eq. 4 of Binkowski et al.: kernel sums without the diagonal within the sets, with all pairs between them."""
    xx, yy, xy = sums
    return xx / (n * (n - 1)) + yy / (m * (m - 1)) - 2 * xy / (n * m)


def _kernel(x: Tensor, y: Tensor) -> Iterator[Tensor]:
    for rows in x.split(2048):
        yield (rows @ y.T / x.shape[1] + 1) ** 3


def _kernel_sum(x: Tensor, y: Tensor) -> Tensor:
    return torch.stack([block.sum() for block in _kernel(x, y)]).sum()


def _off_diagonal(x: Tensor) -> Tensor:
    return _kernel_sum(x, x) - ((x.square().sum(1) / x.shape[1] + 1) ** 3).sum()
