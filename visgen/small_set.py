"""Scoring on a data set too small for a Fréchet distance: what `eval/small.py` is made of.

Everything is said of *base* pictures: one per unrelated thing (`Data.bases`; without it, all pictures), so that errors
mean what they say. Images that are compared with the held-out bases come as R images per base, of its class: all rows
have its class histogram, and `kid` removes the bias that this would cause.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from visgen.config import UserError
from visgen.data import Data
from visgen.evaluate import (
    Reference,
    Rows,
    World,
    collect,
    labels_of,
    matched,
    pictures,
    reconstruct,
    reference,
    round_trip,
    shares,
)
from visgen.launch import Progress
from visgen.metrics.features import FeatureExtractor
from visgen.metrics.images import require_finite
from visgen.metrics.intervals import interval
from visgen.metrics.kid import kid
from visgen.metrics.neighbours import closer, share_below
from visgen.metrics.protocol import SamplePlan, Score
from visgen.model import Model
from visgen.scored_data import build_pictures
from visgen.tokenizers import Tokenizer

PER_BASE = 10  # images generated for each held-out base, unless told
LEVELS = (0.01, 0.05)  # quantiles of the held-out distances below which generated images are counted
LN2 = math.log(2)
SMOOTHING = tuple(10 ** (e / 4) for e in range(-16, 5))  # pseudo-counts that the marginals choose from


class SmallSet:
    """The two splits of a data set, and one picture per base of each.

    Attributes:
        train, held_out: the splits.
        train_bases, bases: indices into them of one picture per base.
        labels: [M] of the held-out bases.
        mirrored: whether training shows mirror images too.
    """

    def __init__(self, config: Any) -> None:
        """Raises `UserError` for cached codes, or too few pictures for an error."""
        self.held_out, self.train = build_pictures(config, "held_out"), build_pictures(config, "train")
        self.bases, self.train_bases = (bases(data) for data in (self.held_out, self.train))
        self.labels = labels_of(self.held_out)[self.bases]
        self.mirrored: bool = getattr(config, "hflip", False)
        pairs = int((torch.bincount(self.labels) // 2).sum())
        if pairs < 4:
            raise UserError(
                f"the held-out split has {len(self.bases)} base pictures, which make {pairs} pairs of one class; "
                "an error needs at least 4"
            )
        self._most()

    def plan(self, n: int | None, seed: int) -> SamplePlan:
        """Which of the held-out bases each generated image takes its class from (the plan's `label`), and its seed.

        Raises:
            UserError: n is no multiple of the number of bases, so the class histograms would differ.
        """
        m = len(self.bases)
        n = PER_BASE * m if n is None else n
        if n < 1 or n % m:
            near = max(round(n / m), 1) * m
            raise UserError(
                f"--n {n} must be a multiple of the {m} held-out base pictures, each of which lends its class equally "
                f"often; use {near}"
            )
        return SamplePlan(n, m, seed)

    def training_like(self, most: int, seed: int) -> Tensor:
        """Indices [M, R] into `train`: for each held-out base R training bases of its class, each once; R <= `most`."""
        order = torch.tensor(self.train_bases)[_shuffled(len(self.train_bases), seed)]
        repeats = min(most, self._most())
        chosen = matched(labels_of(self.train)[order], self.labels.repeat(repeats))
        return order[chosen].view(repeats, -1).T

    def halves(self, seed: int) -> tuple[Tensor, Tensor]:
        """Positions [K] and [K] of held-out bases: disjoint halves, k-th and k-th of one class; odd ones drop."""
        order = _shuffled(len(self.labels), seed)
        of_class = [order[self.labels[order] == c] for c in self.labels.unique()]
        first, second = torch.cat([p[: len(p) // 2 * 2].view(-1, 2) for p in of_class]).unbind(1)
        return first, second

    def _most(self) -> int:
        """How many training bases of its class each held-out base can have."""
        have, need = (
            torch.bincount(x, minlength=len(self.train.classes))
            for x in (labels_of(self.train)[self.train_bases], self.labels)
        )
        short = (have < need).nonzero().flatten().tolist()
        if short:
            raise UserError(
                f"class '{self.train.classes[short[0]]}' has {int(have[short[0]])} base pictures to train on and "
                f"{int(need[short[0]])} held out; a row of training images needs at least as many: hold out fewer"
            )
        return int((have // need.clamp(min=1))[need > 0].min())


def bases(data: Data) -> list[int]:
    """One picture per unrelated thing, or all pictures where the source does not know."""
    return data.bases() if hasattr(data, "bases") else list(range(len(data)))


def _shuffled(n: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------------- rows


def mirrored(data: Data, world: World | None = None, batch: int = 256) -> Rows:
    """The mirror image of every training picture; of one that a mirror makes wrong, the picture itself."""
    for places in shares(len(data), world, batch):
        yield data.views(places, "flip")["pixels"][:, 1, 0], torch.tensor(places)


def augmented(data: Data, chosen: Sequence[int], seed: int, world: World | None = None, batch: int = 256) -> Rows:
    """Training pictures `chosen` as training shows them; their place in `chosen` is their index."""
    for places in shares(len(chosen), world, batch):
        shown = [data.get(chosen[i], np.random.default_rng((seed, i)))["pixels"][0] for i in places]
        yield torch.stack(shown), torch.tensor(places)


@dataclass
class Known:
    """Features of all the pictures that generated images are compared with.

    Attributes:
        held_out: the held-out bases, [M, D] in its `features`.
        recon: [M, D], their round trip.
        train: [M, R, D], training bases of their classes.
        copies: [M R, D], the same as training shows them, through the tokenizer and back.
        views: [V, T, D], the round trip of every training picture, and of its mirror image if `SmallSet.mirrored`.
    """

    held_out: Reference
    recon: Tensor
    train: Tensor
    copies: Tensor
    views: Tensor


def known(
    data: SmallSet,
    tokenizer: Tokenizer,
    extractor: FeatureExtractor,
    most: int,
    seed: int,
    world: World | None = None,
    batch: int = 256,
) -> Known:
    """Collects the features; `most` and `seed` as for `SmallSet.training_like`."""
    world = world or World()

    def features(name: str, rows: Rows, n: int) -> Tensor:
        with Progress(name, world.rank == 0) as step:
            return collect(rows, n, extractor, world, step)[0]

    like, every = data.training_like(most, seed), range(len(data.train))
    chosen, m = like.flatten().tolist(), len(data.bases)
    held_out = reference(data.held_out, extractor, world, chosen=data.bases)
    recon = round_trip(tokenizer, pictures(data.held_out, data.bases, world, batch))
    copies = round_trip(tokenizer, augmented(data.train, chosen, seed, world, batch))
    views = [pictures(data.train, every, world, batch), *([mirrored(data.train, world, batch)] * data.mirrored)]
    return Known(
        held_out,
        features("held out", recon, m),
        features("train", pictures(data.train, chosen, world, batch), len(chosen)).view(*like.shape, -1),
        features("copies", copies, len(chosen)),
        torch.stack([features("all of train", round_trip(tokenizer, view), len(every)) for view in views]),
    )


def kid_rows(generated: Tensor, real: Known, halves: tuple[Tensor, Tensor], groups: int) -> dict[str, Score]:
    """KID of every row against the held-out bases.

    Args:
        generated: features [M, R, D] of images of the bases' classes.
        halves: `SmallSet.halves`; the row `real` compares these with each other.
    """
    held_out = real.held_out.features
    rows = {"generated": generated, "recon": real.recon[:, None], "train": real.train}
    scores = {f"kid_{name}": kid(x, held_out, groups=groups) for name, x in rows.items()}
    first, second = (held_out[half] for half in halves)
    return {**scores, "kid_real": kid(first[:, None], second, groups=groups)}


def kid_limit(scores: Mapping[str, Score]) -> float:
    """What `kid_generated` may be: twice the tokenizer's own distance, and three standard errors of its own."""
    return 2 * max(scores["kid_recon"].value, 0.0) + 3 * (scores["kid_generated"].se or 0.0)


def passes(scores: Mapping[str, Score]) -> bool:
    """The criterion: `kid_generated` is at most `kid_limit`."""
    return scores["kid_generated"].value <= kid_limit(scores)


# ------------------------------------------------------------------------------------------------- likelihood


def likelihood(model: Model, tokenizer: Tokenizer, data: SmallSet, asked: Tensor, batch: int) -> dict[str, Score]:
    """Nats a token (bits in `terms`) of plain images, means over bases with their error; `asked` [C] holds the model's
    label of each class of the data.

    `nats_train` and `nats_held_out` of the model under the image's own label; `nats_gap`, held-out less train; and of
    the held-out bases under two laws that know less: per-position histograms of the training bases, and all codes
    alike. `nats_held_out_all` is over all held-out pictures, as the training log's `held_out/nats_per_token`.
    """
    sides = {}
    for name, source, chosen in (
        ("train", data.train, data.train_bases),
        ("held_out", data.held_out, list(range(len(data.held_out)))),
    ):
        tokens = tokens_of(tokenizer, source, chosen, batch)
        sides[name] = (tokens, nats_per_token(model, tokens, asked[labels_of(source)[chosen]], batch))
    seen, train = sides["train"]
    tokens, every = sides["held_out"]
    held_out = every[data.bases]
    vocab = model.config.vocab
    marginal, alpha = marginal_nats(seen, tokens[data.bases], vocab)
    gap = float(held_out.mean() - train.mean())
    gap_se = math.sqrt(float(held_out.var()) / len(held_out) + float(train.var()) / len(train))
    scores = {
        "nats_train": _mean(train),
        "nats_held_out": _mean(held_out),
        "nats_gap": Score(gap, se=gap_se, n=len(held_out), n_ref=len(train)),
        "nats_held_out_all": Score(float(every.mean()), n=len(every), note="no error: variants are related"),
        "nats_marginals": _mean(marginal, {"alpha": alpha}),
        "nats_uniform": Score(math.log(vocab), note="exact"),
    }
    return {name: replace(s, terms={**s.terms, "bits": s.value / LN2}) for name, s in scores.items()}


def tokens_of(tokenizer: Tokenizer, data: Data, chosen: Sequence[int], batch: int) -> Tensor:
    """Tokens [n, N] of plain pictures, on the CPU."""
    parts = [reconstruct(tokenizer, x[:, None], decode=False)[0].cpu() for x, _ in pictures(data, chosen, batch=batch)]
    return torch.cat(parts)


@torch.no_grad()
def nats_per_token(model: Model, tokens: Tensor, labels: Tensor, batch: int) -> Tensor:
    """-log p(tokens | label) / N of every image: [n] float64, from tokens [n, N] and labels [n]."""
    device = model.parameter_device()
    parts = [
        model.loss(ids.to(device), {"label": label.to(device)}, None).double().mean(1).cpu()
        for ids, label in zip(tokens.split(batch), labels.split(batch), strict=True)
    ]
    nats = torch.cat(parts)
    require_finite(nats[:, None], what="nats a token")
    return nats


def marginal_nats(train: Tensor, tokens: Tensor, vocab: int) -> tuple[Tensor, float]:
    """-log p / N of tokens [n, N] under per-position histograms of `train` [T, N], and their pseudo-count.

    p = (count + a) / (T + a V), with the a of `SMOOTHING` of the best leave-one-out likelihood of `train`.
    """
    counts = torch.zeros(train.shape[1], vocab, dtype=torch.float64)
    counts.scatter_add_(1, train.T, torch.ones_like(train.T, dtype=torch.float64))  # [N, V]

    def nats(ids: Tensor, alpha: float, left_out: int) -> Tensor:
        found = counts.gather(1, ids.T) - left_out + alpha  # [N, n]
        return math.log(len(train) - left_out + alpha * vocab) - found.log().mean(0)

    alpha = min(SMOOTHING, key=lambda a: float(nats(train, a, left_out=1).mean()))
    return nats(tokens, alpha, left_out=0), alpha


def _mean(values: Tensor, terms: dict[str, float] | None = None) -> Score:
    value, n = float(values.mean()), len(values)
    se = float(values.std()) / math.sqrt(n)
    return Score(value, se=se, ci95=interval(value, se, n - 1), n=n, terms=dict(terms or {}))


# --------------------------------------------------------------------------------------------------- distances


def newness(distances: Mapping[str, Tensor]) -> dict[str, Score]:
    """How near generated images are to training images, and how near copies would be, measured by held-out images.

    Args:
        distances: to the nearest training image, of `generated`, `copies` and `held_out`.

    Returns:
        For both of the first: `closer`, and `share_below` at `LEVELS`.
    """
    scores, held_out = {}, distances["held_out"]
    for name in ("generated", "copies"):
        scores[f"{name}_closer"] = closer(distances[name], held_out)
        scores |= {f"{name}_below_{100 * v:.0f}pct": share_below(distances[name], held_out, v) for v in LEVELS}
    return scores


# ------------------------------------------------------------------------------------------------------- report


def verdict(scores: Mapping[str, Score]) -> str:
    """The criterion in one line of Markdown."""
    word, sign = ("PASS", "<=") if passes(scores) else ("FAIL", ">")
    value = scores["kid_generated"].value
    return f"**{word}**: kid_generated {value:.5f} {sign} 2 max(kid_recon, 0) + 3 SE = {kid_limit(scores):.5f}"


def likelihood_table(scores: Mapping[str, Score]) -> str:
    """Markdown: nats and bits a token."""
    lines = ["| likelihood | nats a token | bits a token |", "|---|---|---|"]
    for name, score in scores.items():
        if name.startswith("nats_"):
            parts = [score.value] if score.se is None else [score.value, score.se]
            cells = [" ± ".join(f"{part / unit:.4f}" for part in parts) for unit in (1, LN2)]
            lines.append(f"| {name.removeprefix('nats_')} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def quantile_table(distances: Mapping[str, Tensor]) -> str:
    """Markdown: quantiles of the distances to the nearest training image."""
    levels = torch.tensor([0, 0.01, 0.05, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
    lines = [
        "| distance to the nearest training image | images | " + " | ".join(f"{v:.0%}" for v in levels.tolist()) + " |",
        "|---" * (len(levels) + 2) + "|",
    ]
    for name, values in distances.items():
        cells = [f"{v:.3g}" for v in torch.quantile(values, levels.to(values)).tolist()]
        lines.append(f"| {name} | {len(values)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
