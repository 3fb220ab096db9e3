"""Guidance, temperature, top-k, top-p, Gumbel noise and the draw of a token in one kernel.

The eager twin is `Categorical.draw` after `Warp` and `pin`: the same law, the same noise (`decode/noise.py`), so the
same tokens up to float32 rounding. Thresholds of top-k and top-p are found by bisecting the 32 bits of an
order-preserving integer image of the logits, one reduction a bit, instead of sorting the vocabulary.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from visgen.checks import UserError
from visgen.nn.fused import EAGER
from visgen.nn.fused.chain import chained, follow

MAX_VOCAB = 32768  # a law lies in the registers of one program
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


def draw(
    logits: Tensor,
    weights: Tensor,
    seeds: Tensor,
    index: Tensor,
    *,
    stream: int,
    iteration: Tensor | None = None,
    where: Tensor | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    known: tuple[Tensor, Tensor] | None = None,
    unsound: Tensor | None = None,
) -> Tensor:
    """Draws one token per law: ids [B, W] int64.

    Args:
        logits: [K, B, W, V] of the guidance branches, any float type, V at most `MAX_VOCAB`.
        weights: [K, B, W] float32 of the branches.
        seeds: [B] int64 of the images.
        index: [B, W] int64, the tokens' positions; also their noise's.
        stream, iteration: which noise; iteration [B, 1], 0 where there is none.
        where: [B, W] bool, the tokens to draw; the others are left undefined.
        temperature, top_k, top_p: as in `decode/warp.py`.
        known: (tokens [B, W], mask [B, W]): where the mask is true, that token is the result.
        unsound: [1] int32, becomes 1 where a logit is not finite.
    """
    k, b, w, v = logits.shape
    check_vocab(v)
    out = torch.empty(b, w, dtype=torch.int64, device=logits.device)
    tokens, mask = known if known is not None else (index, index)
    _draw[(b * w,)](
        logits.contiguous(),
        weights.contiguous(),
        seeds,
        index.contiguous(),
        tokens.contiguous(),
        mask.contiguous().view(torch.uint8) if known is not None else index,
        index if iteration is None else iteration,
        index if where is None else where.contiguous().view(torch.uint8),
        index if unsound is None else unsound,
        out,
        v,
        w,
        b * w,
        max(temperature, 1e-5),
        top_k,
        top_p,
        BRANCHES=k,
        STREAM=stream + 1,
        ITERATED=iteration is not None,
        WHERE=where is not None,
        GREEDY=temperature == 0,
        TOP_K=0 < top_k < v,
        TOP_P=top_p < 1,
        KNOWN=known is not None,
        WATCH=unsound is not None,
        BLOCK=triton.next_power_of_2(v),
        **chained(out.device),
        num_warps=16 if v > 4096 else 4,
    )
    return out


def check_vocab(vocab: int) -> None:
    """Raises `UserError` for a vocabulary that does not fit a program."""
    if vocab > MAX_VOCAB:
        raise UserError(f"a vocabulary of {vocab} is beyond the fused draw's {MAX_VOCAB}; {EAGER}")


@triton.jit
def _draw(
    logits,  # [K, B W, V]
    weights,  # [K, B W]
    seeds,  # [B]
    index,  # [B W]
    tokens,  # [B W]
    mask,  # [B W]
    iteration,  # [B]
    where,  # [B W]
    unsound,  # [1]
    out,  # [B W]
    vocab,
    window,
    laws,
    temperature,
    top_k,
    top_p,
    BRANCHES: tl.constexpr,
    STREAM: tl.constexpr,
    ITERATED: tl.constexpr,
    WHERE: tl.constexpr,
    GREEDY: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    KNOWN: tl.constexpr,
    WATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    law = tl.program_id(0)
    if WHERE and tl.load(where + law) == 0:
        return
    lane = tl.arange(0, BLOCK)
    value = _guided(logits, weights, law, laws, vocab, lane, BRANCHES)
    if WATCH:
        _note(unsound, value, lane < vocab)
    value = _filtered(value, lane, temperature, top_k, top_p, GREEDY, TOP_K, TOP_P)
    if not GREEDY:
        step = tl.full([], 0, tl.int64)
        if ITERATED:
            step = tl.load(iteration + law // window)
        noise = -_log(_exponential(tl.load(seeds + law // window), tl.load(index + law), step, lane, STREAM))
        value = tl.where(value == float("-inf"), value, value + noise)  # a Gumbel is -log of an exponential
    token = tl.minimum(tl.argmax(value, axis=0), vocab - 1).to(tl.int64)  # of NaNs alone any lane may be taken
    if KNOWN:
        token = tl.where(tl.load(mask + law) != 0, tl.load(tokens + law), token)
    tl.store(out + law, token)


@triton.jit
def _guided(logits, weights, law, laws, vocab, lane, BRANCHES: tl.constexpr):
    """The branches' logits, combined in float32; -inf beyond the vocabulary."""
    inside = lane < vocab
    value = tl.zeros(lane.shape, dtype=tl.float32)
    for branch in tl.static_range(BRANCHES):
        part = tl.load(logits + (branch * laws + law).to(tl.int64) * vocab + lane, mask=inside, other=0.0)
        value += part.to(tl.float32) * tl.load(weights + branch * laws + law)
    return tl.where(inside, value, float("-inf"))


@triton.jit
def _note(unsound, value, inside):
    """Raises the flag where a value inside is NaN or infinite."""
    wrong = tl.where(inside & ~(tl.abs(value) < float("inf")), 1, 0)
    if tl.sum(wrong, axis=0) > 0:
        tl.store(unsound, 1)


@triton.jit
def _filtered(value, lane, temperature, top_k, top_p, GREEDY: tl.constexpr, TOP_K: tl.constexpr, TOP_P: tl.constexpr):
    """`decode/warp.py`."""
    if GREEDY:
        value = tl.where(lane == tl.argmax(value, axis=0), 0.0, float("-inf"))
    else:
        value = value / temperature
        if TOP_K:
            value = _top_k(value, top_k)
        if TOP_P:
            value = _top_p(value, top_p)
    return value


@triton.jit
def _ordered(value):
    """uint32 image of float32 that keeps the order; -inf is the smallest finite image's predecessor."""
    bits = value.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _top_k(value, k):
    """Keeps what is at least the k-th largest value, ties too."""
    order = _ordered(value)
    threshold = tl.zeros([], dtype=tl.uint32)  # becomes the largest t with k or more values >= t: the k-th itself
    for i in range(32):
        trial = threshold | (tl.full([], 1, tl.uint32) << (31 - i))
        enough = tl.sum((order >= trial).to(tl.int32), axis=0) >= k
        threshold = tl.where(enough, trial, threshold)
    return tl.where(order >= threshold, value, float("-inf"))


@triton.jit
def _top_p(value, p):
    """Keeps the smallest set of the most likely values whose mass reaches p; of equal values the first ones."""
    order = _ordered(value)
    mass = tl.exp(value - tl.max(value, axis=0))
    mass = mass / tl.sum(mass, axis=0)
    last = tl.zeros([], dtype=tl.uint32)  # becomes the largest t whose values above t have mass p or more
    for i in range(32):
        trial = last | (tl.full([], 1, tl.uint32) << (31 - i))
        enough = tl.sum(tl.where(order > trial, mass, 0.0), axis=0) >= p
        last = tl.where(enough, trial, last)
    all_fit = tl.sum(tl.where(order > last, mass, 0.0), axis=0) < p  # even with nothing left out
    least = tl.where(all_fit, last, last + 1)  # image of the least value that is kept
    tied = (order == least).to(tl.int32)
    before = tl.sum(tl.where(order > least, mass, 0.0), axis=0) + (tl.cumsum(tied, axis=0) - 1) * mass
    kept = (order > least) | ((tied == 1) & (before < p))
    return tl.where(kept, value, float("-inf"))


@triton.jit
def _exponential(seed, at, iteration, lane, STREAM: tl.constexpr):
    """Standard exponential of (seed, position, stream, iteration) for each lane; `Noise.gumbel` is -log of it."""
    return _neg_log1m(_uniform(seed, at, iteration, lane, STREAM))


@triton.jit
def _uniform(seed, at, iteration, lane, STREAM: tl.constexpr):
    """`Noise.uniform`; STREAM is one more than the stream's number."""
    key = _mix(seed.to(tl.uint64) + _GOLDEN)
    key = _mix(key + at.to(tl.uint64) * _GOLDEN)
    key = _mix(key ^ (tl.full([], STREAM, tl.uint64) * _MIX_1))
    key = _mix(key + iteration.to(tl.uint64) * _MIX_2)
    bits = _mix(key + (lane + 1).to(tl.uint64) * _GOLDEN) >> 24
    uniform = (bits.to(tl.int64).to(tl.float32) + 0.5) * 9.094947017729282e-13  # 2^-40
    return tl.minimum(uniform, 1 - 5.960464477539063e-08)  # 1 - 2^-24


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def _neg_log1m(u):
    """-log(1 - u), precise for small u. Triton's own logarithm is approximate on a GPU."""
    if INTERPRETED:
        rest = 1.0 - u
        exact = -tl.log(rest) * (u / (1.0 - rest))
        return tl.where(rest == 1.0, u, exact)
    else:
        return -libdevice.log1p(-u)


@triton.jit
def _log(x):
    if INTERPRETED:
        return tl.log(x)
    else:
        return libdevice.log(x)
