"""What a number means: `EvalProtocol` (frozen, hashed), `Score` (number and error), `SamplePlan` (classes and seeds).

The plan is a pure function of (n, classes, seed, mode): any process computes any part of it without communication, and
image i keeps its class and seed whatever the number of processes, the batch size or the interruptions of a run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visgen.config import UserError
from visgen.metrics.images import QUANTISE

LABELS = ("balanced", "random", "source")
MODES = ("balanced", "random", "source")


# ------------------------------------------------------------------------------------------------ the protocol


@dataclass(frozen=True)
class EvalProtocol:
    """Everything that changes a number without changing the model; two numbers compare only if all of it is equal."""

    extractor: str = "fd_efflite0"  # id of the feature network
    weights: str = ""  # its fingerprint
    resize: str = "bicubic-aa-224"  # id of its resizer
    quantise: str = QUANTISE
    reference: str = ""  # name of the reference set
    reference_hash: str = ""  # hash of its images (`ImageAudit.hash`) or of its statistics file
    reference_n: int = 0
    size: int = 0  # side in pixels of the scored images
    crop: str = "none"  # how a source image became square: none | adm | centre
    pad: str = "none"  # e.g. "zero-2": 28 px to 32 px
    n: int = 10_000  # scored images
    labels: str = "balanced"  # class histogram of the scored images: balanced | random | source (the data set's)
    estimator: str = "frechet-f64"
    groups: int = 25  # jackknife groups

    def __post_init__(self) -> None:
        if self.n < 1 or self.groups < 1 or self.reference_n < 0:
            raise UserError(
                f"protocol: n={self.n}, groups={self.groups}, reference_n={self.reference_n}; n and groups must be >= 1"
            )
        if self.labels not in LABELS:
            raise UserError(f"protocol: labels '{self.labels}' is unknown; allowed: {', '.join(LABELS)}")

    @classmethod
    def of(cls, extractor: Any, **fields: Any) -> EvalProtocol:
        """A protocol whose extractor, weights and resize fields are those of a built `FeatureExtractor`."""
        return cls(extractor=extractor.id, weights=extractor.fingerprint, resize=extractor.resize, **fields)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EvalProtocol:
        """Inverse of `to_dict`; `id` and `hash` are recomputed. Unknown keys are an error."""
        names = [f.name for f in dataclasses.fields(cls)]
        unknown = [k for k in values if k not in (*names, "id", "hash")]
        if unknown:
            raise UserError(f"protocol: unknown field '{unknown[0]}'; allowed: {', '.join(names)}")
        return cls(**{k: v for k, v in values.items() if k in names})

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "id": self.id, "hash": self.hash}

    @property
    def canonical(self) -> str:
        """The fields as JSON with sorted keys and no spaces: what is hashed."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @property
    def hash(self) -> str:
        """12 hex digits of the SHA-256 of `canonical`."""
        return hashlib.sha256(self.canonical.encode()).hexdigest()[:12]

    @property
    def id(self) -> str:
        """A short name for people, e.g. `fd_efflite0-fashion_mnist/test-10k`; the hash decides."""
        count = f"{self.n // 1000}k" if self.n % 1000 == 0 else str(self.n)
        return "-".join(part for part in (self.extractor, self.reference, count) if part)

    def differences(self, other: EvalProtocol) -> dict[str, tuple[Any, Any]]:
        """The fields in which two protocols differ, with both values."""
        mine, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return {k: (mine[k], theirs[k]) for k in mine if mine[k] != theirs[k]}


def require_same(protocols: Mapping[str, EvalProtocol]) -> None:
    """Raises `UserError` naming the differing fields unless all protocols (by row name) are the same."""
    rows = iter(protocols.items())
    first_name, first = next(rows, ("", None))
    for name, other in rows:
        if first is not None and other.hash != first.hash:
            what = ", ".join(f"{k} ({a!r} and {b!r})" for k, (a, b) in first.differences(other).items())
            raise UserError(
                f"'{first_name}' (protocol {first.hash}) and '{name}' (protocol {other.hash}) cannot be compared: they "
                f"differ in {what}; measure both under one protocol"
            )


# ----------------------------------------------------------------------------------------------------- a number


@dataclass(frozen=True)
class Score:
    """A measured number with what is known about its error. `nan` values are stored as null with the `note`."""

    value: float
    se: float | None = None  # standard error
    ci95: tuple[float, float] | None = None
    floor: float | None = None  # expected value of a perfect model at this n
    bias_corrected: float | None = None
    n: int | None = None  # scored images
    n_ref: int | None = None  # reference images; None: the reference is taken as exact
    terms: Mapping[str, float] = field(default_factory=dict)
    leave_out: tuple[float, ...] = ()  # delete-one-group values, for paired comparisons
    note: str = ""  # why something is missing

    def to_dict(self) -> dict[str, Any]:
        return finite(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Score:
        got = dict(values)
        value = math.nan if got["value"] is None else got["value"]
        ci = got.get("ci95")
        got |= {"value": value, "ci95": ci and tuple(ci), "leave_out": tuple(got.get("leave_out") or ())}
        got.pop("reason", None)
        return cls(**got)


def finite(value: Any) -> Any:
    """Plain JSON values: a float that is not finite becomes None, and its mapping says so under `reason`."""
    if isinstance(value, Mapping):
        out = {str(k): finite(v) for k, v in value.items()}
        lost = [f"{k} is {v}" for k, v in value.items() if isinstance(v, float) and not math.isfinite(v)]
        return {**out, "reason": ", ".join(lost)} if lost else out
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ----------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class PlanRows:
    """Some rows of a plan. A batch of fixed size is filled up with rows of index -1, which no metric may count."""

    index: Tensor  # [B] int64, place in the plan; -1: filling
    label: Tensor  # [B] int64
    seed: Tensor  # [B] int64, 0 <= seed < 2^63

    def __len__(self) -> int:
        return self.index.numel()

    @property
    def valid(self) -> Tensor:
        """[B] bool: True where the row is real."""
        return self.index >= 0


@dataclass(frozen=True)
class SamplePlan:
    """Which class and which seed image i of n has.

    `balanced`: every aligned run of `classes` indices holds each class once, in an order of its own; a remainder holds
    a seeded subset. `random`: independent uniform labels. `source`: class c in counts[c] of sum(counts) images, of any
    number of them to a few. Seeds depend on (seed, i) only, so a longer plan extends a shorter one and two models under
    one plan are paired image by image.
    """

    n: int
    classes: int = 1
    seed: int = 0
    mode: str = "balanced"
    counts: tuple[int, ...] = ()  # of the images of each class, for `source`

    def __post_init__(self) -> None:
        if self.n < 1 or self.classes < 1 or self.seed < 0:
            raise UserError(
                f"sample plan: n={self.n}, classes={self.classes}, seed={self.seed}; n and classes >= 1, seed >= 0"
            )
        if self.mode not in MODES:
            raise UserError(f"sample plan: mode '{self.mode}' is unknown; allowed: {', '.join(MODES)}")
        if self.mode == "source" and (len(self.counts) != self.classes or min(self.counts) < 0 or not sum(self.counts)):
            raise UserError(
                f"sample plan: counts {self.counts} must be one for each of {self.classes} classes, not all 0"
            )

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[int, int]:
        """(label, seed) of image i."""
        rows = self.take(np.array([i]))
        return int(rows.label[0]), int(rows.seed[0])

    def take(self, index: np.ndarray | Tensor | range) -> PlanRows:
        """The rows of the given indices, in their order."""
        i = np.asarray(index, dtype=np.int64).reshape(-1)
        if i.size and (i.min() < 0 or i.max() >= self.n):
            raise UserError(f"sample plan: index {i.min()}..{i.max()} is outside 0..{self.n - 1}")
        seeds = (hash64(self.seed, _SEEDS, i) >> np.uint64(1)).astype(np.int64)
        return PlanRows(torch.from_numpy(i), torch.from_numpy(self._labels(i)), torch.from_numpy(seeds))

    def _labels(self, i: np.ndarray) -> np.ndarray:
        if self.mode == "random":
            return (hash64(self.seed, _LABELS, i) % np.uint64(self.classes)).astype(np.int64)
        if self.mode == "source":  # multiples of the golden ratio, modulo 1: any stretch of them is even (Weyl 1916)
            turn = (hash64(self.seed, _LABELS, np.zeros(1, np.int64)) >> np.uint64(11)) / 2.0**53
            places = (i * ((5**0.5 - 1) / 2) + turn) % 1 * sum(self.counts)
            return np.searchsorted(np.cumsum(self.counts), places, side="right").astype(np.int64)
        blocks, row = np.unique(i // self.classes, return_inverse=True)
        keys = hash64(self.seed, _LABELS, blocks[:, None], np.arange(self.classes)[None, :])  # [blocks, classes]
        return np.argsort(keys, axis=1, kind="stable")[row.reshape(-1), i % self.classes].astype(np.int64)

    def rows(self, rank: int = 0, world: int = 1) -> PlanRows:
        """The share of one process: indices rank, rank + world, ..; the shares partition the plan."""
        return self.take(range(rank, self.n, world))

    def batches(self, size: int, rank: int = 0, world: int = 1) -> Iterator[PlanRows]:
        """The share of one process in batches of exactly `size` rows, the last one filled up with index -1."""
        mine = np.arange(rank, self.n, world)
        for start in range(0, mine.size, size):
            rows = self.take(mine[start : start + size])
            fill = size - len(rows)
            yield PlanRows(
                torch.nn.functional.pad(rows.index, (0, fill), value=-1),
                torch.nn.functional.pad(rows.label, (0, fill)),
                torch.nn.functional.pad(rows.seed, (0, fill)),
            )

    def chunks(self, size: int = 2000, rank: int = 0, world: int = 1) -> list[range]:
        """Contiguous index ranges, the units of resuming; process `rank` owns chunks rank, rank + world, .."""
        starts = range(rank * size, self.n, world * size)
        return [range(start, min(start + size, self.n)) for start in starts]

    @property
    def hash(self) -> str:
        """12 hex digits naming the plan; a resumed run must find the same."""
        facts = (self.n, self.classes, self.seed, self.mode, *([self.counts] if self.counts else []))
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]


def group_of(index: Tensor, n: int, groups: int) -> Tensor:
    """Jackknife group of each index [B] of n: `groups` contiguous runs, class-balanced where the plan is."""
    return index * groups // n


_SEEDS, _LABELS = 1, 2  # streams of `hash64`


def hash64(seed: int, *words: int | np.ndarray) -> np.ndarray:
    """64-bit hash of (seed, words), elementwise with broadcasting: chained SplitMix64 finalisers (Steele et al. 2014).

    For fixed earlier words it is a bijection of the last one, so seeds of one plan never collide before the shift.
    """
    with np.errstate(over="ignore"):
        state = _mix(np.asarray(seed % 2**64, dtype=np.uint64) + _GAMMA)
        for word in words:
            state = _mix(state + (np.asarray(word).astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return state


_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
