"""Evaluation at scale: a plan of images in chunks, resumable, the same at every number of processes; no image on disk.

A chunk is drawn in the same batches whoever draws it, so its images do not depend on the number of processes, on what
was done before an interruption or on the order of the work. Its features go to disk (`metrics/chunks.py`), and the sums
of all processes meet in one reduction.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.config import UserError
from visgen.evaluate import World
from visgen.generate import Generator, at_a_time
from visgen.metrics.chunks import ChunkStore
from visgen.metrics.features import FeatureExtractor
from visgen.metrics.image_files import write_npz
from visgen.metrics.images import ImageAudit, require_finite
from visgen.metrics.protocol import SamplePlan
from visgen.run_files import WEIGHTS, find_step
from visgen.sampling import SamplingConfig

Drawn = Iterator[tuple[Tensor, Tensor, Tensor]]  # pixels uint8 [B, 3, H, W], index [B], NFE of each image [B]
CHUNK = 512  # images of a chunk, unless told


@dataclass
class Work:
    """What fills a plan, and how.

    Attributes:
        draw: the images of a range of indices, in batches.
        extractor: what looks at them.
        n: images in all.
        shown: how many images, the first ones, keep their pixels.
    """

    draw: Callable[[range], Drawn]
    extractor: FeatureExtractor
    n: int
    shown: int = 0


def drawn(
    generator: Generator, plan: SamplePlan, settings: SamplingConfig, part: range, labels: Tensor | None = None
) -> Drawn:
    """Images of the plan's indices `part`; with `labels`, what the plan balances are these."""
    rows = plan.take(part)
    rows = rows if labels is None else replace(rows, label=labels[rows.label])
    size = at_a_time(generator, settings)
    for start in range(0, len(rows), size):
        some = slice(start, start + size)
        images = generator.sample(
            rows.label[some].tolist(), rows.seed[some].tolist(), settings.guidance, settings.warp, settings.sampler
        )
        yield images.pixels, rows.index[some], torch.tensor(images.nfe_per_image)


def identity_of(
    generator: Generator, settings: SamplingConfig, plan: SamplePlan, labels: Tensor, extractor: FeatureExtractor
) -> dict[str, str]:
    """Return what the chunks of generated images depend on, by name.

    It holds the weights themselves, not their path, and the batch, since bf16 kernels may differ with it.

    Args:
        labels: the checkpoint's label of each number that the plan balances.
    """
    given = {k: v for k, v in configs.dump(settings).items() if k in ("sampler", "guidance", "warp", "engine")}
    given["engine"] |= {"precision": str(generator.dtype), "kind": generator.engine_kind, "device": ""}
    helpers = [value for value in vars(settings.sampler).values() if isinstance(value, Path)]  # a draft, a teacher
    return {
        "checkpoint": digest(generator.model, generator.tokenizer),
        "helpers": " ".join(file_digest(path) for path in helpers),
        "sampling": json.dumps(given, sort_keys=True),
        "plan": plan.hash,
        "labels": hashlib.sha256(repr(labels.tolist()).encode()).hexdigest()[:16],
        "extractor": extractor.fingerprint,
    }


def digest(*modules: nn.Module) -> str:
    """Return 16 hex digits of the SHA-256 of all that modules compute with: their configs and every tensor."""
    found = hashlib.sha256()
    for module in modules:
        found.update(repr(module.config).encode())
        for name, value in sorted(module.state_dict().items()):
            value = value.detach().cpu().contiguous().reshape(-1)
            found.update(f"{name} {value.dtype} {len(value)}".encode())
            found.update(value.view(torch.uint8).numpy())
    return found.hexdigest()[:16]


def file_digest(checkpoint: Path) -> str:
    """Return 16 hex digits of the SHA-256 of a checkpoint's weight file."""
    with open(checkpoint if checkpoint.is_file() else find_step(checkpoint) / WEIGHTS, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def fill(
    work: Work, store: ChunkStore, world: World, on_step: Callable[[int, int], None] | None = None
) -> Iterator[tuple[range, dict[str, Tensor]]]:
    """This process's chunks, in order: (indices, tensors). The missing ones are made and kept.

    The tensors: the extractor's outputs `feature.NAME` [c, D] float32, `keys` [c] and `counts` [3] of the audit, `nfe`
    [c], and `pixels` of the images shown.
    """
    ready, missing = store.shares(world.rank, world.size, world.sum)
    done = 0
    for i in sorted([*ready, *missing]):
        part = store.part(i)
        if i not in ready:
            store.save(i, make_chunk(work, part))
        yield part, store.load(i)
        done += len(part)
        if on_step is not None:
            on_step(min(done * world.size, work.n), work.n)


def make_chunk(work: Work, part: range) -> dict[str, Tensor]:
    """The tensors of the images `part`."""
    audit, kept, pixels = ImageAudit(len(part)), {}, []
    filled: dict[str, Tensor] = {f"feature.{k}": torch.empty(len(part), d) for k, d in work.extractor.dims.items()}
    nfe = torch.zeros(len(part), dtype=torch.int64)
    for images, index, evaluations in work.draw(part):
        place = index - part.start
        scored = audit.update(images, place)
        for name, value in work.extractor(scored).items():
            filled[f"feature.{name}"][place] = value.cpu()
        nfe[place] = evaluations.to(nfe)
        pixels.append(scored[index < work.shown].cpu())
    audit.require_complete()
    for name, value in filled.items():
        require_finite(value, torch.tensor(part), name.removeprefix("feature."))
    kept = {"keys": audit.keys, "counts": audit.counts, "nfe": nfe}
    shown = torch.cat(pixels)
    return {**filled, **kept, **({"pixels": shown} if len(shown) else {})}


class Whole:
    """The audit, NFE and shown pixels of all chunks, over all processes."""

    def __init__(self, n: int, shown: int = 0, size: tuple[int, int] = (1, 1)) -> None:
        self.audit, self.nfe = ImageAudit(n), torch.zeros(n, dtype=torch.int64)
        self.pixels = torch.zeros(min(shown, n), 3, *size, dtype=torch.uint8)

    def add(self, part: range, chunk: Mapping[str, Tensor]) -> None:
        places = slice(part.start, part.stop)
        self.audit.seen[places] += 1
        self.audit.keys[places] = chunk["keys"]
        self.audit.counts += chunk["counts"]
        self.nfe[places] = chunk["nfe"]
        if part.start < len(self.pixels):
            self.pixels[places] = chunk["pixels"][: len(self.pixels) - part.start]

    def reduce(self, world: World) -> None:
        self.audit.reduce(world.sum)
        self.nfe, self.pixels = world.sum(self.nfe), world.sum(self.pixels)


def outputs(chunk: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The extractor's outputs of a chunk, by name."""
    return {name.removeprefix("feature."): x for name, x in chunk.items() if name.startswith("feature.")}


def export_npz(store: ChunkStore, path: Path, size: tuple[int, int]) -> None:
    """Write the pixels of all chunks, in the plan's order, as the .npz of the ADM suite; one chunk in memory.

    Raises:
        UserError: a chunk without all of its pixels.
    """

    def chunks() -> Iterator[Tensor]:
        for i in range(len(store)):
            pixels = store.load(i).get("pixels")
            if pixels is None or len(pixels) != len(store.part(i)):
                raise UserError(f"{store.folder}: chunk {i} was made without pixels; delete {store.folder}")
            yield pixels

    write_npz(path, store.n, size, chunks())
