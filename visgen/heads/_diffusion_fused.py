"""The laws of `diffusion.py` by kernels (`nn/fused/denoise.py`, `modulated.py`): walked step by step, or whole.

Weights are read where they lie. A walk's modulations are made for as many steps at once as fit a fixed room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from visgen.nn.fused import denoise as fused
from visgen.nn.fused.modulated import Moments, adapt, product
from visgen.nn.fused.tile import FEW


class FusedDenoised:
    """As `Denoised`.

    Args:
        head: a `DiffusionHead` in eval mode.
        given: [K, B, W, width]; weights: [K, B, W, 1].
    """

    def __init__(self, head: Any, given: Tensor, weights: Tensor) -> None:
        self.head, self.given, self.weights = head, given, weights

    def at(self, which: slice) -> FusedDenoised:
        """The law of some of the tokens."""
        return FusedDenoised(self.head, self.given[:, :, which], self.weights[:, :, which])

    def along(self, about: Tensor) -> Predictions:
        """What is predicted at the steps of a walk whose times are embedded as about [S, width]."""
        return Predictions(self, about)

    def walked(
        self,
        draws: Tensor,
        table: Tensor,
        bounds: Tensor,
        about: Tensor,
        noisy: Sequence[bool],
        place: float | None,
        temperature: float,
    ) -> Tensor:
        """The tokens [B, W, C] at the end of a walk.

        Args:
            draws: [1 + D, B, W, C] float32, the start and the noise of the D steps that draw.
            table, bounds, about: [S, ...], as of `samplers/_walk.py`; noisy: of every step, whether it draws.
            place: of the log variance between its bounds; None: the head's.
        """
        net, shape = self.along(about), draws.shape[1:]
        draws = draws.flatten(1, 2).contiguous()  # [1 + D, T, C]
        x = draws[0].clone()
        before, kept = torch.zeros_like(x), torch.zeros_like(x)
        each = iter(draws[1:].unbind())
        for j, draw in enumerate(noisy):
            z = next(each) if draw else None
            net.end(x, j, step=fused.Step(before, kept, table[j], bounds[j], z, place, temperature))
        return x.view(shape)


class Predictions:
    """`(x [B, W, C], step) -> ` as `Denoised.predict` at that step's time. Steps are taken in turn, each any number of
    times; all buffers are those of the walk."""

    def __init__(self, law: FusedDenoised, about: Tensor) -> None:
        head, given = law.head, law.given
        self.head, self.about = head, about
        self.given = given.flatten(0, 2).contiguous()  # [K T, w]
        self.weights = law.weights.flatten(1).contiguous()  # [K, T]
        (rows, width), new = self.given.shape, torch.empty_like
        self.h, self.normed, self.inner = new(self.given), new(self.given), new(self.given)
        self.moments = Moments(rows, width, given.device)
        self.maps = [*(block.modulation for block in head.blocks), head.modulation]
        outputs = sum(each.out_features for each in self.maps)
        self.size = min(len(about), fused.steps_at_once(rows, outputs, given.element_size()))
        self.begin, self.made = -1, list[Tensor]()

    def __call__(self, x: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        flat = x.flatten(0, 1).contiguous()
        found, share = torch.empty_like(flat), torch.empty_like(flat) if self.head.learned else None
        self.run(flat, step)
        fused.leave(self.h, self.told(step)[-1], self.head.output, self.weights, found, share)
        return found.view(x.shape), None if share is None else share.view(x.shape)

    def end(self, x: Tensor, j: int, step: fused.Step) -> None:
        """x [T, C] behind step j, in place."""
        self.run(x, j)
        fused.leave(self.h, self.told(j)[-1], self.head.output, self.weights, x, step=step)

    def run(self, x: Tensor, step: int) -> None:
        """Leaves in `h` what enters the final norm."""
        head, told, few = self.head, self.told(step), len(self.h) <= FEW
        first: Any = head.blocks[0].norm
        normed = None if few else self.normed
        fused.enter(
            x, head.input.weight, head.input.bias, first.weight, first.bias, told[0], self.h, normed, self.moments
        )
        for i, block in enumerate(head.blocks):
            norm, one, two = block.norm, block.mlp[0], block.mlp[2]
            if few:
                product(self.h, one, self.inner, self.moments, norm=norm, modulation=told[i])
            else:
                if i:
                    adapt(self.h, norm.weight, norm.bias, told[i], self.normed)
                product(self.normed, one, self.inner, self.moments, modulation=told[i])
            product(self.inner, two, self.h, self.moments, modulation=told[i], gated=True)

    def told(self, step: int) -> list[Tensor]:
        """The modulations of every layer at a step, [K T, 3 w], and of the final norm, [K T, 2 w]."""
        begin = step - step % self.size
        if begin != self.begin:
            self.made.clear()  # the old ones go first
            self.made = fused.modulations(self.given, self.about[begin : begin + self.size], self.maps)
            self.begin = begin
        return [made[step - begin] for made in self.made]
