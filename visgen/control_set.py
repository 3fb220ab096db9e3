"""Scoring what is drawn under a control: what `eval/control.py` is made of.

For each held-out base picture (`small_set.bases`) the model draws R images of its class, or caption, under its map. The
map of every image is made by the same extractor and compared with the map that was asked for. The rows that make a
number readable: the picture's own round trip through the tokenizer (`upper_bound`: no model of its tokens can do
better), the generated images against the maps of *other* pictures (`shuffled`: what chance gives), and the model
without its map (`uncontrolled`). Errors are over base pictures; KID compares the images of a picture with the other
pictures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from visgen import config as configs
from visgen.config import UserError, kind_of
from visgen.controls import Control
from visgen.data import Data
from visgen.evaluate import labels_of, reconstruct
from visgen.generate import Generator, stream
from visgen.metrics.control import SMALLEST, Confusion, depth_rmse, edge_counts, f1, ms_ssim
from visgen.metrics.images import require_finite, to_uint8
from visgen.metrics.intervals import interval
from visgen.metrics.protocol import SamplePlan, Score
from visgen.metrics.recon import ssim
from visgen.nn.control import Hint
from visgen.objectives._tokens import check_text
from visgen.prompts import Features
from visgen.sampling import SamplingConfig
from visgen.scored_data import check_checkpoint, check_match
from visgen.small_set import bases
from visgen.tokenizers import Tokenizer

MAIN = {"canny": "f1", "softedge": "ssim", "hed": "ssim", "lineart": "ssim", "depth": "rmse", "seg": "miou"}
SMALLER_IS_BETTER = frozenset({"rmse"})
Progress = Callable[[int, int], None]


@dataclass
class ControlSet:
    """Held-out base pictures with their maps.

    Attributes:
        pixels: uint8 [M, 3, H, W].
        labels: [M], the checkpoint's.
        maps: [M, 3, H, W] float in [-1, 1], made of `pixels`.
        control: the extractor, ready.
        texts: of M rows, the features of the pictures' captions, where the model is asked by them.
    """

    pixels: Tensor
    labels: Tensor
    maps: Tensor
    control: Control
    texts: Features | None = None

    @property
    def kind(self) -> str:
        return configs.kind_of(self.control.config)

    def others(self, seed: int) -> Tensor:
        """[M]: for each picture another one, each once: a random cycle through all of them."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        out = torch.empty_like(order)
        out[order] = order.roll(1)
        return out


def collect(
    data: Data, control: Control, n: int | None, device: torch.device, batch: int, asked: Tensor | None = None
) -> ControlSet:
    """The first n (default all) base pictures of `data`, and their maps.

    Args:
        asked: the checkpoint's label of each class of the data; None: it is asked by the features of captions, which
            are collected too.

    Raises:
        UserError: fewer than 4 of them, of which no error can be said.
    """
    chosen = bases(data)[:n]
    if len(chosen) < 4:
        raise UserError(f"{len(chosen)} base pictures are too few to score a control on; an error needs at least 4")
    parts = [data.get_many(chosen[i : i + batch]) for i in range(0, len(chosen), batch)]
    samples = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    pixels, labels = samples["pixels"][:, 0], labels_of(data)[chosen]
    labels, texts = labels if asked is None else asked[labels], None
    if asked is None:
        names = [f"picture {i}" for i in chosen]
        texts = Features(samples["text"].float(), samples["text_mask"], names, [], {"data": kind_of(data.config)})
    return ControlSet(pixels, labels, extracted(control, pixels, device, batch), control, texts)


def check_asked(generator: Generator, data: Data, where: str = "checkpoint") -> Tensor | None:
    """Return the checkpoint's label of each class of the data; None: the model is asked by texts.

    Raises:
        UserError: the data's pictures cannot be asked for: they have other classes, or no features of a text.
    """
    check_text(generator.model, data)
    if kind_of(generator.model.config.condition) == "text":
        check_match(data, generator.tokenizer)
        return None
    return check_checkpoint(data, generator, where)


def extracted(control: Control, pixels: Tensor, device: torch.device, batch: int) -> Tensor:
    """Maps [n, 3, H, W] on the CPU, of images uint8 [n, 3, H, W]."""
    parts = [control.extract(p.to(device).float()[:, None] / 127.5 - 1)[:, 0].cpu() for p in pixels.split(batch)]
    maps = torch.cat(parts)
    require_finite(maps, what="values of the control map")
    return maps


# ------------------------------------------------------------------------------------------------------- images


def drawn(
    generator: Generator,
    of: ControlSet,
    settings: SamplingConfig,
    repeats: int,
    seed: int,
    strength: float = 1.0,
    controlled: bool = True,
    on_step: Progress | None = None,
) -> Tensor:
    """uint8 [M, R, 3, H, W]: R images of each picture's class or caption, under its map unless told otherwise."""
    m = len(of.labels)
    plan = SamplePlan(m * repeats, m, seed).rows()
    order = plan.label.argsort(stable=True)  # the R seeds of each picture together
    rows = plan.label[order].tolist()
    asked = rows if of.texts is not None else of.labels[plan.label[order]].tolist()
    pairs = zip(asked, plan.seed[order].tolist(), strict=True)

    def hints(part: range) -> Sequence[Hint]:
        return [Hint(of.maps[[rows[i] for i in part]][:, None], strength)]

    images = []
    for made in stream(generator, pairs, settings, None, None, of.texts, hints if controlled else None):
        images.append(made.pixels)
        if on_step is not None:
            on_step(sum(map(len, images)), m * repeats)
    return torch.cat(images).unflatten(0, (m, repeats))


def upper_bound(tokenizer: Tokenizer, of: ControlSet, batch: int) -> Tensor:
    """uint8 [M, 1, 3, H, W]: the pictures through the tokenizer and back."""
    parts = [to_uint8(reconstruct(tokenizer, p[:, None])[1][:, 0]).cpu() for p in of.pixels.split(batch)]
    return torch.cat(parts)[:, None]


# ------------------------------------------------------------------------------------------------------- scores


@dataclass
class Values:
    """What a row of images gives: values per image [M, R] by name, and pooled numbers without an error."""

    each: dict[str, Tensor] = field(default_factory=dict)
    pooled: dict[str, float] = field(default_factory=dict)

    def scores(self, kind: str) -> dict[str, Score]:
        """Means over base pictures (of their R images) with standard error, named `<kind>_<metric>`."""
        out = {}
        for name, values in self.each.items():
            per = values.double().mean(1)
            se = float(per.std()) / math.sqrt(len(per))
            ci = interval(float(per.mean()), se, len(per) - 1)
            out[f"{kind}_{name}"] = Score(float(per.mean()), se=se, ci95=ci, n=values.numel())
        return out | {f"{kind}_{name}": Score(v, note="over all pixels: no error") for name, v in self.pooled.items()}


def compare(of: ControlSet, images: Tensor, wanted: Tensor, device: torch.device, batch: int) -> Values:
    """How well images uint8 [M, R, 3, H, W] follow the maps of the pictures `wanted` [M]."""
    m, r = images.shape[:2]
    flat, target = images.flatten(0, 1), wanted.repeat_interleave(r)
    if of.kind == "seg":
        return _labels(of, flat, target, device, batch)
    maps = extracted(of.control, flat, device, batch)[:, 0] / 2 + 0.5  # [M R, H, W] in [0, 1]
    asked = of.maps[target][:, 0] / 2 + 0.5
    if of.kind == "canny":
        light = of.control.config.polarity == "light_on_dark"
        found, given = ((x > 0.5) == light for x in (maps, asked))
        exact, near = edge_counts(found, given), edge_counts(found, given, 1)
        each = {"f1": f1(exact), "f1_tol1": f1(near)}
        pooled = {"f1_pooled": float(f1(exact.sum(1, keepdim=True)))}
    elif of.kind == "depth":
        norms: tuple[Any, ...] = (of.control.config.norm, "affine")
        each = {name: depth_rmse(maps, asked, norm) for name, norm in zip(("rmse", "rmse_affine"), norms, strict=True)}
        pooled = {}
    else:
        rgb = [(x * 255).round().to(torch.uint8).unsqueeze(1).expand(-1, 3, -1, -1) for x in (maps, asked)]
        each, pooled = {"ssim": ssim(rgb[1], rgb[0])}, {}
        if min(maps.shape[-2:]) >= SMALLEST:
            each["ms_ssim"] = ms_ssim(maps, asked)
    return Values({name: value.view(m, r) for name, value in each.items()}, pooled)


def _labels(of: ControlSet, flat: Tensor, target: Tensor, device: torch.device, batch: int) -> Values:
    """mIoU between the labels of the images and of the pictures, both by the same network."""

    def labels(pixels: Tensor) -> Tensor:
        parts = [of.control.labels(p.to(device).float()[:, None] / 127.5 - 1) for p in pixels.split(batch)]  # type: ignore[operator]
        return torch.cat(parts).cpu()

    found, wanted = labels(flat), labels(of.pixels)[target]
    confusion = Confusion(int(max(found.max(), wanted.max())) + 1)
    confusion.update(found, wanted)
    return Values(pooled={"miou": confusion.mean_iou()})


def verdict(scores: dict[str, dict[str, Score]], kind: str) -> str:
    """How far a model comes from chance to the tokenizer's bound, and what its control costs in KID: Markdown."""
    name = f"{kind}_{MAIN[kind]}"
    low, high, own = (scores[row][name].value for row in ("shuffled", "upper_bound", "generated"))
    share = (own - low) / (high - low) if high != low else math.nan
    text = f"{name}: {own:.4f}, {share:.0%} of the way from shuffled ({low:.4f}) to the upper bound ({high:.4f})"
    if "uncontrolled" not in scores:
        return text
    kids = [scores[row]["kid"] for row in ("generated", "uncontrolled")]
    error = math.hypot(*(k.se or 0.0 for k in kids))
    more = kids[0].value - kids[1].value
    return f"{text}; KID {more:+.5f} against the uncontrolled model, {more / error if error else math.nan:+.1f} errors"
