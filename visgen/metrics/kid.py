"""Kernel Inception Distance: the unbiased squared MMD under k(x, y) = (x.y / D + 1)^3, with an honest error.

Binkowski et al. 2018. The spread over overlapping random subsets that is usually printed is not an error of anything.
Here: the mean over disjoint blocks with a t interval (large sets), or a delete-one-group jackknife of the full
U-statistic (small sets), also where the images of the two sets belong together (`kid` of three axes).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from visgen.config import UserError
from visgen.metrics.images import AllReduce, require_finite, require_once
from visgen.metrics.intervals import interval, jackknife
from visgen.metrics.protocol import Score

BLOCK = 1000  # images per block at least
MIN_BLOCKS = 5  # below this many blocks their mean has no useful error: jackknife


class FeatureBank:
    """The features of `n` images by index, [n, D] float32; processes fill their own rows and add up."""

    def __init__(self, dim: int, n: int, device: torch.device | str = "cpu") -> None:
        try:
            self.features = torch.zeros(n, dim, device=device)
        except (MemoryError, RuntimeError):
            raise UserError(f"the features of {n} images do not fit the memory; lower --n") from None
        self.seen = torch.zeros(n, dtype=torch.int64, device=device)  # [n]

    def update(self, features: Tensor, index: Tensor) -> None:
        """Store features [B, D] of images `index` [B].

        Raises:
            UserError: a feature is not finite.
        """
        require_finite(features, index)
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

    x [M, R, D] holds R images made for each row of y: of its class, or its reconstruction. Then x and y are not
    independent, and what belongs to one row is not compared: the value is the U-statistic over the M rows (Gretton et
    al. 2012, eq. 4, with the mean over the R images), unbiased at any M and R, and exactly 0 for copies. A class
    histogram shared by both sets would bias the plain value by about -(1/N + 1/M) times the variance between classes.

    Args:
        method: `blocks`: B = min(50, min(N, M) // 1000) disjoint blocks; `jackknife`: `groups` groups of the full
            U-statistic, left out of both sets at once, O((N + M)^2 D); `auto`: blocks where there are at least 5 and
            rows do not belong together.
        seed: of the fixed permutation of both sets before they are cut up, since stored sets are often sorted by class.

    Raises:
        UserError: too few images for the method, features that are not finite, unequal widths.
    """
    matched = x.ndim == 3
    if not 2 <= x.ndim <= 3 or y.ndim != 2 or x.shape[-1] != y.shape[1] or (matched and len(x) != len(y)):
        raise UserError(
            f"KID: features have shapes {tuple(x.shape)} and {tuple(y.shape)}; expected [N, D] or [M, R, D], and [M, D]"
        )
    for name, values in (("x", x.flatten(0, -2)), ("y", y)):
        require_finite(values, what=f"KID: features in {name}")
    smaller = min(len(x), len(y))
    blocks = min(50, smaller // BLOCK)
    if method == "auto":
        method = "blocks" if blocks >= MIN_BLOCKS and not matched else "jackknife"
    x, y = (_permuted(v.double(), seed) for v in (x, y))
    if method == "blocks":
        if matched:
            raise UserError("KID: blocks take no images that belong together; use method='jackknife'")
        if blocks < 2:
            raise UserError(f"KID: {smaller} images make {blocks} blocks of {BLOCK}; use method='jackknife'")
        return _over_blocks(x, y, blocks)
    if method != "jackknife":
        raise UserError(f"KID: method '{method}' is unknown; allowed: auto, blocks, jackknife")
    groups = min(groups, smaller // 2)
    if groups < 2:
        raise UserError(f"KID: {smaller} images are too few for an error; use at least 4")
    return _jackknifed(x if matched else x[:, None], y[:, None], groups, matched)


def _permuted(features: Tensor, seed: int) -> Tensor:
    order = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed))
    return features[order.to(features.device)]


def _over_blocks(x: Tensor, y: Tensor, blocks: int) -> Score:
    values = [
        _unbiased(
            [float(v) for v in (_off_diagonal(a), _off_diagonal(b), _kernel_sum(a, b))], len(a), len(b), len(a) * len(b)
        )
        for a, b in zip(x.tensor_split(blocks), y.tensor_split(blocks), strict=True)
    ]
    mean = math.fsum(values) / blocks
    se = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (blocks - 1) / blocks)
    return Score(
        mean, se=se, ci95=interval(mean, se, blocks - 1), n=len(x), n_ref=len(y), terms={"blocks": float(blocks)}
    )


def _jackknifed(x: Tensor, y: Tensor, groups: int, matched: bool) -> Score:
    """x [N, R, D] and y [M, 1, D]: leaves out the g-th group of rows of both sets at once, from the kernel sums between
    all pairs of groups."""
    parts_x, parts_y = x.tensor_split(groups), y.tensor_split(groups)
    xx, yy, xy = (_between(a, b) for a, b in ((parts_x, parts_x), (parts_y, parts_y), (parts_x, parts_y)))  # [G, G]
    for sums, pairs in ((xx, parts_x), (yy, parts_y)):
        sums.diagonal().sub_(torch.stack([_own(part, part) for part in pairs]).cpu())
    if matched:
        xy.diagonal().sub_(torch.stack([_own(a, b) for a, b in zip(parts_x, parts_y, strict=True)]).cpu())
    xx, xy = xx / x.shape[1] ** 2, xy / x.shape[1]  # from sums over the R images to sums of their means

    def value(sums: list[Tensor], n: int, m: int) -> float:
        return _unbiased([float(s) for s in sums], n, m, n * (m - 1) if matched else n * m)

    left = []
    for g in range(groups):
        rest = [s.sum() - s[g].sum() - s[:, g].sum() + s[g, g] for s in (xx, yy, xy)]
        left.append(value(rest, len(x) - len(parts_x[g]), len(y) - len(parts_y[g])))
    whole = value([s.sum() for s in (xx, yy, xy)], len(x), len(y))
    se, _ = jackknife(whole, left)
    return Score(
        whole,
        se=se,
        ci95=interval(whole, se, groups - 1),
        n=x.shape[0] * x.shape[1],
        n_ref=len(y),
        terms={"groups": float(groups)},
        leave_out=tuple(left),
    )


def _between(rows: tuple[Tensor, ...], columns: tuple[Tensor, ...]) -> Tensor:
    return torch.stack(
        [torch.stack([_kernel_sum(a.flatten(0, 1), b.flatten(0, 1)) for b in columns]) for a in rows]
    ).cpu()


def _unbiased(sums: list[float], n: int, m: int, across: int) -> float:
    """Eq. 4 of Binkowski et al.: kernel sums without the diagonal within the sets, with `across` pairs between them."""
    xx, yy, xy = sums
    return xx / (n * (n - 1)) + yy / (m * (m - 1)) - 2 * xy / across


def _kernel(x: Tensor, y: Tensor) -> Tensor:
    """x [.., N, D], y [.., M, D] -> [.., N, M]."""
    return (x @ y.mT / x.shape[-1] + 1) ** 3


def _kernel_sum(x: Tensor, y: Tensor) -> Tensor:
    """Over all pairs of x [N, D] and y [M, D]."""
    return torch.stack([_kernel(rows, y).sum() for rows in x.split(2048)]).sum()


def _own(x: Tensor, y: Tensor) -> Tensor:
    """Sum over the pairs of one row: x [N, R, D], y [N, S, D]."""
    return _kernel(x, y).sum()


def _off_diagonal(x: Tensor) -> Tensor:
    return _kernel_sum(x, x) - _own(x[:, None], x[:, None])
