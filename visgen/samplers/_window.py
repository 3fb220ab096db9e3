"""The window of a sampler that tests many tokens at once, chosen once by a trial on the device.

A window of W costs seconds(W) an iteration and fixes E(W) tokens, so it pays where E(W) / seconds(W) is above that of
W = 1, plain autoregression. Which W that is depends on model, device and batch: a small batch leaves the device idle
and a wide window is nearly free, a large one fills it.
"""

from __future__ import annotations

import math
from typing import Any

from visgen.decode.engine import Engine
from visgen.decode.noise import Noise

WIDTHS = (1, 8, 16, 32, 64)
TRIAL = 12  # timed iterations at each width
WORTH = 1.05  # a window must be this much faster than none

# Tokens per evaluation that are expected at most, by the logarithm of the width between these points. A trial meets the
# top rows of its images alone, which may be emptier than the rest. From published runs (SJD on Lumina and Emu3: 2.2 to
# 2.3 at 16 and wider; coupled drafts: 3.5 to 4.2 at 32 and 64); eval/exactness.py and a decode's own NFE say more.
EXPECTED = {
    "fresh": {1: 1.0, 16: 2.3, 64: 2.5},
    "coupled": {1: 1.0, 16: 2.9, 32: 3.5, 64: 4.0},
}


def choose_window(sampler: Any, engine: Engine, noise: Noise, drafting: str) -> dict[str, Any]:
    """The window, and the trial that spoke for it, made when `engine` first meets this sampler, or a larger batch.

    Args:
        sampler: has `begin(engine, window)`, whose state has `position` [B, 1].
    """
    chosen: dict[int, dict[str, Any]] = engine.once(("window", sampler.config), dict)  # by batch
    if max(chosen, default=0) < engine.batch:
        chosen[engine.batch] = _trials(sampler, engine, noise, drafting)
    return chosen[max(chosen)]


def _trials(sampler: Any, engine: Engine, noise: Noise, drafting: str) -> dict[str, Any]:
    seconds: dict[int, float] = {}
    tokens: dict[int, float] = {}
    rate: dict[int, float] = {}
    for width in sorted({min(w, engine.tokens) for w in WIDTHS}):
        state, warmup = sampler.begin(engine, width), min(3, engine.tokens // 4)
        seconds[width] = engine.seconds(sampler, state, noise, TRIAL, warmup)
        measured = state.position.float().mean().item() / (TRIAL + warmup)  # a host read, once per engine
        tokens[width] = min(measured, expected(drafting, width)) if width > 1 else 1.0
        rate[width] = tokens[width] / seconds[width]
        if rate[width] < max(rate.values()) / 2:  # wider ones are slower still
            break
    best = max(rate, key=lambda width: rate[width])
    window = best if rate[best] >= WORTH * rate[1] else 1
    trial = {w: {"ms": round(1e3 * seconds[w], 3), "tokens": round(tokens[w], 2)} for w in seconds}
    return {"window": window, "trial": trial}


def expected(drafting: str, width: int) -> float:
    """`EXPECTED`, interpolated."""
    points = EXPECTED["fresh" if drafting == "fresh" else "coupled"]
    low = max(w for w in points if w <= width)
    high = min((w for w in points if w >= width), default=low)
    if high == low:
        return points[low]
    part = math.log(width / low) / math.log(high / low)
    return points[low] + part * (points[high] - points[low])
