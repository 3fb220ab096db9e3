"""The window of a sampler that tests many tokens at once, chosen once by a trial on the device.

A window of W costs seconds(W) an iteration and fixes E(W) tokens, so it pays where E(W) / seconds(W) is above that of
W = 1, plain autoregression. Which W that is depends on model, device and batch: a small batch leaves the device idle
and a wide window is nearly free, a large one fills it.

The trial has noise of its own (`Noise.of_trial`). The window may depend on the clock and on what the trial drew, but
not on the noise of any image, so images that are decoded with it have the distribution that they have with a fixed one.
"""

from __future__ import annotations

import statistics
from typing import Any

from visgen.decode.engine import Engine
from visgen.decode.noise import Noise

WIDTHS = (1, 8, 16, 32, 64)
LAP = 8  # iterations that are timed together
WORTH = 1.05  # a window must be this much faster than none


def choose_window(sampler: Any, engine: Engine) -> dict[str, Any]:
    """The window, and the trial that spoke for it, made when `engine` first meets this sampler, or a larger batch.

    Args:
        sampler: has `begin(engine, window)`, whose state has `position` [B, 1] and `rounds` [B, N].
    """
    chosen: dict[int, dict[str, Any]] = engine.once(("window", sampler.config), dict)  # by batch
    if max(chosen, default=0) < engine.batch:
        chosen[engine.batch] = trials(sampler, engine, Noise.of_trial(engine.batch, engine.device))
    return chosen[max(chosen)]


def trials(sampler: Any, engine: Engine, noise: Noise) -> dict[str, Any]:
    """The best window by trial decodes with this noise, and what each width cost and gave."""
    seconds: dict[int, float] = {}
    tokens: dict[int, float] = {}
    rate: dict[int, float] = {}
    for width in sorted({min(w, engine.tokens) for w in WIDTHS}):
        seconds[width], tokens[width] = _trial(sampler, engine, noise, width, max(rate.values(), default=0.0) / 2)
        rate[width] = tokens[width] / seconds[width]
        if rate[width] < max(rate.values()) / 2:  # wider ones are slower still
            break
    best = max(rate, key=lambda width: rate[width])
    window = best if rate[best] >= WORTH * rate[1] else 1
    trial = {w: {"ms": round(1e3 * seconds[w], 3), "tokens": round(tokens[w], 2)} for w in seconds}
    return {"window": window, "trial": trial}


def _trial(sampler: Any, engine: Engine, noise: Noise, width: int, hopeless: float) -> tuple[float, float]:
    """Seconds of an iteration and the tokens that it fixes, until half of the images is there: their upper rows alone
    may be emptier than the rest. A width that fixes fewer than `hopeless` tokens a second is given up."""
    state, laps = sampler.begin(engine, width), []
    for seconds in engine.laps(sampler, state, noise, LAP, warmup=min(3, engine.tokens // 4)):
        laps.append(seconds)
        fixed = state.position.float().mean().item()  # a host read, once a lap
        tokens = fixed / state.rounds.amax(1).float().mean().clamp(min=1).item() if width > 1 else 1.0
        if width == 1 or fixed >= engine.tokens / 2 or (len(laps) > 1 and tokens < hopeless * statistics.median(laps)):
            break
    return statistics.median(laps), tokens
