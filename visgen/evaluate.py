"""Scoring sets of images under one protocol: what `eval/fid.py` and `eval/recon.py` are made of.

A *row* is a way of filling the sample plan with images: drawn by a model, taken from the training set, reconstructed by
a tokenizer, or decoded from tokens drawn from their per-position marginals. All rows of a table meet the same
reference, extractor and labels, so they compare. Images stream through; none is written to disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor

from visgen import tensors
from visgen.config import UserError, kind_of
from visgen.data import Data
from visgen.decode.noise import Noise, Stream
from visgen.generate import Generator, at_a_time
from visgen.launch import on_cpu
from visgen.metrics.features import FeatureExtractor
from visgen.metrics.frechet import Moments, Stats, frechet_distance, require_enough
from visgen.metrics.images import ImageAudit, require_finite
from visgen.metrics.kid import FeatureBank, kid
from visgen.metrics.protocol import EvalProtocol, SamplePlan, Score
from visgen.sampling import SamplingConfig
from visgen.tokenizers import Tokenizer

Rows = Iterator[tuple[Tensor, Tensor]]  # (pixels uint8 or float in [-1, 1] [B, 3, H, W], plan index [B])


@dataclass
class World:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1

    @staticmethod
    def current() -> World:
        """From `accelerate launch`; one process otherwise."""
        state = PartialState(cpu=on_cpu())
        return World(state.process_index, state.num_processes)

    def sum(self, value: Tensor) -> Tensor:
        """Sum over the processes, on the value's own device (NCCL reduces on the GPU only)."""
        if self.size == 1:
            return value
        on_gpu = torch.distributed.get_backend() == "nccl"
        moved = value.cuda() if on_gpu else value.clone()
        torch.distributed.all_reduce(moved)
        return moved.to(value.device)


# ----------------------------------------------------------------------------------------------- the reference


@dataclass
class Reference:
    """Statistics and features of the reference images.

    Attributes:
        name: data kind and split.
        hash: of the images' bytes in order.
        stats: mean and covariance of their features.
        features: [n, D] float32, for KID.
    """

    name: str
    hash: str
    stats: Stats
    features: Tensor

    @property
    def n(self) -> int:
        return self.stats.n


def reference(
    data: Data,
    extractor: FeatureExtractor,
    world: World | None = None,
    n: int | None = None,
    cache: Path | None = None,
    on_step: Callable[[int, int], None] | None = None,
    chosen: Sequence[int] | None = None,
) -> Reference:
    """Score the first n (default all) plain samples of `data`, or those of `chosen`, which are not cached; `cache` is
    read if it fits and written otherwise.

    Raises:
        UserError: the cache is damaged, or of other images, data settings or another extractor.
    """
    world = world or World()
    n = len(data) if n is None else min(n, len(data))
    cache, chosen = (cache, range(n)) if chosen is None else (None, chosen)
    name = f"{kind_of(data.config)}/{data.split}"
    wanted = {"name": name, "n": str(n), "extractor": extractor.fingerprint, "config": repr(data.config)}
    if cache is not None:
        wanted["images"] = data.fingerprint(chosen)
        if cache.exists():
            return _read_reference(cache, wanted)
    features, audit = collect(pictures(data, chosen, world, extractor.batch), len(chosen), extractor, world, on_step)
    if cache is not None and world.rank == 0:
        tensors.write(cache, {"features": features}, {**wanted, "hash": audit.hash})
    return Reference(name, audit.hash, stats_of(features), features)


def _read_reference(path: Path, wanted: dict[str, str]) -> Reference:
    remedy = "delete the file or pass another --reference-cache"
    found, about = tensors.read(path, remedy)
    for key, value in wanted.items():
        if about.get(key) != value:
            raise UserError(
                f"reference cache {path} holds {key} {about.get(key)!r}, this run needs {value!r}; {remedy}"
            )
    features = found.get("features", torch.zeros(0))
    if features.ndim != 2 or len(features) != int(wanted["n"]) or "hash" not in about:
        raise UserError(
            f"reference cache {path} holds features {list(features.shape)} of {wanted['n']} images; {remedy}"
        )
    return Reference(about["name"], about["hash"], stats_of(features), features)


def stats_of(features: Tensor) -> Stats:
    """Mean and covariance of features [n, D], float64."""
    x = features.double()
    mean = x.mean(0)
    centred = x - mean
    return Stats(mean, centred.T @ centred / max(len(x) - 1, 1), len(x))


# ------------------------------------------------------------------------------------------------------ the rows


def generated(
    generator: Generator,
    plan: SamplePlan,
    settings: SamplingConfig,
    world: World | None = None,
    labels: Tensor | None = None,
) -> Rows:
    """Images drawn by a model under the plan's labels and seeds; with `labels`, what the plan balances are these."""
    world = world or World()
    rows = plan.rows(world.rank, world.size)
    rows = rows if labels is None else replace(rows, label=labels[rows.label])
    size = at_a_time(generator, settings)
    for start in range(0, len(rows), size):
        part = slice(start, start + size)
        images = generator.sample(
            rows.label[part].tolist(), rows.seed[part].tolist(), settings.guidance, settings.warp, settings.sampler
        )
        yield images.pixels, rows.index[part]


def check_images(generator: Generator, settings: SamplingConfig) -> None:
    """Raises `UserError` where the settings do not fit the model, or would draw clips, of which image scores see their
    first frames alone."""
    drawn = generator.frames(settings.sampler)
    if drawn > 1:
        raise UserError(
            f"the model draws clips of {drawn} frames, which eval/fvd.py scores; image scores see the first alone"
        )
    generator.check_sampling(settings)


def pictures(data: Data, chosen: Sequence[int], world: World | None = None, batch: int = 256) -> Rows:
    """Plain images `chosen` of `data`; their place in `chosen` is their index."""
    for places in shares(len(chosen), world, batch):
        yield data.get_many([chosen[i] for i in places])["pixels"][:, 0], torch.tensor(places)


def shares(n: int, world: World | None, batch: int) -> Iterator[range]:
    """What this process has of 0 .. n - 1, batch by batch."""
    world = world or World()
    for start in range(world.rank, n, batch * world.size):
        yield range(start, min(start + batch * world.size, n), world.size)


def round_trip(tokenizer: Tokenizer, rows: Rows) -> Rows:
    """The same pictures through the tokenizer and back, in fp32: the best that a model of its tokens can draw."""
    for pixels, index in rows:
        yield reconstruct(tokenizer, pixels[:, None])[1][:, 0], index


def marginals(
    tokenizer: Tokenizer,
    data: Data,
    plan: SamplePlan,
    world: World | None = None,
    batch: int = 256,
    on_step: Callable[[int, int], None] | None = None,
) -> Rows:
    """Decoded tokens drawn independently from each position's histogram over `data`: what a model that learned
    nothing but where codes occur would make. `on_step(done, total)` follows the counting."""
    world = world or World()
    check_marginals(tokenizer)
    assert tokenizer.vocab is not None
    device = next(tokenizer.parameters()).device
    counts = torch.zeros(0, device=device)
    for start in range(0, len(data), batch):
        stop = min(start + batch, len(data))
        ids = reconstruct(tokenizer, data.get_many(list(range(start, stop)))["pixels"], decode=False)[0].T  # [N, B]
        counts = counts if len(counts) else torch.zeros(len(ids), tokenizer.vocab, device=device)
        counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=counts.dtype))  # whole numbers, exact up to 2^24
        if on_step is not None:
            on_step(stop, len(data))
    logits = counts.double().log().float()
    rows = plan.rows(world.rank, world.size)
    for start in range(0, len(rows), batch):
        part = slice(start, start + batch)
        seeds = rows.seed[part].to(device)
        position = torch.arange(len(logits), device=device).expand(len(seeds), -1)
        gumbel = Noise(seeds).gumbel(position, logits.shape[1], Stream.TOKEN)
        with torch.no_grad():
            yield tokenizer.decode((logits + gumbel).argmax(-1))[:, 0], rows.index[part]


def check_marginals(tokenizer: Tokenizer) -> None:
    """Refuses a tokenizer whose tokens cannot be counted."""
    if tokenizer.vocab is None:
        raise UserError("row marginals counts codes, and this checkpoint's tokens are vectors; leave the row out")


@torch.no_grad()
def reconstruct(tokenizer: Tokenizer, pixels: Tensor, decode: bool = True) -> tuple[Tensor, Tensor]:
    """uint8 pixels [B, T, 3, H, W] -> (tokens, pixels in [-1, 1]) through the tokenizer.

    Raises:
        UserError: a pixel is not finite.
    """
    device = next(tokenizer.parameters()).device
    tokens = tokenizer.encode(pixels.to(device).float() / 127.5 - 1)
    if not decode:
        return tokens, pixels
    decoded = tokenizer.decode(tokens)
    require_finite(decoded, what="pixels of the tokenizer's round trip")
    return tokens, decoded


def choose(data: Data, plan: SamplePlan) -> list[int]:
    """Indices (n of them) into `data` whose labels are the plan's (each image once), in the order of the source.

    Raises:
        UserError: a class with too few images for the plan; it names the n that all classes allow.
    """
    labels, wanted = labels_of(data), plan.rows().label
    have, need = (torch.bincount(x, minlength=plan.classes)[: plan.classes] for x in (labels, wanted))
    if (have < need).any():
        share = have / need.clamp(min=1)
        fewest = int((share if plan.mode == "source" else have).argmin())
        most = int(share[fewest] * plan.n) if plan.mode == "source" else int(have[fewest]) * plan.classes
        raise UserError(
            f"class {data.classes[fewest]} of the {data.split} split has {int(have[fewest])} images, fewer than the "
            f"{int(need[fewest])} of {'it' if plan.mode == 'source' else 'each class'} that --n {plan.n} needs; "
            + (f"lower --n to {most} or less" if most else "give it images, or leave it out")
        )
    return matched(labels, wanted).tolist()


def labels_of(data: Data) -> Tensor:
    """The labels [n] of all samples."""
    labels = getattr(data, "labels", None)
    return labels if labels is not None else torch.cat([data.get_many([i])["label"] for i in range(len(data))])


def matched(labels: Tensor, wanted: Tensor) -> Tensor:
    """Places [n] in `labels` where the labels are `wanted` [n]: the first ones of each class, each once."""
    out = torch.empty_like(wanted)
    for c in wanted.unique():
        need = wanted == c
        out[need] = (labels == c).nonzero().flatten()[: int(need.sum())]
    return out


# --------------------------------------------------------------------------------------------------- the scoring


def protocol_of(extractor: FeatureExtractor, ref: Reference, data: Data, plan: SamplePlan, groups: int) -> EvalProtocol:
    """The protocol of a run of `score`."""
    padded = kind_of(data.config) == "fashion_mnist"
    return EvalProtocol.of(
        extractor,
        reference=ref.name,
        reference_hash=ref.hash,
        reference_n=ref.n,
        size=data.image_size[0],
        crop="none" if padded else "adm",
        pad="zero-2" if padded else "none",
        n=plan.n,
        labels=plan.mode,
        groups=groups,
    )


def check_size(
    plan: SamplePlan, ref_n: int, extractor: Any, groups: int, allow_small: bool, what: str = "images"
) -> None:
    """Refuse an N that is too small for the jackknife's groups or for the extractor's width, before any work.

    Args:
        what: what is scored, images or clips.

    Raises:
        UserError: naming N, the groups and the width where they do not fit, and all remedies at once.
    """
    if ref_n == 1:
        raise UserError(
            "the reference has one sample, its covariance needs 2; raise data.held_out_fraction or --reference-n"
        )
    faults = []
    try:
        for n, named in ((plan.n, what), (ref_n, f"reference {what}")):
            require_enough(n, extractor.dims["pool"], extractor.id, allow_small, named)
    except UserError as error:
        faults.append(str(error))
    rest = plan.n - -(-plan.n // groups)
    if groups > plan.n:
        faults.append(f"groups {groups} exceeds the {plan.n} {what}; pass --groups {plan.n} or less")
    elif groups > 1 and rest < 2:
        faults.append(
            f"leaving out one of {groups} groups of {plan.n} {what} leaves {rest}, a covariance needs 2; raise --n, or "
            "pass --groups 1 for no error"
        )
    if faults:
        raise UserError("; and ".join(faults))


def collect(
    rows: Rows,
    n: int,
    extractor: FeatureExtractor,
    world: World | None = None,
    on_step: Callable[[int, int], None] | None = None,
) -> tuple[Tensor, ImageAudit]:
    """Features [n, D] float32 of n images, in the order of their indices, and the audit of the images."""
    world = world or World()
    bank, audit, done = FeatureBank(extractor.dims["pool"], n), ImageAudit(n), 0
    for pixels, index in rows:
        bank.update(extractor(audit.update(pixels, index))["pool"], index)
        done += len(index)
        if on_step is not None:
            on_step(min(done * world.size, n), n)
    bank.reduce(world.sum)
    audit.reduce(world.sum)
    return bank.all(), audit


def score(
    rows: Rows,
    ref: Reference,
    extractor: FeatureExtractor,
    protocol: EvalProtocol,
    world: World | None = None,
    allow_small: bool = False,
    on_step: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Score], dict[str, float]]:
    """Fréchet distance and KID of the rows against the reference, and the checks on their images.

    Moments live on the extractor's device where that has float64.
    """
    world = world or World()
    ref.stats.require_spread(f"reference {ref.name}")
    device = extractor.device if extractor.device.type == "cuda" else torch.device("cpu")
    width, n = extractor.dims["pool"], protocol.n
    moments = Moments(width, n, protocol.groups, ref.stats.mean, device)
    bank, audit = FeatureBank(width, n), ImageAudit(n)
    done = 0
    for pixels, index in rows:
        features = extractor(audit.update(pixels, index))["pool"]
        moments.update(features, index)
        bank.update(features, index)
        done += len(index)
        if on_step is not None:
            on_step(done * world.size, n)
    for part in (moments, bank, audit):
        part.reduce(world.sum)
    fd = frechet_distance(
        moments, ref.stats.to(device), extractor=extractor.id, allow_small=allow_small, with_error=protocol.groups > 1
    )
    scores = {"fd": fd}
    if min(n, ref.n) >= 4:
        scores["kid"] = kid(bank.all(), ref.features)
    return scores, audit.checks()


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The `model` block of a report on a tokenizer."""
    return {
        "params": sum(p.numel() for p in tokenizer.parameters()),
        "grid": list(tokenizer.grid),
        "vocab": tokenizer.vocab,
        "image_size": list(tokenizer.image_size),
    }
