"""The decode engine: weights, cache and guidance branches. It knows no sampling rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from visgen.conditions import Prefix
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.nn.cache import KVCache


@dataclass
class Generation:
    """Result of a decode.

    Attributes:
        tokens: [B, N] ids.
        nfe: backbone evaluations of one window (all guidance branches of a window count once).
        seconds: wall time of the decode, device work included.
    """

    tokens: Tensor
    nfe: int
    seconds: float


class SamplerLike(Protocol):
    def init(self, engine: Engine, noise: Noise) -> Any: ...

    def iterate(self, state: Any, forward: Callable[[Tensor, Tensor], Any], noise: Noise) -> None: ...

    def iterations(self, engine: Engine) -> int: ...


class Engine:
    """Decodes a batch of B images with K guidance branches, as K * B rows (branch 0 is the null one).

    Args:
        model: a `visgen.model.Model` in eval mode, in the precision it shall run in.
        guidance: weight of the branches.
        warp: temperature and filters.
    """

    def __init__(self, model: Any, guidance: Guidance | None = None, warp: Warp | None = None) -> None:
        self.model = model
        self.guidance = guidance or Guidance()
        self.warp = warp or Warp()
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.tokens: int = model.tokens
        self.vocab: int = model.config.vocab
        self._cond: Prefix | None = None
        self._cache: KVCache | None = None
        self._known: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def begin(self, batch: dict[str, Any], known: tuple[Tensor, Tensor] | None = None) -> None:
        """Starts a batch: embeds its condition, empties the cache, runs all prefix slots but the last.

        Args:
            batch: what the model's condition reads, such as label [B].
            known: (tokens [B, N], mask [B, N]): where the mask is true, the law has all mass on the given token.
        """
        given = self.model.condition(batch)
        branches = [given] if self.guidance.branches == 1 else [self.model.condition.null(given), given]
        self._cond = Prefix.cat(branches)
        self._known = known
        rows = self._cond.vectors.shape[0]
        if self._cache is None or self._cache.keys.shape[1] != rows:
            self._cache = self.model.backbone.make_cache(rows, self.device, self.dtype)
        filled = self.model.condition.prefix - 1
        if filled:
            pos = torch.arange(filled, device=self.device).expand(rows, -1)
            self.model.backbone(torch.zeros_like(pos), pos, cond=self._cond, cache=self._cache)

    @property
    def batch(self) -> int:
        """Number B of images of the current batch."""
        assert self._cond is not None, "Engine.begin comes first"
        return self._cond.vectors.shape[0] // self.guidance.branches

    def forward(self, previous: Tensor, index: Tensor) -> Any:
        """The guided, filtered law of the tokens at `index` [B, W], given the token before each, previous [B, W].

        The token before index 0 is the condition's last slot; its entry in `previous` is ignored.
        """
        assert self._cond is not None and self._cache is not None, "Engine.begin comes first"
        k = self.guidance.branches
        pos = (index + self.model.condition.prefix - 1).repeat(k, 1)
        h = self.model.backbone(previous.repeat(k, 1), pos, cond=self._cond, cache=self._cache)  # [K B, W, D]
        dist = self.model.head.dist(h.unflatten(0, (k, -1)), self.guidance.weights(index, self.tokens))
        dist = dist.warped(self.warp)
        if self._known is not None:
            tokens, mask = self._known
            dist = dist.pin(tokens.gather(1, index), mask.gather(1, index))
        return dist

    @torch.inference_mode()
    def run(self, sampler: SamplerLike, noise: Noise, on_step: Callable[[int, int], None] | None = None) -> Generation:
        """Iterates the sampler to its end. `on_step(done, total)` is called after each iteration's launch."""
        self._synchronize()
        start = time.perf_counter()
        state = sampler.init(self, noise)
        total = sampler.iterations(self)
        for i in range(total):
            sampler.iterate(state, self.forward, noise)
            if on_step is not None:
                on_step(i + 1, total)
        self._synchronize()
        return Generation(state.tokens, total, time.perf_counter() - start)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # once before and after a whole decode: the clock needs it
