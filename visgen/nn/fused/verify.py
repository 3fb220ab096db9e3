"""One iteration of a window of drafts in four kernels: open, test, advance, first drafts.

The eager twins are the functions of the same names in `decode/verify.py`, with the law's `accept`, `residual` and
`draw`: the same noise, so the same tokens up to float32 rounding. The test has one program for each law and keeps it
in registers, so a vocabulary is read once (the branches' logits and q) and written once (p over q); open and advance
have one program for each image. A draw by Gumbels G from weights w is argmax of log w + G, here argmax of w / E with
E = exp(-G), the exponential that G is made of, which spares two logarithms a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from visgen.nn.fused.chain import chained, follow
from visgen.nn.fused.draw import _exponential, _filtered, _guided, _log, _note, _uniform, check_vocab


def open_window(tokens: Tensor, position: Tensor, iteration: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Counts the iteration; (index, waiting, draft) of the window, each [B, W].

    Args:
        tokens: [B, N] int64; position, iteration: [B, 1] int64; slots: [W].
    """
    images, count = tokens.shape
    window = len(slots)
    index, draft = (torch.empty(images, window, dtype=torch.int64, device=tokens.device) for _ in range(2))
    waiting = torch.empty(images, window, dtype=torch.bool, device=tokens.device)
    _open[(images,)](
        tokens,
        position,
        iteration,
        index,
        waiting.view(torch.uint8),
        draft,
        count,
        window,
        SLOTS=triton.next_power_of_2(window),
        num_warps=1,
        **chained(tokens.device),
    )
    return index, waiting, draft


def test(
    logits: Tensor,
    weights: Tensor,
    drawn_from: Tensor,
    seeds: Tensor,
    index: Tensor,
    waiting: Tensor,
    draft: Tensor,
    iteration: Tensor,
    *,
    accept: int,
    residual: int,
    redraw: int | None,
    shared: bool,
    relabel: bool,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    known: tuple[Tensor, Tensor] | None = None,
    unsound: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(kept, tokens, behind), each [B, W], of drafts that wait for their test; elsewhere (true, draft, draft).

    `kept`: whether the draft stays. `tokens`: the draft, or what replaces it. `behind`: a draw from p, without
    `redraw` the draft.

    Args:
        logits: [K, B, W, V] of the guidance branches, any float type; weights: [K, B, W] float32.
        drawn_from: [B, W, V] float32, logits of q; those of p afterwards where drafts wait, if `relabel`.
        seeds: [B] int64; index, draft: [B, W] int64; waiting: [B, W] bool; iteration: [B, 1] int64.
        accept, residual, redraw: streams of the noise; `shared`: the same at all iterations for `redraw`.
        temperature, top_k, top_p, known: of p, as in `draw`.
        unsound: [1] int32, becomes 1 where a logit of p is not finite, or one of q is NaN or inf.
    """
    k, b, w, v = logits.shape
    check_vocab(v)
    kept = torch.empty_like(waiting)
    out, behind = torch.empty_like(draft), torch.empty_like(draft)
    tokens, mask = known if known is not None else (index, index)
    _test[(b * w,)](
        logits.contiguous(),
        weights.contiguous(),
        drawn_from,
        seeds,
        index.contiguous(),
        waiting.contiguous().view(torch.uint8),
        draft.contiguous(),
        iteration,
        tokens.contiguous(),
        mask.contiguous().view(torch.uint8) if known is not None else index,
        index if unsound is None else unsound,
        kept.view(torch.uint8),
        out,
        behind,
        v,
        w,
        b * w,
        max(temperature, 1e-5),
        top_k,
        top_p,
        BRANCHES=k,
        ACCEPT=accept + 1,
        RESIDUAL=residual + 1,
        REDRAW=0 if redraw is None else redraw + 1,
        SHARED=shared,
        RELABEL=relabel,
        GREEDY=temperature == 0,
        TOP_K=0 < top_k < v,
        TOP_P=top_p < 1,
        KNOWN=known is not None,
        WATCH=unsound is not None,
        BLOCK=triton.next_power_of_2(v),
        num_warps=_warps(v),
        **chained(draft.device),
    )
    return kept, out, behind


def advance(
    tokens: Tensor,
    position: Tensor,
    iteration: Tensor,
    rounds: Tensor,
    index: Tensor,
    kept: Tensor,
    here: Tensor,
    behind: Tensor,
) -> None:
    """Writes the tested tokens and moves the position behind the first refused one.

    Args:
        tokens, rounds: [B, N] int64; position, iteration: [B, 1] int64.
        index, kept, here, behind: [B, W], the window's positions and what `test` says of them.
    """
    images, count = tokens.shape
    window = index.shape[1]
    _advance[(images,)](
        tokens,
        position,
        iteration,
        rounds,
        index.contiguous(),
        kept.contiguous().view(torch.uint8),
        here.contiguous(),
        behind.contiguous(),
        count,
        window,
        SLOTS=triton.next_power_of_2(window),
        num_warps=1,
        **chained(tokens.device),
    )


def first_drafts(
    tokens: Tensor,
    position: Tensor,
    iteration: Tensor,
    index: Tensor,
    laws: Tensor | None,
    seeds: Tensor,
    vocab: int,
    *,
    stream: int,
    shared: bool,
    known: tuple[Tensor, Tensor] | None,
) -> None:
    """Uniform drafts of the positions that have entered the window, which covered index [B, W], and their labels.

    Args:
        tokens: [B, N] int64; position, iteration: [B, 1] int64.
        laws: [B, W, V] float32, the labels' logits, if there are any.
        seeds: [B] int64; stream of the noise, `shared`: the same at all iterations.
        known: (tokens [B, N], mask [B, N]), certain where the mask is true.
    """
    images, count = tokens.shape
    window = index.shape[1]
    given, mask = known if known is not None else (tokens, tokens)
    _first_drafts[(images * window,)](
        tokens,
        position,
        iteration,
        index.contiguous(),
        tokens if laws is None else laws,
        seeds,
        given.contiguous(),
        mask.contiguous().view(torch.uint8) if known is not None else mask,
        vocab,
        count,
        window,
        STREAM=stream + 1,
        SHARED=shared,
        LAWS=laws is not None,
        KNOWN=known is not None,
        BLOCK=triton.next_power_of_2(vocab),
        num_warps=_warps(vocab),
        **chained(tokens.device),
    )


def _warps(vocab: int) -> int:
    """16 entries of each law a thread: p, q and the noise then fit the registers, up to a vocabulary of 16384."""
    return min(32, max(4, triton.next_power_of_2(vocab) // 512))


@triton.jit
def _ring(position, slot, count, window):
    """`decode.verify.ring`."""
    start = tl.minimum(position, count - window)
    return start + (slot - start % window + window) % window


@triton.jit
def _open(
    tokens,  # [B, N]
    position,  # [B]
    iteration,  # [B]
    index,  # [B, W]
    waiting,  # [B, W]
    draft,  # [B, W]
    count,
    window,
    SLOTS: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    image = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    live = slot < window
    to = image * window + slot
    start = tl.load(position + image)
    at = _ring(start, slot, count, window)
    tl.store(index + to, at, mask=live)
    tl.store(waiting + to, (at >= start).to(tl.uint8), mask=live)
    tl.store(draft + to, tl.load(tokens + image * count + at, mask=live), mask=live)
    tl.store(iteration + image, tl.load(iteration + image) + 1)


@triton.jit
def _test(
    logits,  # [K, B W, V]
    weights,  # [K, B W]
    drawn_from,  # [B W, V]
    seeds,  # [B]
    index,  # [B W]
    waiting,  # [B W]
    draft,  # [B W]
    iteration,  # [B]
    tokens,  # [B W]
    mask,  # [B W]
    unsound,  # [1]
    kept,  # [B W]
    here,  # [B W]
    behind,  # [B W]
    vocab,
    window,
    laws,
    temperature,
    top_k,
    top_p,
    BRANCHES: tl.constexpr,
    ACCEPT: tl.constexpr,
    RESIDUAL: tl.constexpr,
    REDRAW: tl.constexpr,
    SHARED: tl.constexpr,
    RELABEL: tl.constexpr,
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
    token = tl.load(draft + law)
    if tl.load(waiting + law) == 0:
        tl.store(kept + law, 1)
        tl.store(here + law, token)
        tl.store(behind + law, token)
        return
    image = law // window
    seed, at, step = tl.load(seeds + image), tl.load(index + law), tl.load(iteration + image)
    lane = tl.arange(0, BLOCK)
    inside = lane < vocab
    mine = lane == token
    label = drawn_from + law.to(tl.int64) * vocab + lane

    p = _guided(logits, weights, law, laws, vocab, lane, BRANCHES)
    if WATCH:
        _note(unsound, p, inside)
    p = _filtered(p, lane, temperature, top_k, top_p, GREEDY, TOP_K, TOP_P)
    if KNOWN and tl.load(mask + law) != 0:
        p = tl.where(lane == tl.load(tokens + law), 0.0, float("-inf"))
    q = tl.load(label, mask=inside, other=float("-inf"))
    if WATCH:
        _note(unsound, tl.where(q == float("-inf"), 0.0, q), inside)
    if RELABEL:
        tl.debug_barrier()  # all of q is read before p is written over it
        tl.store(label, p, mask=inside)
    p_top, q_top = tl.max(p, axis=0), tl.max(q, axis=0)
    p_mine = tl.max(tl.where(mine, p, float("-inf")), axis=0) - p_top
    q_mine = tl.max(tl.where(mine, q, float("-inf")), axis=0) - q_top
    p, q = tl.exp(p - p_top), tl.exp(q - q_top)
    p_sum, q_sum = tl.sum(p, axis=0), tl.sum(q, axis=0)

    ratio = tl.exp((p_mine - _log(p_sum)) - (q_mine - _log(q_sum)))  # 0 / 0: NaN, below which nothing is
    stays = _uniform(seed, at, step, tl.full([], 0, tl.int32), ACCEPT) < ratio
    tl.store(kept + law, stays.to(tl.uint8))
    other = token
    if REDRAW > 0:
        other = _drawn(p, seed, at, step * (1 - SHARED), lane, vocab, REDRAW)
    tl.store(behind + law, other)
    if stays == 0:
        rest = tl.maximum(p / p_sum - q / q_sum, 0.0)
        rest = tl.where(tl.sum(rest, axis=0) < 1e-12, p, rest)  # only rounding refuses a draft there
        token = _drawn(rest, seed, at, step, lane, vocab, RESIDUAL)
    tl.store(here + law, token)


@triton.jit
def _drawn(weight, seed, at, iteration, lane, vocab, STREAM: tl.constexpr):
    """A token of probability proportional to its weight: the first of a race of exponentials."""
    first = tl.argmax(weight / _exponential(seed, at, iteration, lane, STREAM), axis=0)
    return tl.minimum(first, vocab - 1).to(tl.int64)  # of NaNs alone any lane may be taken


@triton.jit
def _advance(
    tokens,  # [B, N]
    position,  # [B]
    iteration,  # [B]
    rounds,  # [B, N]
    index,  # [B, W]
    kept,  # [B, W]
    here,  # [B, W]
    behind,  # [B, W]
    count,
    window,
    SLOTS: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    image = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    live = slot < window
    of = image * window + slot
    at = tl.load(index + of, mask=live, other=-1)
    stays = tl.load(kept + of, mask=live, other=1) != 0
    last = tl.max(at, axis=0)
    first = tl.min(tl.where(stays, last, at), axis=0)
    token = tl.where(at <= first, tl.load(here + of, mask=live), tl.load(behind + of, mask=live))
    tl.store(tokens + image * count + at, token, mask=live)
    final = live & (at >= tl.load(position + image)) & (at <= first)
    tl.store(rounds + image * count + at, tl.load(iteration + image), mask=final)
    tl.debug_barrier()  # the old position is read before the new one is there
    tl.store(position + image, first + 1)


@triton.jit
def _first_drafts(
    tokens,  # [B, N]
    position,  # [B]
    iteration,  # [B]
    index,  # [B W]
    laws,  # [B W, V]
    seeds,  # [B]
    given,  # [B, N]
    mask,  # [B, N]
    vocab,
    count,
    window,
    STREAM: tl.constexpr,
    SHARED: tl.constexpr,
    LAWS: tl.constexpr,
    KNOWN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    follow(CHAIN)
    law = tl.program_id(0)
    image = law // window
    at = _ring(tl.load(position + image), law % window, count, window)
    if at == tl.load(index + law):
        return
    lane = tl.arange(0, BLOCK)
    inside = lane < vocab
    logits = tl.zeros([BLOCK], dtype=tl.float32)
    step = tl.load(iteration + image) * (1 - SHARED)
    token = _drawn(inside.to(tl.float32), tl.load(seeds + image), at, step, lane, vocab, STREAM)
    if KNOWN and tl.load(mask + image * count + at) != 0:
        token = tl.load(given + image * count + at)
        logits = tl.where(lane == token, 0.0, float("-inf"))
    tl.store(tokens + image * count + at, token)
    if LAWS:
        tl.store(laws + law.to(tl.int64) * vocab + lane, logits, mask=inside)
