"""The decode engine: weights, cache and guidance branches. It knows no sampling rule."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from visgen.conditions import Prefix
from visgen.config import UserError
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.points import Points
from visgen.decode.warp import Warp
from visgen.nn.cache import KVCache
from visgen.nn.categorical import note

T = TypeVar("T")
POLL = 4  # iterations between two looks of the host at a GPU's flag


@dataclass
class Generation:
    """Result of a decode.

    Attributes:
        tokens: [B, N] ids, or vectors [B, N, C].
        nfe: backbone evaluations of one window (all guidance branches of a window count once).
        seconds: wall time of the decode, device work included.
        rounds: [B, N] the evaluation, from 1, that fixed each token.
        notes: what the sampler chose automatically or counted.
    """

    tokens: Tensor
    nfe: int
    seconds: float
    rounds: Tensor
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def nfe_per_image(self) -> Tensor:
        """[B] evaluations after which each image was complete."""
        return self.rounds.amax(1)

    @property
    def accepted(self) -> Tensor:
        """[B] tokens that needed no evaluation of their own: all but the first that each evaluation fixed."""
        return self.rounds.shape[1] - self.nfe_per_image


class SamplerLike(Protocol):
    def init(self, engine: Engine, noise: Noise) -> Any: ...

    def iterate(self, state: Any, forward: Callable[[Tensor, Tensor], Any], noise: Noise) -> None: ...

    def iterations(self, engine: Engine) -> int: ...

    def done(self, state: Any) -> Tensor | None: ...

    def stages(self, state: Any) -> list[Hashable]: ...

    def notes(self, state: Any) -> dict[str, Any]: ...


class Engine:
    """Decodes a batch of B images with K guidance branches, as K * B rows (the last branch is the conditional one).

    Args:
        model: a `visgen.model.Model` in eval mode, in the precision it shall run in.
        guidance: weight of the branches.
        warp: temperature and filters.
        tokenizer: the first 12 digits of the hash of the tokenizer whose tokens these are, where it is known.

    Attributes:
        given, known: the arguments of the last `begin`.
        order: [B, N] of `arrange`; None where tokens stand in raster order.
        continuous: whether tokens are vectors.
        student: whether all tokens are drawn by passes over all slots (`whole`).
        fused: whether laws and windows of drafts are computed by the kernels of nn/fused/.
        unsound: [1] int32 on the device, above 0 once a value of this batch was not finite.
    """

    fused = False
    continuous = False
    student = False
    order: Tensor | None = None
    unsound: Tensor

    def __init__(
        self,
        model: Any,
        guidance: Guidance | None = None,
        warp: Warp | None = None,
        tokenizer: str | None = None,
    ) -> None:
        self.model = model
        self.continuous, self.student = model.continuous, model.backbone.taught is not None
        self.tokenizer = tokenizer
        self.guidance = guidance or Guidance()
        self.warp = warp or Warp()
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.unsound = torch.zeros(1, dtype=torch.int32, device=self.device)
        self.tokens: int = model.tokens
        self.vocab: int = model.config.vocab
        self.grid: tuple[int, ...] = model.grid
        self._cond: Prefix | None = None
        self._control: Tensor | None = None  # [J, K B, N, D]
        self._cache: KVCache | None = None
        self._reserved: tuple[int, int] | None = None  # (images, blocks) of a blockwise model's cache
        self._kept: dict[Hashable, Any] = {}
        self.given: dict[str, Any] = {}
        self.known: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def begin(self, batch: dict[str, Any], known: tuple[Tensor, Tensor] | None = None) -> None:
        """Starts a batch: embeds its condition, empties the cache, runs all prefix slots but the last.

        Args:
            batch: what the model's condition reads, such as label [B], and perhaps maps for its control: `map`, or
                `hints` (`nn/control.py`).
            known: (tokens [B, N], mask [B, N]): where the mask is true, the law has all mass on the given token.
        """
        self._cond = self.prefixes(batch)
        self._control = self._branched(self.model.controlled(batch), self.batch)
        self.given, self.known = batch, known
        self.unsound.zero_()
        rows = self._cond.vectors.shape[0]
        if not self.model.backbone.cached:
            return  # the sampler reserves one, or needs none
        if self._cache is None or self._cache.keys.shape[1] != rows:
            self._cache = self.model.backbone.make_cache(rows, self.device, self.dtype)
        else:
            self._cache.clear()
        filled = self.model.condition.prefix - 1
        if filled:
            pos = torch.arange(filled, device=self.device).expand(rows, -1)
            ignored = torch.zeros(*pos.shape, self.model.config.channels) if self.continuous else torch.zeros_like(pos)
            self.model.backbone(ignored.to(pos.device), pos, cond=self._cond, cache=self._cache)

    def prefixes(self, batch: dict[str, Any]) -> Prefix:
        """The condition's slots of all rows: K branches of the batch's images."""
        given = self.model.condition(batch)
        null = None if all(asked for asked, _ in self.guidance.kinds) else self.model.condition.null(given)
        return Prefix.cat([given if asked or null is None else null for asked, _ in self.guidance.kinds])

    @property
    def condition(self) -> Prefix:
        """The current batch's `prefixes`."""
        assert self._cond is not None, "Engine.begin comes first"
        return self._cond

    def _branched(self, added: Tensor | None, images: int) -> Tensor | None:
        """What control adds [J, B or 1, N, D] -> [J, K B, N, D], zero in the branches without control."""
        if added is None:
            return None
        added = added.to(self.dtype).expand(-1, images, -1, -1)
        return torch.cat([added if shown else torch.zeros_like(added) for _, shown in self.guidance.kinds], 1)

    @property
    def batch(self) -> int:
        """Number B of images of the current batch."""
        return self.condition.vectors.shape[0] // self.guidance.branches

    def forward(self, tokens: Tensor, index: Tensor) -> Any:
        """The guided, filtered law of the tokens at `index` [B, W], given the one before each in tokens [B, N(, C)].

        Both stand in the order of `arrange`, if that was called. Before index 0 stands the condition's last slot;
        earlier tokens were given to earlier calls.
        """
        assert self._cond is not None and self._cache is not None, "Engine.begin comes first"
        k = self.guidance.branches
        before = (index - 1).clamp(min=0)  # read in token slots alone
        previous = tokens.gather(
            1, before if tokens.ndim == 2 else before.unsqueeze(-1).expand(-1, -1, tokens.shape[2])
        )
        pos = (index + self.model.condition.prefix - 1).repeat(k, 1)
        h = self.model.backbone(
            previous.repeat(k, *[1] * (tokens.ndim - 1)),
            pos,
            cond=self._cond,
            control=self._control,
            cache=self._cache,
            **({} if self.order is None else {"order": self.order.repeat(k, 1)}),
        )  # [K B, W, D]
        dist = self.guided(h.unflatten(0, (k, -1)), self.guidance.weights(index, self.tokens))
        if self.continuous:
            return dist  # is walked, not filtered; the sampler keeps known tokens
        dist.unsound = self.unsound
        dist = dist.warped(self.warp)
        if self.known is not None:
            dist = dist.pin(self.known[0].gather(1, index), self.known[1].gather(1, index))
        return dist

    def guided(self, h: Tensor, weights: Tensor) -> Any:
        """The guided law of tokens, of h [K, B, W, D] under K branches and their weights [K, B, W]."""
        return self.model.head.dist(h, weights)

    @property
    def whole_pass(self) -> Callable[..., Tensor]:
        """The backbone's `forward`, for whole sequences."""
        run: Callable[..., Tensor] = self.model.backbone
        return run

    def arrange(self, order: Tensor) -> None:
        """Draws the batch's tokens in an order of each image's own: [B, N] the place of the n-th. `run` gives them back
        in raster order."""
        if self.order is None or self.order.shape != order.shape:
            self.order = order.clone()
        else:  # a captured decode reads this buffer
            self.order.copy_(order)

    def whole(self, values: Tensor, level: Tensor) -> tuple[Any, Tensor]:
        """One pass of a student over all slots: the law of all tokens (of a backbone that snaps, the points whose
        nearest codes they are), and h [B, N, D] of the slots that predict them.

        Args:
            values: [B, N, C] noise, or codes of known tokens.
            level: [B, N], above 0 where a token is noise.
        """
        assert self._cond is not None, "Engine.begin comes first"
        backbone, head = self.model.backbone, self.model.head
        h = self.whole_pass(values.to(self.dtype), None, cond=self._cond, level=level, control=self._control)
        h = h[:, self.model.condition.prefix - backbone.shift :][:, : self.tokens]
        if backbone.snaps:
            law: Any = Points(backbone.draw(values, h, head), backbone.codes)
            note(self.unsound, law.vectors)
        else:
            law = head.law(h)
            law.unsound = self.unsound
        return law if self.known is None else law.pin(*self.known), h

    @torch.no_grad()
    def laws(self, batch: dict[str, Any], tokens: Tensor) -> Any:
        """The guided, filtered laws of all tokens [B, N], or of vectors that stand for them [B, N, C], each given those
        before it: what `forward` says one by one, in one pass without a cache. Needs no `begin`."""
        k, rows = self.guidance.branches, len(tokens)
        cond = self.prefixes(batch)
        control = self._branched(self.model.controlled(batch), rows)
        before = tokens[:, :-1].repeat(k, *[1] * (tokens.ndim - 1))
        h = self.model.backbone(before, None, cond=cond, control=control)[:, self.model.condition.prefix - 1 :]
        index = torch.arange(self.tokens, device=tokens.device).expand(rows, -1)
        law = self.model.head.dist(h.unflatten(0, (k, -1)), self.guidance.weights(index, self.tokens))
        return law.warped(self.warp)

    def reserve(self, blocks: int) -> None:
        """Makes the cache of a model that is decoded block by block; it keeps the last `blocks` blocks."""
        wanted = self.batch, blocks
        if self._reserved != wanted:
            self._cache, self._reserved = None, wanted  # the old one goes first
            make = self.model.backbone.make_cache
            self._cache = make(self.batch, self.device, self.dtype, blocks=blocks, branches=self.guidance.branches)
        elif self._cache is not None:
            self._cache.clear()

    @property
    def cache_bytes(self) -> int:
        """Of keys and values, as far as there is a cache."""
        return 0 if self._cache is None else self._cache.keys.nbytes + self._cache.values.nbytes

    def denoise(self, values: Tensor, index: Tensor, level: Tensor) -> Tensor:
        """The guided prediction [B, W, C] float32 for a block of noised tokens.

        Args:
            values: [B, W, C] of the tokens at index [1, W], in the layout's order.
            level: [1] their time, 0 to 1000; below 0 they are clean, and are remembered as such.
        """
        assert self._cond is not None, "Engine.begin comes first"
        k = self.guidance.branches
        h = self.model.backbone(values.repeat(k, 1, 1), index, cond=self._cond, level=level, cache=self._cache)
        weights = self.guidance.weights(index.clamp(max=self.tokens - 1), self.tokens)
        return self.model.head.dist(h.unflatten(0, (k, -1)), weights)

    def check_sampler(self, kind: str, decodes: str | None = None) -> None:
        """Refuses a sampler of vectors that does not decode this backbone: is not its own, nor, by `decodes`, another
        way of doing what its own does."""
        fitting = self.model.backbone.sampler
        if fitting not in (kind, decodes):
            raise UserError(f"sampler {kind} is not for this model's backbone; use --sampler.kind {fitting}")

    def check(self, sampler: SamplerLike) -> None:
        """Refuses a sampler that draws codes where the model has vectors, or the other way round."""
        asked = getattr(sampler, "continuous", False), getattr(sampler, "whole", False)
        if asked != (self.continuous, self.student):
            kind, use = type(sampler).__module__.rpartition(".")[2], self.model.backbone.sampler
            what = "vectors" if self.continuous else "all drawn at once" if self.student else "codes, drawn one by one"
            raise UserError(f"sampler {kind} is not for this model, whose tokens are {what}; use --sampler.kind {use}")

    def check_finite(self, tokens: Tensor) -> None:
        """Refuse what was drawn from values that are not finite. Read by the host once, when a decode is over.

        Raises:
            UserError: a logit, or a number of the vectors `tokens`, is NaN or infinite.
        """
        if bool(self.unsound) or not bool(tokens.isfinite().all()):
            precision = str(self.dtype).removeprefix("torch.")
            raise UserError(
                f"sampling in {precision} gave values that are not finite: the weights are damaged, or the precision "
                "overflows; check the checkpoint, or try --engine.precision fp32"
            )

    @torch.inference_mode()
    def rehearse(self, sampler: SamplerLike) -> None:
        """Refuses a sampler that does not fit, before anything is drawn: what one image would begin with is made."""
        self.check(sampler)
        zero = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.begin({"label": zero})
        sampler.init(self, Noise(zero))

    @torch.inference_mode()
    def run(self, sampler: SamplerLike, noise: Noise, on_step: Callable[[int, int], None] | None = None) -> Generation:
        """Iterates the sampler to its end. `on_step(done, total)` is called after each iteration's launch.

        Raises:
            UserError: the sampler draws codes and the model vectors, or the other way round.
        """
        self.check(sampler)
        state, step, _ = self.prepared(sampler, noise)
        self.synchronize()
        start = time.perf_counter()
        total, looks = sampler.iterations(self), Looks(self.device)
        for launched in range(1, total + 1):
            step()
            seen = looks.at(launched, lambda: sampler.done(state))
            over = launched == total or (seen is not None and bool(seen[1].all()))
            if on_step is not None:
                on_step(total if over else launched, total)
            if over:
                break
        self.synchronize()
        seconds = time.perf_counter() - start
        self.check_finite(state.tokens)
        rounds = getattr(state, "rounds", None)
        if rounds is None:
            rounds = torch.arange(1, self.tokens + 1, device=self.device).expand(self.batch, -1)
        # copies, for the next decode may lie in the same buffers
        nfe = max(launched, int(rounds.max()))  # an iteration may be several evaluations
        return Generation(self._raster(state.tokens), nfe, seconds, self._raster(rounds), sampler.notes(state))

    def _raster(self, x: Tensor) -> Tensor:
        """A copy of [B, N, ...] in raster order."""
        if self.order is None:
            return x.clone()
        place = self.order.argsort(1)
        return x.gather(1, place.unsqueeze(-1).expand_as(x) if x.ndim == 3 else place)

    def prepared(self, sampler: SamplerLike, noise: Noise) -> tuple[Any, Callable[[], None], Noise]:
        """The state before the first iteration, what runs one, and the noise that it reads."""
        state = sampler.init(self, noise)
        return state, self.stepper(sampler, state, noise), noise

    def stepper(self, sampler: SamplerLike, state: Any, noise: Noise) -> Callable[[], None]:
        """What runs one iteration on `state`."""
        return lambda: sampler.iterate(state, self.forward, noise)

    @torch.inference_mode()
    def laps(self, sampler: SamplerLike, state: Any, noise: Noise, length: int, warmup: int = 3) -> Iterator[float]:
        """Wall times of one iteration on this device, each the mean of a lap of `length`, by a trial decode whose state
        is thrown away; the caller says when it is enough."""
        step = self.stepper(sampler, state, noise)
        for _ in range(warmup):
            step()
        while True:
            self.synchronize()
            start = time.perf_counter()
            for _ in range(length):
                step()
            self.synchronize()
            yield (time.perf_counter() - start) / length

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make()` gave when this engine was first asked for `key`: models and choices that outlast a batch."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # once before and after a whole decode: the clock needs it


class Looks:
    """Which rows are complete, as far as the host may know without keeping the device waiting.

    On a GPU the answer is `POLL` to 2 `POLL` iterations old: the host waits for a copy behind which the device has
    `POLL` more iterations to do, which also bounds how far it runs ahead.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.copy: tuple[int, Tensor, Any] | None = None

    def at(self, launched: int, done: Callable[[], Tensor | None]) -> tuple[int, Tensor] | None:
        """(iteration, the flags [B] as they were after it), the newest that are known once `launched` are launched."""
        if self.cuda and launched % POLL:
            return None
        flags = done()
        if flags is None:
            return None
        if not self.cuda:
            return launched, flags  # a CPU has nothing to wait for
        older, self.copy = self.copy, (launched, *self._copied(flags))
        if older is None:
            return None
        older[2].synchronize()
        return older[:2]

    def _copied(self, flags: Tensor) -> tuple[Tensor, Any]:
        """A copy for the host, and the event after which it is there."""
        host = torch.empty(flags.shape, dtype=torch.bool, pin_memory=True)
        host.copy_(flags, non_blocking=True)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(flags.device))
        return host, event
