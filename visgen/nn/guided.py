"""The categorical law of a decode step, as its ingredients: the branches' logits, their weights, filters, known tokens.

A sampler that only draws never needs the filtered logits themselves: on a GPU one kernel goes from the ingredients to
the token. Whoever asks for `logits` gets them computed by the eager twins.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from visgen.nn.categorical import Categorical, NoiseLike, note


class Guided(Categorical):
    """sum_k weights_k branches_k in float32, then a filter, then known tokens.

    Args:
        branches: [K, B, W, V] logits of the guidance branches, any float type.
        weights: [K, B, W] float32, summing to 1 over k.
        warp: temperature and filters, a `decode.warp.Warp`.
        known: (tokens [B, W], mask [B, W]): all mass on the token where the mask is true.
        fused: draw and test by the fused kernels.
        unsound: [1] int32, a flag that is raised where a logit that is looked at is not finite.
    """

    def __init__(
        self,
        branches: Tensor,
        weights: Tensor,
        warp: Any = None,
        known: tuple[Tensor, Tensor] | None = None,
        fused: bool = False,
        unsound: Tensor | None = None,
    ) -> None:
        self.branches, self.weights, self.warp, self.known = branches, weights, warp, known
        self.fused, self.unsound = fused, unsound

    @cached_property
    def logits(self) -> Tensor:  # type: ignore[override]
        if self.unsound is not None:
            note(self.unsound, self.branches)
        branches = self.branches.float()
        logits = branches[0] if len(branches) == 1 else (branches * self.weights.unsqueeze(-1)).sum(0)
        if self.warp is not None:
            logits = self.warp(logits)
        return logits if self.known is None else Categorical(logits).pin(*self.known).logits

    @property
    def vocab(self) -> int:
        return self.branches.shape[-1]

    def warped(self, warp: Any) -> Categorical:
        if self.warp is not None or self.known is not None:
            return super().warped(warp)
        return Guided(self.branches, self.weights, warp, None, self.fused, self.unsound)

    def pin(self, tokens: Tensor, mask: Tensor) -> Categorical:
        if self.known is not None:
            return super().pin(tokens, mask)
        return Guided(self.branches, self.weights, self.warp, (tokens, mask), self.fused, self.unsound)

    def like(self, logits: Tensor) -> Categorical:
        return Categorical(logits)

    def draw(
        self,
        noise: NoiseLike,
        index: Tensor,
        stream: int,
        iteration: Tensor | int = 0,
        where: Tensor | None = None,
    ) -> Tensor:
        if not self.fused:
            return super().draw(noise, index, stream, iteration, where)
        from visgen.nn.fused.draw import draw  # Triton is needed here alone

        rule: dict[str, Any] = {"stream": stream, "where": where, **self._shared()}
        if not (isinstance(iteration, int) and iteration == 0):
            rule["iteration"] = _steps(iteration, noise.seeds)
        return draw(self.branches, self.weights, noise.seeds, index, **rule)

    def test(
        self,
        draft: Tensor,
        drawn_from: Categorical,
        noise: NoiseLike,
        index: Tensor,
        iteration: Tensor,
        waiting: Tensor,
        **rule: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`accept`, `residual` and `draw` of all drafts that are waiting, by one kernel: `nn/fused/verify.py`."""
        from visgen.nn.fused.verify import test

        rule |= self._shared()
        window = index, waiting, draft, _steps(iteration, noise.seeds)
        return test(self.branches, self.weights, drawn_from.logits, noise.seeds, *window, **rule)

    def _shared(self) -> dict[str, Any]:
        filters = {name: getattr(self.warp, name) for name in ("temperature", "top_k", "top_p")} if self.warp else {}
        return {"known": self.known, "unsound": self.unsound, **filters}


def _steps(iteration: Tensor | int, seeds: Tensor) -> Tensor:
    """The iteration of each image, [B]."""
    if isinstance(iteration, int):
        return torch.full_like(seeds, iteration)
    if iteration.numel() != len(seeds):
        raise ValueError(f"iteration {list(iteration.shape)} of a fused draw must be one number for each image")
    return iteration.flatten()
