"""Fréchet distance between Gaussians fitted to features, with its error, its floor and its bias removed.

    FD = |m - m_ref|^2 + tr S + tr S_ref - 2 tr (S_ref^1/2 S S_ref^1/2)^1/2          (Heusel et al. 2017, eq. 6)

Everything is float64. The last trace is the sum of the square roots of the eigenvalues of R^T S R with S_ref = R R^T:
real and >= 0 by construction, so there is no matrix square root, no imaginary part and no epsilon. The error is a
delete-one-group jackknife: `Moments` keep each group's sums, so it costs eigenvalues only, never a second look at the
images.
"""

from __future__ import annotations

import hashlib
import io
import math
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visgen import tensors
from visgen.config import UserError
from visgen.metrics.images import AllReduce, require_finite
from visgen.metrics.intervals import interval, jackknife, t_central
from visgen.metrics.protocol import Score, group_of

AGAIN = "copy the file again, or build the statistics anew"
ASYMMETRY = 1e-4  # of a covariance, relative to its largest value; float32 rounding is 1e-7
SPREAD = 1e-6  # deviation of features, relative to their mean, below which they are equal but for rounding
LARGEST = 1 << 30  # bytes of a member of an .npz


@dataclass(eq=False)
class Stats:
    """Mean [D] and covariance [D, D] (N - 1 in the denominator) of `n` features; n = 0: taken as exact."""

    mean: Tensor
    cov: Tensor
    n: int = 0

    @property
    def dim(self) -> int:
        return self.mean.numel()

    @cached_property
    def eigenvalues(self) -> Tensor:
        """Of the covariance, [D], clamped at 0."""
        return torch.linalg.eigvalsh(self.cov).clamp(min=0)

    @cached_property
    def root(self) -> Tensor:
        """R [D, rank] with cov = R R^T: Cholesky, or eigenvectors where the covariance is singular."""
        factor, failed = torch.linalg.cholesky_ex(self.cov)
        if not failed:
            return factor
        values, vectors = torch.linalg.eigh(self.cov)
        keep = values > values[-1] * self.dim * torch.finfo(values.dtype).eps
        return vectors[:, keep] * values[keep].sqrt()

    def to(self, device: torch.device | str) -> Stats:
        """Itself where it is there already, which keeps the cached root."""
        same = self.mean.device == torch.device(device)
        return self if same else Stats(self.mean.to(device), self.cov.to(device), self.n)

    def save(self, path: str | Path, **about: str) -> None:
        """Write a safetensors file; `about` (e.g. protocol fields) goes into its header."""
        tensors.write(Path(path), {"mean": self.mean, "cov": self.cov, "n": torch.tensor(self.n)}, about)

    @classmethod
    def load(cls, path: str | Path, keys: tuple[str, str] = ("mu", "sigma")) -> tuple[Stats, dict[str, str]]:
        """Statistics and header of a file of `save`, or of an .npz with `keys` (ADM: mu, sigma; sFID: mu_s, sigma_s).

        The header always holds `sha256` of the file. An .npz does not say its N: it counts as exact.

        Raises:
            UserError: the file is missing or damaged, or holds no statistics.
        """
        path = Path(path)
        if not path.is_file():
            raise UserError(f"reference statistics {path} do not exist; pass a .safetensors or .npz file")
        with open(path, "rb") as file:
            about = {"sha256": hashlib.file_digest(file, "sha256").hexdigest()}
        if path.suffix == ".npz":
            return cls.checked(_member(path, keys[0]), _member(path, keys[1]), 0, path), about
        found, header = tensors.read(path, AGAIN)
        if not {"mean", "cov", "n"} <= found.keys() or found["n"].numel() != 1:
            raise UserError(f"{path} holds no mean, cov and n; {AGAIN}")
        return cls.checked(found["mean"], found["cov"], int(found["n"]), path), {**header, **about}

    @classmethod
    def checked(cls, mean: Tensor, cov: Tensor, n: int, path: Path) -> Stats:
        """Return statistics that were read from the file `path`.

        Raises:
            UserError: they are no mean and covariance, or the covariance is zero.
        """
        if mean.ndim != 1 or not len(mean) or cov.shape != (len(mean), len(mean)):
            raise UserError(f"{path}: mean {list(mean.shape)} and covariance {list(cov.shape)} do not fit; {AGAIN}")
        if n < 0:
            raise UserError(f"{path}: its number of images is {n}; {AGAIN}")
        mean, cov = mean.double(), cov.double()
        tensors.check_finite({"mean": mean, "covariance": cov}, path, AGAIN)
        if (cov - cov.T).abs().max() > ASYMMETRY * cov.abs().max():
            raise UserError(f"{path}: its covariance is not symmetric; {AGAIN}")
        if cov.diagonal().min() < 0:
            raise UserError(f"{path}: its covariance has a negative variance; {AGAIN}")
        stats = cls(mean, cov, n)
        stats.require_spread(str(path))
        return stats

    def require_spread(self, name: str) -> None:
        """Raise `UserError` where all features of the set `name` are equal: there is nothing to compare with."""
        if self.cov.diagonal().max() <= SPREAD**2 * self.mean.square().max():
            raise UserError(f"{name}: all its images have equal features, so it has no spread; pass other images")


def _member(path: Path, key: str) -> Tensor:
    """Return an array of an .npz, float64; the archive's own checksum of it is compared."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist()]
            if key not in names:
                raise UserError(f"{path} holds {', '.join(names)}; expected {key}")
            if archive.getinfo(f"{key}.npy").file_size > LARGEST:
                raise UserError(f"{path}: '{key}' is larger than statistics of any extractor; {AGAIN}")
            array = np.lib.format.read_array(io.BytesIO(archive.read(f"{key}.npy")), allow_pickle=False)
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))
    except UserError:
        raise
    except Exception as error:  # damaged archives and arrays raise anything
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is damaged: '{key}' cannot be read ({reason}); {AGAIN}") from None


class Moments:
    """Sums of the features of `n` images by jackknife group; constant memory in n, merged by plain addition.

    Args:
        dim: width D of the features.
        n: images that will come, with indices 0 .. n - 1; fixes which group an index belongs to.
        groups: jackknife groups; 1 where no error is wanted (a reference). Memory: groups * D^2 * 8 bytes.
        centre: [D] subtracted before summing; the same on every process. Only a guard against cancellation.
        device: where the sums live and the eigenvalues are solved; needs float64 (any but MPS).
    """

    def __init__(
        self, dim: int, n: int, groups: int = 25, centre: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.dim, self.n, self.groups = dim, n, min(groups, n)
        kind: dict[str, Any] = {"dtype": torch.float64, "device": device}
        self.centre = torch.zeros(dim, **kind) if centre is None else centre.to(**kind)
        self.count = torch.zeros(self.groups, **kind)  # [G]
        self.total = torch.zeros(self.groups, dim, **kind)  # [G, D]    sum of (x - c)
        self.outer = torch.zeros(self.groups, dim, dim, **kind)  # [G, D, D] sum of (x - c) (x - c)^T

    def update(self, features: Tensor, index: Tensor) -> None:
        """Adds features [B, D] of images `index` [B].

        Raises:
            UserError: a feature that is not finite, naming its image; an index outside 0 .. n - 1.
        """
        index = index.cpu()
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < self.n:
            raise UserError(f"image index {int(index.max())} is outside 0..{self.n - 1}; mask the filling rows (-1)")
        require_finite(features, index)
        x = features.to(self.centre.device).double() - self.centre  # [B, D]
        group = group_of(index, self.n, self.groups)
        for g in group.unique().tolist():
            rows = x[(group == g).to(x.device)]
            self.count[g] += len(rows)
            self.total[g] += rows.sum(0)
            self.outer[g].addmm_(rows.T, rows)

    def merge(self, other: Moments) -> Moments:
        """Adds another share of the same set, in place."""
        if (self.dim, self.n, self.groups) != (other.dim, other.n, other.groups) or (self.centre != other.centre).any():
            raise UserError("moments to merge differ in dim, n, groups or centre; build both with the same arguments")
        for mine, theirs in zip(self._sums(), other._sums(), strict=True):
            mine += theirs.to(mine.device)
        return self

    def reduce(self, all_reduce: AllReduce) -> None:
        """Replaces the sums by those over all processes, in one reduction: the outer sums go as upper triangles."""
        row, column = torch.triu_indices(self.dim, self.dim, device=self.outer.device)
        parts = [self.count, self.total, self.outer[:, row, column]]
        whole = all_reduce(torch.cat([part.flatten() for part in parts]))
        sums = [x.view_as(part) for x, part in zip(whole.split([p.numel() for p in parts]), parts, strict=True)]
        self.count, self.total = sums[0].clone(), sums[1].clone()
        self.outer[:, row, column] = sums[2]
        self.outer[:, column, row] = sums[2]

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.count, self.total, self.outer

    def state_dict(self) -> dict[str, Tensor]:
        """Tensors only, for safetensors; `load_state_dict` of equally built moments restores them."""
        return {"count": self.count, "total": self.total, "outer": self.outer, "centre": self.centre}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name, mine in self.state_dict().items():
            mine.copy_(state[name])

    def stats(self) -> Stats:
        """Statistics of all n images.

        Raises:
            UserError: not all n images have come.
        """
        seen = int(self.count.sum())
        if seen != self.n:
            raise UserError(f"{seen} of {self.n} images were scored; a distance needs exactly the planned number")
        return self._stats(*(sums.sum(0) for sums in self._sums()))

    def leave_one_out(self) -> Iterator[Stats]:
        """Statistics of all images but group 0, but group 1, .."""
        count, total, outer = (sums.sum(0) for sums in self._sums())
        for g in range(self.groups):
            yield self._stats(count - self.count[g], total - self.total[g], outer - self.outer[g])

    def _stats(self, count: Tensor, total: Tensor, outer: Tensor) -> Stats:
        n = int(count)
        if n < 2:
            raise UserError(f"a covariance needs at least 2 images, got {n}")
        mean = total / n
        cov = (outer - torch.outer(total, mean)) / (n - 1)
        return Stats(mean + self.centre, (cov + cov.T) / 2, n)


# -------------------------------------------------------------------------------------------------- the distance


def frechet_distance(
    generated: Moments | Stats,
    reference: Moments | Stats,
    *,
    extractor: str = "the extractor",
    allow_small: bool = False,
    with_error: bool = True,
) -> Score:
    """Fréchet distance with jackknife error, bias-corrected value and noise floor.

    The error and correction are those of the generated set (its `Moments` have groups); the reference is held fixed,
    so the bias of a sampled reference stays in the corrected value.
    The correction is left out below N = 2 D, where the 1/N expansion is poor. `floor` is what a perfect model would
    score at this N.

    Raises:
        UserError: N <= D on either side, unless `allow_small`.
    """
    ref = reference.stats() if isinstance(reference, Moments) else reference
    gen = generated.stats() if isinstance(generated, Moments) else generated
    ref = ref.to(gen.mean.device)
    if gen.dim != ref.dim:
        raise UserError(f"features have {gen.dim} dimensions, the reference {ref.dim}; use one extractor for both")
    require_enough(gen.n, gen.dim, extractor, allow_small)
    require_enough(ref.n, ref.dim, extractor, allow_small, what="reference images")
    terms = frechet_terms(gen, ref)
    value = terms.pop("distance")
    if not math.isfinite(value):
        raise UserError(f"the Fréchet distance is {value}: statistics of {extractor} are not finite; build them anew")
    score = Score(value, n=gen.n or None, n_ref=ref.n or None, floor=noise_floor(ref, gen.n), terms=terms)
    if not isinstance(generated, Moments) or generated.groups < 2 or not with_error:
        return replace(score, note="no error: needs Moments of 2 groups or more")
    left = tuple(frechet_terms(stats, ref)["distance"] for stats in generated.leave_one_out())
    se, corrected = jackknife(value, left)
    enough = gen.n >= 2 * gen.dim
    return replace(
        score,
        se=se,
        ci95=interval(value, se, len(left) - 1),
        bias_corrected=corrected if enough else None,
        leave_out=left,
        note="" if enough else f"no bias correction: N = {gen.n} is below 2 D = {2 * gen.dim}",
    )


def require_enough(
    n: int, dim: int, extractor: str = "the extractor", allow_small: bool = False, what: str = "images"
) -> None:
    """Raises `UserError` unless n > D, so that a program can refuse before it samples; n = 0 stands for exact."""
    if 0 < n <= dim and not allow_small:
        kid = "" if "clips" in what else "score a small set by `python eval/small.py` (KID), "
        raise UserError(
            f"n = {n} {what} is not above the {dim} feature dimensions of {extractor}, so the covariance is singular "
            f"and the distance means little; use n >= {2 * dim} (10000 is usual), {kid}or pass --allow-small and trust "
            "the KID beside it alone"
        )


def frechet_terms(gen: Stats, ref: Stats) -> dict[str, float]:
    """`distance` and its parts: mean, tr_ref, tr_gen, tr_sqrt, min_eig (of the product), rank_ok (1 or 0).

    Raises:
        UserError: the reference has no spread.
    """
    ref.require_spread("the reference")
    cross = ref.root.T @ gen.cov @ ref.root  # [rank, rank]
    spectrum = torch.linalg.eigvalsh((cross + cross.T) / 2)
    mean = (gen.mean - ref.mean).square().sum()
    parts = torch.stack([mean, ref.cov.trace(), gen.cov.trace(), spectrum.clamp(min=0).sqrt().sum(), spectrum[0]])
    return _terms(parts, rank_ok=all(s.n == 0 or s.n > s.dim for s in (gen, ref)))


def frechet_from_features(x: Tensor, y: Tensor) -> dict[str, float]:
    """The terms from features [N, D] and [M, D] of two small sets.

    With N or M <= D the trace is the nuclear norm of the small product A B^T of the centred, scaled features: exact
    where the covariances are singular, and cheaper.
    """
    x, y = x.double(), y.double()
    a, b = ((f - f.mean(0)) / math.sqrt(len(f) - 1) for f in (x, y))
    if min(len(x), len(y)) > x.shape[1]:
        return frechet_terms(Stats(x.mean(0), a.T @ a, len(x)), Stats(y.mean(0), b.T @ b, len(y)))
    values = torch.linalg.svdvals(a @ b.T)
    mean = (x.mean(0) - y.mean(0)).square().sum()
    parts = torch.stack([mean, b.square().sum(), a.square().sum(), values.sum(), values.new_zeros(())])
    return _terms(parts, rank_ok=False)


def _terms(parts: Tensor, rank_ok: bool) -> dict[str, float]:
    terms = dict(zip(("mean", "tr_ref", "tr_gen", "tr_sqrt", "min_eig"), parts.tolist(), strict=True))
    distance = terms["mean"] + terms["tr_ref"] + terms["tr_gen"] - 2 * terms["tr_sqrt"]
    return {"distance": distance, **terms, "rank_ok": float(rank_ok)}


def noise_floor(ref: Stats, n: int) -> float:
    """Expected distance of a perfect model at n images, from the reference's eigenvalues l.

    tr / n + (sum_ij l_i l_j / (l_i + l_j) + tr / 2) / (2 (n - 1)), to second order in the covariance error; the
    same again with the reference's own size if it was sampled.
    """
    row, column = ref.eigenvalues[:, None], ref.eigenvalues[None, :]
    pairs = row * column / (row + column).clamp(min=torch.finfo(row.dtype).tiny)
    trace, double = float(row.sum()), float(pairs.sum())
    sizes = [size for size in (n, ref.n) if size > 1]
    return sum(trace / size + (double + trace / 2) / (2 * (size - 1)) for size in sizes)


# ------------------------------------------------------------------------------------------------ paired comparison


@dataclass(frozen=True)
class Comparison:
    """Difference a - b of two scores under one plan, with a paired jackknife error."""

    difference: float
    se: float
    ci95: tuple[float, float]
    t: float
    p: float  # two-sided, Student's t with `groups - 1` degrees of freedom
    groups: int


def compare(a: Score, b: Score) -> Comparison:
    """Paired comparison: the same images (indices, labels, seeds) in the same groups against the same reference.

    Pairing removes the noise that both share; it needs no new solve, only the scores' delete-one-group values.

    Raises:
        UserError: the scores hold no, or differently many, groups or images.
    """
    groups = len(a.leave_out)
    if groups < 2 or groups != len(b.leave_out) or a.n != b.n:
        raise UserError(
            f"a paired comparison needs the same images in the same groups, got n = {a.n} and {b.n}, "
            f"groups = {groups} and {len(b.leave_out)}; score both with one SamplePlan and one number of groups >= 2"
        )
    difference = a.value - b.value
    se, _ = jackknife(difference, [x - y for x, y in zip(a.leave_out, b.leave_out, strict=True)])
    t = difference / se if se else math.copysign(math.inf, difference) if difference else 0.0
    p = 1 - t_central(t, groups - 1) if math.isfinite(t) else 0.0
    return Comparison(difference, se, interval(difference, se, groups - 1), t, p, groups)
