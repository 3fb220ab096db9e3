"""How the products of `linear.py` and `modulated.py` are cut; sizes as they measured best on an H100 or H200."""

from __future__ import annotations

from dataclasses import dataclass

import triton

FEW = 16  # rows that one tile of matrix units holds


@dataclass(frozen=True)
class Tile:
    """How a product is cut: rows, outputs and inner dimension per program and turn, parts of the inner dimension.

    `described`: operands are loaded by tensor descriptors, which do not go with a norm or a split.
    """

    m: int
    n: int
    k: int
    split: int = 1
    warps: int = 4
    stages: int = 4
    described: bool = False


def with_norm(m: int, k: int) -> bool:
    """Whether a product of [M, K] takes its RMS norm along: where the matrix units need no second turn to K's end, a
    product otherwise runs faster on ready operands."""
    return m <= 2 or (m <= FEW and k <= 256)


def choose(m: int, n: int, k: int, norm: bool, gate: bool, exact: bool = False, described: bool = False) -> Tile:
    """The tile of [M, K] x [N, K], after a norm, with a gate, in float32 (`exact`); `described`: operands can be."""
    if m <= 2:
        if not (norm or gate):
            return Tile(2, 4, 1024, 1, 2, 1)
        turn = 256 if k < 1024 else 512
        return Tile(2, 1024 // turn if gate else 8, turn, 1, 2, 1)
    if exact:  # no matrix units
        return Tile(16 if m <= FEW else 64, 32, 32, 1, 4, 2)
    if described and not norm and 64 < m <= 128:
        found = _choose_described(n, k, gate)
        if found is not None:
            return found
    if m <= FEW:
        return _choose_few(n, k, norm, gate)
    if m <= 128 and gate:
        wide = Tile(64, 32, 128, 1, 4, 4) if n < 2816 else Tile(64, 64, 64, 1, 4, 4 if n < 3072 else 5)
    elif m <= 128 and k >= 3072 and n < 2048:  # few outputs of a long inner dimension
        wide = Tile(64, 64, 128, 1, 4, 4)
    elif m <= 128:
        blocks = triton.cdiv(n, 32) * triton.cdiv(m, 64)
        wide = Tile(64, 16 if blocks <= 48 else 64 if blocks >= 128 else 32, 128, 1, 4, 4)
    else:  # the widest tile that fills the 132 multiprocessors of an H100
        fill = (w for w in (128, 64) if triton.cdiv(m, 128) * triton.cdiv(n, w) >= 132)
        wide = Tile(128, next(fill, 32), 64, 1, 8, 4)
    programs = triton.cdiv(n, wide.n) * triton.cdiv(m, wide.m)
    split = 1 if norm or gate else max(1, min(8, 128 // programs, k // 1024))
    return Tile(wide.m, wide.n, wide.k, split, wide.warps, wide.stages)


def _choose_few(n: int, k: int, norm: bool, gate: bool) -> Tile:
    """The tile of a product of 3 to 16 rows: of wide models, in as many programs as two for each multiprocessor."""
    if k < 768:
        return Tile(16, 16, 256, 1, 4, 4)
    if gate:
        return Tile(16, 32, 256, 1, 4, 3)
    split = 1 if norm else max(1, min(8, 256 // triton.cdiv(n, 32), k // 256))
    return Tile(16, 32, 128, split, 4, 4)


def _choose_described(n: int, k: int, gate: bool) -> Tile | None:
    """The tile of a described product of 65 to 128 rows, or None where others measured faster."""
    if n >= 3072 or (gate and n >= 2816):  # as many programs of all rows as nearly fill the device
        return Tile(128, 32, 128, 1, 4, 4, True)
    if gate:
        return Tile(64, 32, 128, 1, 4, 4, True)
    if n >= 2048:
        return Tile(64, 64, 64, 1, 4, 6, True)
    if 1024 <= n < 1280:
        return Tile(64, 32, 128, 1, 4, 6 if k > 2048 else 4, True)
    return Tile(64, 32, 128, 1, 4, 4, True) if n >= 1280 and k < 3072 else None
