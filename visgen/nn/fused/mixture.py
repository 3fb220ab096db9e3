"""Moments of the posterior over codes in one pass over log p, for vocabularies whose [T, V] products would not pay.

The eager twin is `nn/mixture.posterior`. A program takes a block of noised tokens through a part of the codes: it reads
their log p once, and keeps an online softmax of all that is wanted in registers. What is summed are the columns of one
table,

    [1 | c | products c_a c_b, a <= b]                                   [V, F], F = 1 + C + C (C + 1) / 2

so mass, mean and second moment are one product of weights and table. Both products of a turn run on matrix units at
the precision of float32, for each operand is a sum of two of their numbers, codes and table split beforehand:

    x . c      halves of eleven bits (TF32), all four products in one of inner size 4 C, the largest added last, for z
               carries a factor (1 - t) / t^2; then less |x|^2 / 2 (1 - t), so that what is left is small
    w . table  halves of float16, weights and columns scaled to 2^10, so that no half is a subnormal number

The number of parts depends on the number of codes alone, and so does the order of all sums: a token does not depend on
its company. Nothing of size [T, V] is written.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 256  # columns of the table that a program can hold
WIDEST = 32  # channels of which a program can hold the split products
ROWS, CODES = 64, 64  # of a turn; the same for all sizes
PARTS = 8  # of the codes, so that few tokens fill a device too
WARPS, STAGES = 4, 3
SCALE = tl.constexpr(10.0)  # log2 of the largest weight, and of the largest value of the table
LOG2_E = tl.constexpr(1.4426950408889634)  # powers of two are what the device computes
LN_2 = tl.constexpr(0.6931471805599453)


def fits(channels: int, covariance: bool) -> bool:
    """Whether codes of so many channels can be summed by the kernel."""
    return channels <= WIDEST and _columns(channels, covariance) <= MOST


def moments(
    x: Tensor, t: Tensor, logp: Tensor, codes: Tensor, covariance: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Mean [T, C], covariance [T, C, C] or None, and log sum_k exp(z_k) [T], z as in `nn/mixture._logits`.

    Args:
        x: [T, C] float32 noised tokens; t: [T, 1] float32 their times.
        logp: [T, V] of any float type, whose rows have a finite one; codes: [V, C] float32.
    """
    (rows, channels), count = x.shape, len(codes)
    codes = codes.contiguous()
    logp = logp if logp.stride(1) == 1 else logp.contiguous()
    first, second = _pairs(channels, covariance, x.device)
    width, steps = len(first), triton.cdiv(count, CODES)
    parts = min(PARTS, steps)
    lift = torch.frexp(codes.abs().amax(0)).exponent  # [C] log2 of a bound of each channel
    split, square, table = _prepared(codes, lift, first, second)
    columns, inner = table.shape[2], split.shape[1]
    sums, top = x.new_empty(parts, rows, columns), x.new_empty(parts, rows)
    _moments[(triton.cdiv(rows, ROWS), parts)](
        x.contiguous(),
        t.contiguous(),
        logp,
        codes,
        split,
        square,
        table,
        sums,
        top,
        rows,
        count,
        steps,
        logp.stride(0),
        CHANNELS=channels,
        INNER=inner,
        COLUMNS=columns,
        EVEN=count % CODES == 0,
        ROWS=ROWS,
        CODES=CODES,
        num_warps=WARPS,
        num_stages=STAGES if columns <= 128 else 1,  # a wide table fills the shared memory
    )
    found, mass = x.new_empty(rows, width), x.new_empty(rows)
    _gather[(triton.cdiv(rows, 16),)](
        sums, top, lift, first, second, found, mass, rows, width, PARTS=parts, COLUMNS=columns, ROWS=16
    )
    mean, spread = found[:, 1 : 1 + channels], None
    if covariance:
        a, b = first[1 + channels :], second[1 + channels :]
        spread = x.new_empty(rows, channels, channels)
        each = found[:, 1 + channels :] - mean[:, a] * mean[:, b]
        spread[:, a, b] = each
        spread[:, b, a] = each
    return mean, spread, mass


def _prepared(codes: Tensor, lift: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What `_prepare` makes of codes [V, C]: halves of their channels, their squares, both halves of the table."""
    (count, channels), width = codes.shape, len(first)
    columns, inner = (max(16, triton.next_power_of_2(n)) for n in (width, 4 * channels))
    steps = triton.cdiv(count, CODES)
    split = codes.new_empty(steps * CODES, inner)
    square = codes.new_empty(steps * CODES)
    table = codes.new_empty(2, steps * CODES, columns, dtype=torch.float16)
    sizes = {"CHANNELS": channels, "INNER": inner, "COLUMNS": columns, "CODES": CODES}
    _prepare[(steps,)](codes, lift, first, second, split, square, table, count, width, **sizes)
    return split, square, table


def _columns(channels: int, covariance: bool) -> int:
    return 1 + channels + (channels * (channels + 1) // 2 if covariance else 0)


@functools.cache
def _pairs(channels: int, covariance: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of every column the channels that are multiplied, -1 for a factor of 1: [F] int32 twice."""
    one, each = torch.full((1,), -1, device=device), torch.arange(channels, device=device)
    first, second = [one, each], [one, one.expand(channels)]
    if covariance:
        a, b = torch.triu_indices(channels, channels, device=device)
        first, second = [*first, a], [*second, b]
    return torch.cat(first).int(), torch.cat(second).int()


# --------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def _half(value, second):
    """The nearest number of eleven bits (TF32), or where it is the second half, the nearest to what that leaves."""
    high = ((value.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    low = (((value - high).to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(second, low, high)


@triton.jit
def _first(codes, lane, CHANNELS: tl.constexpr):
    """The square of the first code, float64; of unit codes, squares less it need no rounding that counts."""
    value = tl.load(codes + lane, lane < CHANNELS, other=0.0).to(tl.float64)
    return tl.sum(value * value)


@triton.jit
def _power(exponent):
    """2^exponent of integers, exactly."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _prepare(
    codes,
    lift,
    first,
    second,
    split,
    square,
    table,
    count,
    width,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Of a turn's codes, zero beyond them: the halves [low | high | low | high] of their channels [V, 4 C], their
    squares less the first code's [V], and both halves of the table, scaled by bounds of its columns [2, V, F]."""
    k = tl.program_id(0) * CODES + tl.arange(0, CODES)
    inside = (k < count)[:, None]
    at = codes + k[:, None] * CHANNELS

    lane = tl.arange(0, INNER)[None, :]
    value = tl.load(at + lane % CHANNELS, inside & (lane < 4 * CHANNELS), other=0.0)
    tl.store(split + k[:, None] * INNER + lane, _half(value, lane // CHANNELS % 2 == 0))
    wide = tl.where(lane < CHANNELS, value, 0.0).to(tl.float64)
    tl.store(square + k, (tl.sum(wide * wide, 1) - _first(codes, lane, CHANNELS)).to(tl.float32))

    column = tl.arange(0, COLUMNS)
    real = column < width
    a = tl.load(first + column, real, other=-1)
    b = tl.load(second + column, real, other=-1)
    shift = tl.load(lift + a, a >= 0, other=0) + tl.load(lift + b, b >= 0, other=0)
    what = tl.load(at + a[None, :], inside & (a >= 0)[None, :], other=1.0)
    what *= tl.load(at + b[None, :], inside & (b >= 0)[None, :], other=1.0)
    what = tl.where(inside & real[None, :], what * _power(10 - shift)[None, :], 0.0)
    near = what.to(tl.float16)
    to = table + k[:, None] * COLUMNS + column[None, :]
    tl.store(to, near)
    tl.store(to + tl.num_programs(0) * CODES * COLUMNS, (what - near.to(tl.float32)).to(tl.float16))


@triton.jit
def _moments(
    x,
    t,
    logp,
    codes,
    split,
    square,
    table,
    sums,
    top,
    rows,
    count,
    steps,
    stride,
    CHANNELS: tl.constexpr,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN: tl.constexpr,  # codes fill their turns
    ROWS: tl.constexpr,
    CODES: tl.constexpr,
):
    """Sums [P, T, F] of a part of the codes by weights 2^SCALE exp(z - top), and top [P, T]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.program_id(1)
    row_in = tl.minimum(row, rows - 1)  # rows beyond the last one repeat it
    time = tl.load(t + row_in)
    near = (1 - time) / (time * time)
    half = 0.5 * (1 - time)
    lane = tl.arange(0, INNER)[None, :]
    value = tl.load(x + row_in[:, None] * CHANNELS + lane % CHANNELS, lane < 4 * CHANNELS, other=0.0)
    length = tl.sum(tl.where(lane < CHANNELS, value * value, 0.0), 1)
    least = length / (2 * tl.maximum(1 - time, 1e-6))  # what half |c|^2 - x . c cannot fall below: their sum is small
    offset = least + half * _first(codes, lane, CHANNELS).to(tl.float32)
    token = _half(value, lane < 2 * CHANNELS)  # [low | low | high | high]

    highest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    at = logp + row_in.to(tl.int64)[:, None] * stride
    column = tl.arange(0, COLUMNS)
    rest = steps * CODES * COLUMNS
    share = tl.cdiv(steps, tl.num_programs(1)) * CODES
    for start in range(part * share, min(part * share + share, steps * CODES), CODES):
        k = start + tl.arange(0, CODES)
        if EVEN:
            law = tl.load(at + k[None, :])
        else:
            law = tl.load(at + k[None, :], (k < count)[None, :], other=-float("inf"))
        z = tl.dot(token, tl.trans(tl.load(split + k[:, None] * INNER + lane)), input_precision="tf32")
        z = z - offset[:, None] - half[:, None] * tl.load(square + k)[None, :]
        z = near[:, None] * z + law.to(tl.float32)
        higher = tl.maximum(highest, tl.max(z, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # no code so far is possible
        weight = tl.exp2(z * LOG2_E - (safe * LOG2_E - SCALE)[:, None])
        total *= tl.exp2((highest - safe) * LOG2_E)[:, None]
        highest = higher
        whole = weight.to(tl.float16)
        left = (weight - whole.to(tl.float32)).to(tl.float16)
        what = table + k[:, None] * COLUMNS + column[None, :]
        much = tl.load(what)
        total = tl.dot(whole, much, total)
        total = tl.dot(left, much, total)
        total = tl.dot(whole, tl.load(what + rest), total)
    to = part * rows + row
    live = row < rows
    tl.store(sums + to.to(tl.int64)[:, None] * COLUMNS + column[None, :], total, live[:, None])
    tl.store(top + to, highest + near * least, live)


@triton.jit
def _gather(
    sums,
    top,
    lift,
    first,
    second,
    found,
    mass,
    rows,
    width,
    PARTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The parts' sums over the sum of weights, unscaled, [T, F], and the log of that sum [T]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    column = tl.arange(0, COLUMNS)
    real = column < width
    highest = tl.full([ROWS], -float("inf"), tl.float32)
    for part in range(PARTS):
        highest = tl.maximum(highest, tl.load(top + part * rows + row, live, other=0.0))
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for part in range(PARTS):  # in a fixed order
        to = (part * rows + row).to(tl.int64)
        share = tl.exp2((tl.load(top + to, live, other=0.0) - highest) * LOG2_E)
        total += share[:, None] * tl.load(sums + to[:, None] * COLUMNS + column[None, :], live[:, None], other=0.0)
    one = tl.sum(tl.where(column[None, :] == 0, total, 0.0), 1)  # [T] 2^(2 SCALE) times the sum of weights
    one = tl.where(live, one, 1.0)
    a = tl.load(first + column, real, other=-1)
    b = tl.load(second + column, real, other=-1)
    shift = tl.load(lift + a, a >= 0, other=0) + tl.load(lift + b, b >= 0, other=0)
    result = total / one[:, None] * _power(shift)[None, :]
    tl.store(found + row[:, None] * width + column[None, :], result, live[:, None] & real[None, :])
    tl.store(mass + row, highest + (tl.log2(one) - 2 * SCALE) * LN_2, live)
