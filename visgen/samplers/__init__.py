"""Samplers: the rule by which tokens are drawn, and nothing else.

A sampler sets no attribute of any module. One iteration is pure tensor code over its state without a host read, so an
engine may capture it; `forward(previous, index)` is the engine's law of the tokens at `index`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from visgen.decode.engine import Engine
from visgen.decode.noise import Noise

Forward = Callable[[Tensor, Tensor], Any]


class Sampler(ABC):
    """Built as `Sampler(config)`."""

    @abstractmethod
    def init(self, engine: Engine, noise: Noise) -> Any:
        """Static buffers of a decode: a state with `tokens` [B, N]."""

    @abstractmethod
    def iterate(self, state: Any, forward: Forward, noise: Noise) -> None:
        """One iteration, in place on `state`."""

    @abstractmethod
    def iterations(self, engine: Engine) -> int:
        """Number of iterations after which every row is complete."""
