"""Moments of the posterior over codes in one kernel, for vocabularies whose [T, V] intermediates would not pay.

The eager twin is `nn/mixture.posterior`. A program takes a block of noised tokens through all codes: it reads their log
p once, and keeps an online softmax of all that is wanted in registers. What is summed are the columns of one table,

    [1 | c | products c_a c_b, a <= b]                                   [V, F], F = 1 + C + C (C + 1) / 2

so mass, mean and second moment are one product of weights and table. Logits are summed channel by channel in float32,
never by TF32, for they carry a factor (1 - t) / t^2; the product of weights, at most 1, and the table is 3xTF32, of
about the precision of float32. Nothing of size [T, V] is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 256  # columns of the table that a program can hold
CODES = 64  # of a step; the same for all sizes, so that a token does not depend on its company


def fits(channels: int, covariance: bool) -> bool:
    """Whether codes of so many channels can be summed by the kernel."""
    return _columns(channels, covariance) <= MOST


def moments(
    x: Tensor, t: Tensor, logp: Tensor, codes: Tensor, covariance: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Mean [T, C], covariance [T, C, C] or None, and log sum_k exp(z_k) [T], z as in `nn/mixture._logits`.

    Args:
        x: [T, C] float32 noised tokens; t: [T, 1] float32 their times.
        logp: [T, V] of any float type, whose rows have a finite one; codes: [V, C] float32.
    """
    (rows, channels), count = x.shape, len(codes)
    first, second = torch.triu_indices(channels, channels, device=x.device)
    parts = [torch.ones_like(codes[:, :1]), codes]
    if covariance:
        parts.append(codes[:, first] * codes[:, second])
    table = torch.cat(parts, 1)  # [V, F]
    found = x.new_empty(rows, table.shape[1])
    top = x.new_empty(rows)
    block = 64 if covariance else 16
    _moments[(triton.cdiv(rows, block),)](
        x.contiguous(),
        t.contiguous(),
        logp if logp.stride(1) == 1 else logp.contiguous(),
        codes.contiguous(),
        table,
        found,
        top,
        rows,
        count,
        logp.stride(0) if logp.stride(1) == 1 else count,
        table.shape[1],
        CHANNELS=channels,
        COLUMNS=max(16, triton.next_power_of_2(table.shape[1])),
        BLOCK=block,
        STEP=CODES,
        num_warps=4,
        num_stages=3,
    )
    total = found[:, :1]
    mean = found[:, 1 : 1 + channels] / total
    spread = None
    if covariance:
        spread = x.new_empty(rows, channels, channels)
        each = found[:, 1 + channels :] / total - mean[:, first] * mean[:, second]
        spread[:, first, second] = each
        spread[:, second, first] = each
    return mean, spread, top + total.squeeze(1).log()


def _columns(channels: int, covariance: bool) -> int:
    return 1 + channels + (channels * (channels + 1) // 2 if covariance else 0)


@triton.jit
def _moments(
    x,
    t,
    logp,
    codes,
    table,
    found,
    top,
    rows,
    count,
    stride,
    width,
    CHANNELS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = row < rows
    column = tl.arange(0, COLUMNS)
    time = tl.load(t + row, live, other=1.0)
    inverse = 1 / (time * time)
    near, far = (1 - time) * inverse, 0.5 * (1 - time) * (1 - time) * inverse
    highest = tl.full([BLOCK], -float("inf"), tl.float32)
    sums = tl.zeros([BLOCK, COLUMNS], tl.float32)
    at = logp + row.to(tl.int64)[:, None] * stride
    for start in range(0, count, STEP):
        k = start + tl.arange(0, STEP)
        inside = k < count
        z = tl.load(at + k[None, :], live[:, None] & inside[None, :], other=-float("inf")).to(tl.float32)
        product = tl.zeros([BLOCK, STEP], tl.float32)
        square = tl.zeros([STEP], tl.float32)
        for c in tl.static_range(CHANNELS):
            of_token = tl.load(x + row * CHANNELS + c, live, other=0.0)
            of_code = tl.load(codes + k * CHANNELS + c, inside, other=0.0)
            product += of_token[:, None] * of_code[None, :]
            square += of_code * of_code
        z += near[:, None] * product - far[:, None] * square[None, :]
        higher = tl.maximum(highest, tl.max(z, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # no code so far is possible
        weight = tl.exp(z - safe[:, None])
        what = tl.load(
            table + k[:, None] * width + column[None, :], inside[:, None] & (column < width)[None, :], other=0.0
        )
        sums = sums * tl.exp(highest - safe)[:, None] + tl.dot(weight, what, input_precision="tf32x3")
        highest = higher
    tl.store(found + row[:, None] * width + column[None, :], sums, live[:, None] & (column < width)[None, :])
    tl.store(top + row, highest, live)
