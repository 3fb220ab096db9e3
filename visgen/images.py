"""Drawn images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from PIL import Image
from torch import Tensor


@dataclass
class Images:
    """A batch of drawn images.

    Attributes:
        pixels: uint8 [B, 3, H, W] on the CPU; of clips, the first frames.
        tokens: [B, N], or [B, N, C], on the CPU.
        labels: of every image, none where they were drawn from prompts.
        seeds: of every image.
        nfe: backbone evaluations of the batch.
        seconds: wall time of decoding tokens and pixels.
        prompts: of every image, none where they were drawn from labels.
        rounds: [B, N] on the CPU, the evaluation, from 1, that fixed each token; an image's largest is its own NFE.
        notes: what the sampler chose automatically or counted; see `pooled`.
        clips: uint8 [B, T, 3, H, W] on the CPU, of a model of clips.
    """

    pixels: Tensor
    tokens: Tensor
    labels: list[int]
    seeds: list[int]
    nfe: int
    seconds: float
    rounds: Tensor
    notes: dict[str, Any] = field(default_factory=dict)
    prompts: list[str] = field(default_factory=list)
    clips: Tensor | None = None

    @property
    def nfe_per_image(self) -> list[int]:
        """Evaluations after which each image was complete."""
        return self.rounds.amax(1).tolist()

    def pil(self) -> list[Image.Image]:
        """The images as PIL images."""
        return [Image.fromarray(p) for p in self.pixels.permute(0, 2, 3, 1).contiguous().numpy()]

    @classmethod
    def joined(cls, parts: Sequence[Images], labels: list[int], seeds: list[int], prompts: list[str]) -> Self:
        """Batches as one."""
        clips = [p.clips for p in parts if p.clips is not None]
        return cls(
            torch.cat([p.pixels for p in parts]),
            torch.cat([p.tokens for p in parts]),
            labels,
            seeds,
            sum(p.nfe for p in parts),
            sum(p.seconds for p in parts),
            torch.cat([p.rounds for p in parts]),
            pooled([(p.notes, len(p.seeds)) for p in parts]),
            prompts,
            torch.cat(clips) if clips else None,
        )


COUNTS = ("head_steps", "teacher_evaluations")  # of a batch


def pooled(notes: Sequence[tuple[dict[str, Any], int]]) -> dict[str, Any]:
    """Notes of several batches, each with its number of images, as one: counts add up, of other numbers that differ the
    mean over images, of all else the last."""
    found = dict(notes[-1][0])
    for name, last in found.items():
        values, images = zip(*((n[name], count) for n, count in notes if name in n), strict=True)
        if name in COUNTS:
            found[name] = sum(values)
        elif isinstance(last, int | float) and len(set(values)) > 1:
            found[name] = round(sum(v * n for v, n in zip(values, images, strict=True)) / sum(images), 4)
    return found
