"""The decode engine on CUDA: one iteration of the sampler, captured once and replayed.

Forward, guidance, filters, the draw and the sampler's own bookkeeping are one CUDA graph over static buffers: a replay
reads nothing back, allocates nothing and launches with one call, so the device never waits for Python. A new batch of
the same shape is copied into the buffers of the last. The slow twin is `Engine`, which runs the same code eagerly.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visgen.conditions import Prefix
from visgen.decode.engine import Engine, Generation, SamplerLike
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.nn.guided import Guided


class CapturedEngine(Engine):
    """As `Engine`, on a GPU. Windows of one slot take the backbone's fused step where it has one.

    Raises:
        UserError: no Triton, or sizes that the fused kernels do not have; each names the eager engine as the remedy.
    """

    def __init__(self, model: Any, guidance: Guidance | None = None, warp: Warp | None = None) -> None:
        super().__init__(model, guidance, warp)
        from visgen.nn.fused import check_available

        check_available()
        from visgen.nn.fused.draw import check_vocab

        check_vocab(self.vocab)
        self._step = model.backbone.fused()
        index = torch.arange(self.tokens, device=self.device).unsqueeze(0)
        self._weights = self.guidance.weights(index, self.tokens)[:, 0].contiguous()  # [K, N]
        self._captured: dict[Any, tuple[torch.cuda.CUDAGraph, Any, Noise]] = {}

    @torch.inference_mode()
    def begin(self, batch: dict[str, Any], known: tuple[Tensor, Tensor] | None = None) -> None:
        held = self._cond, self._cache, self._known
        super().begin(batch, known)
        assert self._cond is not None
        cond = Prefix(self._cond.vectors.to(self.dtype), self._cond.visible)
        if held[1] is self._cache and _same(held[0], cond) and _same(held[2], known):
            self._cond, self._known = _copied(held[0], cond), _copied(held[2], known)
        else:  # other shapes: other buffers, so what was captured over the old ones is void
            self._captured.clear()
            self._cond, self._known = _cloned(cond), _cloned(known)

    def forward(self, previous: Tensor, index: Tensor) -> Any:
        if self._step is None or index.shape[1] != 1:
            return super().forward(previous, index)
        assert self._cond is not None and self._cache is not None, "Engine.begin comes first"
        k = self.guidance.branches
        h = self._step(previous, index + self.model.condition.prefix - 1, self._cond, self._cache)  # [K B, 1, D]
        law = self.model.head.dist(h.unflatten(0, (k, -1)), self._weights[:, index]).warped(self.warp)
        if self._known is not None:
            law = law.pin(self._known[0].gather(1, index), self._known[1].gather(1, index))
        if isinstance(law, Guided):
            law.fused = True
        return law

    @torch.inference_mode()
    def run(self, sampler: SamplerLike, noise: Noise, on_step: Callable[[int, int], None] | None = None) -> Generation:
        self._synchronize()
        start = time.perf_counter()
        graph, state, _ = self._capture(sampler, noise)
        total = sampler.iterations(self)
        for i in range(total):
            graph.replay()
            if on_step is not None:
                on_step(i + 1, total)
        tokens = state.tokens.clone()
        self._synchronize()
        return Generation(tokens, total, time.perf_counter() - start)

    def _capture(self, sampler: SamplerLike, noise: Noise) -> tuple[torch.cuda.CUDAGraph, Any, Noise]:
        """The graph of one iteration with its state and noise, set to the beginning."""
        key = (type(sampler), repr(getattr(sampler, "config", None)))
        fresh = sampler.init(self, noise)
        if key in self._captured:
            graph, state, held = self._captured[key]
            held.seeds.copy_(noise.seeds)
            for field in dataclasses.fields(state):
                value = getattr(state, field.name)
                if isinstance(value, Tensor):
                    value.copy_(getattr(fresh, field.name))
            return graph, state, held
        held = Noise(noise.seeds.clone())
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # compiles the kernels; the slots it writes are written again
            sampler.iterate(sampler.init(self, noise), self.forward, held)
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            sampler.iterate(fresh, self.forward, held)  # recorded, not run
        self._captured[key] = graph, fresh, held
        return self._captured[key]


def _same(a: Any, b: Any) -> bool:
    """Whether two tuples of tensors (or None) have the same shapes and types."""
    if a is None or b is None:
        return a is b
    return all(
        (x is None and y is None) or (x is not None and y is not None and x.shape == y.shape and x.dtype == y.dtype)
        for x, y in zip(a, b, strict=True)
    )


def _copied(to: Any, source: Any) -> Any:
    """`to`, holding the values of `source`."""
    for x, y in zip(to or (), source or (), strict=True):
        if x is not None:
            x.copy_(y)
    return to


def _cloned(source: Any) -> Any:
    """`source` in buffers of its own."""
    if source is None:
        return None
    made: list[Any] = [None if x is None else x.clone() for x in source]
    return Prefix(*made) if isinstance(source, Prefix) else tuple(made)
