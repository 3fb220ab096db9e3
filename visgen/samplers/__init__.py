"""Samplers: the rule by which tokens are drawn, and nothing else.

A sampler sets no attribute of any module. One iteration is pure tensor code over its state without a host read, so an
engine may capture it; `forward(tokens, index)` is the engine's law of the tokens at `index` given those before them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor

from visgen.decode.engine import Engine
from visgen.decode.noise import Noise

Forward = Callable[[Tensor, Tensor], Any]


class Sampler(ABC):
    """Built as `Sampler(config)`.

    Attributes:
        lossless: whether its tokens have the distribution of plain autoregression: `ar`, of vectors `causal`. One that
            says so needs a case in `visgen/lossless.py`, so that `eval/exactness.py` proves it.
        continuous: whether its tokens are vectors.
        whole: it draws all tokens by passes over all slots (`Engine.whole`), of a student (`Backbone.taught`).
        ragged: rows finish at different times (`done`), all begin alike, and all that a row knows is in its rows of the
            state, [B, ...] of two dimensions or more: so a row may start anew while the others go on.
    """

    lossless: bool = False
    continuous: bool = False
    whole: bool = False
    ragged = False

    @abstractmethod
    def init(self, engine: Engine, noise: Noise) -> Any:
        """Static buffers of a decode: a state with `tokens` [B, N], or [B, N, C].

        Where rows finish at different times it also has `rounds` [B, N]: the iteration, from 1, that fixed each token.
        """

    @abstractmethod
    def iterate(self, state: Any, forward: Forward, noise: Noise) -> None:
        """One iteration, in place on `state`. It leaves rows that are complete as they are."""

    @abstractmethod
    def iterations(self, engine: Engine) -> int:
        """Number of iterations after which every row is complete, whatever is drawn."""

    def done(self, state: Any) -> Tensor | None:
        """[B] bool on the device, whether each row is complete; None if that takes all `iterations`."""
        return None

    def stages(self, state: Any) -> list[Hashable]:
        """Which sequence of operations every iteration of a decode from this state is: those of one stage have equal
        shapes, so one captured graph serves them. Empty: all are of one. A sampler that says more chooses in `iterate`
        by the state's `turn`, the number of the iteration as far as the host knows, and by nothing else of the host."""
        return []

    def notes(self, state: Any) -> dict[str, Any]:
        """What a record of this decode should say: choices made automatically, counts. Called once it is over.

        Of several batches their mean is told; a count that adds up instead is named in `visgen.images.COUNTS`.
        """
        return {}
