"""The decode engine on CUDA: one iteration of the sampler, captured once and replayed.

Forward, guidance, filters, the draw and the sampler's own bookkeeping are one CUDA graph over static buffers: a replay
reads nothing back, allocates nothing and launches with one call, so the device never waits for Python. Where iterations
differ in shape (`Sampler.stages`) there is a graph for each. A new batch of the same shape is copied into the buffers
of the last. The slow twin is `Engine`, which runs the same code eagerly.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from visgen.conditions import Prefix
from visgen.decode.engine import Engine, SamplerLike
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.warp import Warp
from visgen.nn.fused import check_available
from visgen.nn.guided import Guided


class CapturedEngine(Engine):
    """As `Engine`, on a GPU. Windows take the backbone's fused form where it has one.

    Raises:
        UserError: no Triton, or sizes that the fused kernels do not have; each names the eager engine as the remedy.
    """

    fused = True
    _dist: Callable[[Tensor, Tensor], Any] | None = None
    _pass: Callable[..., Tensor] | None = None
    _pool: Any = None  # of the graphs of one state

    def __init__(
        self,
        model: Any,
        guidance: Guidance | None = None,
        warp: Warp | None = None,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__(model, guidance, warp, tokenizer)
        check_available()
        from visgen.nn.fused.draw import check_vocab  # needs Triton

        check_vocab(self.vocab)
        self._fused, self._pass, self._dist = model.backbone.fused(), model.backbone.fused_pass(), model.head.fused()
        index = torch.arange(self.tokens, device=self.device).unsqueeze(0)
        weights = self.guidance.weights(index, self.tokens)[:, 0]
        steady = bool((weights == weights[:, :1]).all())  # read once, before any decode
        self._weights = weights[:, :1] if steady else weights  # [K, 1 or N]
        self._captured: dict[Any, tuple[dict[Hashable, Any], Any, Noise]] = {}

    @torch.inference_mode()
    def begin(self, batch: dict[str, Any], known: tuple[Tensor, Tensor] | None = None) -> None:
        cond, cache, pinned, control = self._cond, self._cache, self.known, self._control
        super().begin(batch, known)
        assert self._cond is not None
        fresh, maps = Prefix(self._cond.vectors.to(self.dtype), self._cond.visible), (self._control,)
        if cache is self._cache and _same(cond, fresh) and _same(pinned, known) and _same((control,), maps):
            self._cond, self.known = _copied(cond, fresh), _copied(pinned, known)
            self._control = _copied((control,), maps)[0]
        else:  # other shapes: other buffers, so what was captured over the old ones is void
            self._captured.clear()
            self._cond, self.known, self._control = _cloned(fresh), _cloned(known), _cloned(maps)[0]

    def reserve(self, blocks: int) -> None:
        cache = self._cache
        super().reserve(blocks)
        if cache is not self._cache:  # what was captured wrote into the old one
            self._captured.clear()

    def forward(self, tokens: Tensor, index: Tensor) -> Any:
        if self._fused is None:
            return self._by_kernels(super().forward(tokens, index))
        assert self._cond is not None and self._cache is not None, "Engine.begin comes first"
        k = self.guidance.branches
        h = self._fused(tokens, index, self._cond, self._cache, self._control)  # [K B, W, D]
        law = self.model.head.dist(h.unflatten(0, (k, -1)), self._weigh(index)).warped(self.warp)
        if self.known is not None:
            law = law.pin(self.known[0].gather(1, index), self.known[1].gather(1, index))
        return self._by_kernels(law)

    def _by_kernels(self, law: Any) -> Any:
        """The law, drawn from and tested by the fused kernels where it has them."""
        if isinstance(law, Guided):
            law.fused, law.unsound = True, self.unsound
        return law

    def guided(self, h: Tensor, weights: Tensor) -> Any:
        return super().guided(h, weights) if self._dist is None else self._dist(h, weights)

    @property
    def whole_pass(self) -> Callable[..., Tensor]:
        return super().whole_pass if self._pass is None else self._pass

    def _weigh(self, index: Tensor) -> Tensor:
        """`Guidance.weights` [K, B, W]; without a kernel where they are the same for all tokens."""
        if self._weights.shape[1] > 1:
            return self._weights[:, index]
        b, w = index.shape
        return self.once(("weights", b, w), lambda: self._weights.unsqueeze(-1).expand(-1, b, w).contiguous())

    def prepared(self, sampler: SamplerLike, noise: Noise) -> tuple[Any, Callable[[], None], Noise]:
        """As in `Engine`; the state lies in the buffers of the last decode by this sampler."""
        fresh = sampler.init(self, noise)
        stages = sampler.stages(fresh)
        key = (type(sampler), repr(getattr(sampler, "config", None)), _shapes(fresh), tuple(stages))
        if key not in self._captured:
            held = Noise(noise.seeds.clone())
            graphs = self._graphs(sampler, fresh, held, stages, lambda: sampler.init(self, noise))
            self._captured[key] = graphs, fresh, held
            return fresh, _replays(graphs, stages), held
        graphs, state, held = self._captured[key]
        held.seeds.copy_(noise.seeds)
        _restore(state, fresh)
        return state, _replays(graphs, stages), held

    def stepper(self, sampler: SamplerLike, state: Any, noise: Noise) -> Callable[[], None]:
        stages = sampler.stages(state)
        return _replays(self._graphs(sampler, state, noise, stages, lambda: state), stages)

    def _graphs(
        self, sampler: SamplerLike, state: Any, noise: Noise, stages: list[Hashable], warm: Callable[[], Any]
    ) -> dict[Hashable, Any]:
        """A graph of one iteration on `state` for every stage, recorded at its first turn. They share their memory, for
        what one leaves to the next lies in `state`."""
        graphs: dict[Hashable, Any] = {}
        self._pool = None
        for turn, stage in enumerate(stages or [None]):
            if stage not in graphs:
                graphs[stage] = self._record(sampler, state, noise, warm(), turn)
        if stages:
            state.turn = 0
        return graphs

    def _record(self, sampler: SamplerLike, state: Any, noise: Noise, warm: Any, turn: int) -> Any:
        """The graph of one iteration on `state`. `warm` is iterated once before, which compiles the kernels; the cache
        slots that it writes are written again."""
        _at_turn(warm, turn)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            sampler.iterate(warm, self.forward, noise)
        torch.cuda.current_stream(self.device).wait_stream(side)
        _at_turn(state, turn)
        graph = torch.cuda.CUDAGraph()
        with _uncollected(), torch.cuda.graph(graph, pool=self._pool):
            sampler.iterate(state, self.forward, noise)  # recorded, not run
        self._pool = graph.pool()
        return graph


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No collection of garbage: to free a graph of an earlier engine would spoil the capture at hand."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _at_turn(state: Any, turn: int) -> None:
    """A state of a sampler of several stages is at the iteration `turn`, as far as the host knows."""
    if hasattr(state, "turn"):
        state.turn = turn


def _replays(graphs: dict[Hashable, Any], stages: list[Hashable]) -> Callable[[], None]:
    """What replays the graph of the next iteration."""
    if not stages:
        replay: Callable[[], None] = graphs[None].replay
        return replay
    following = itertools.cycle(stages)
    return lambda: graphs[next(following)].replay()


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


def _shapes(state: Any) -> tuple[Any, ...]:
    values = (getattr(state, field.name) for field in dataclasses.fields(state))
    return tuple(tuple(v.shape) if isinstance(v, Tensor) else v is None for v in values)


def _restore(state: Any, fresh: Any) -> None:
    """Gives `state` the values of `fresh`, tensors in their own memory."""
    for field in dataclasses.fields(state):
        value, new = getattr(state, field.name), getattr(fresh, field.name)
        if isinstance(value, Tensor):
            value.copy_(new)
        else:
            setattr(state, field.name, new)
