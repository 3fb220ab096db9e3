"""Student's t and the delete-one-group jackknife, in closed form and without scipy."""

from __future__ import annotations

import math
from collections.abc import Sequence


def t_central(t: float, df: int) -> float:
    """P(|T| < t) of Student's t with `df` degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(df))
    sine, cosine = math.sin(theta), math.cos(theta)
    term, series = (cosine, 0.0) if df % 2 else (1.0, 0.0)
    for k in range(2 if df % 2 else 1, df, 2):  # k = 2, 4, .. (odd df) or 1, 3, .. (even df)
        series += term
        term *= cosine**2 * k / (k + 1)
    return 2 / math.pi * (theta + sine * series) if df % 2 else sine * series


def t_quantile(df: int, level: float = 0.95) -> float:
    """The t with P(|T| < t) = level, by bisection."""
    low, high = 0.0, 1.0
    while t_central(high, df) < level:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_central(middle, df) < level else (low, middle)
    return (low + high) / 2


def jackknife(value: float, leave_out: Sequence[float]) -> tuple[float, float]:
    """Standard error and bias-corrected value of a statistic from its G delete-one-group values.

    SE^2 = (G - 1) / G * sum_g (theta_-g - mean)^2; bias-corrected = G theta - (G - 1) mean (Efron and Stein 1981).
    """
    groups = len(leave_out)
    mean = math.fsum(leave_out) / groups
    spread = math.fsum((v - mean) ** 2 for v in leave_out)
    return math.sqrt((groups - 1) / groups * spread), groups * value - (groups - 1) * mean


def interval(value: float, se: float, df: int, level: float = 0.95) -> tuple[float, float]:
    """value +- t se."""
    half = t_quantile(df, level) * se
    return value - half, value + half


def normal_p(difference: float, se: float) -> float:
    """Two-sided p of a normal difference from 0; an error of 0 makes it 1 or 0."""
    if se == 0:
        return float(difference == 0)
    return math.erfc(abs(difference) / se / math.sqrt(2))


def holm(p: Sequence[float]) -> list[float]:
    """p values adjusted for their number, each to be compared with the level itself (Holm 1979)."""
    order = sorted(range(len(p)), key=lambda i: p[i])
    out, largest = [1.0] * len(p), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, (len(p) - rank) * p[i])
        out[i] = min(1.0, largest)
    return out
