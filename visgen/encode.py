"""Pixels -> cached codes, or latents of a continuous tokenizer.

    python -m visgen.encode --tokenizer DIR --out DIR --data.kind fashion_mnist --views flip --split train

Encodes the unaugmented views of every image once, in float32 without TF32, so that `next_token` training reads tokens
(`--data.kind codes --data.root DIR`). It can be killed at any time: shards are written whole, and the same command goes
on after the last one. Under `accelerate launch` the processes share the shards out. The finished cache is decoded back
in places and refused if it does not look like its source.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from visgen.checks import Natural, Positive, Range
from visgen.config import UserError, build, load, plugin, run_program
from visgen.data import Data, Split, Views
from visgen.data import codes as cache
from visgen.data.codes import Codes
from visgen.files import from_home
from visgen.launch import Progress, cpus, on_cpu, reader
from visgen.metrics.features import exact_float32
from visgen.tokenizers import Tokenizer

CLOSE = 0.02  # by which a latent may differ from the stored one, which is rounded to float16


@dataclass(frozen=True)
class Config:
    tokenizer: Path | None = None
    """Run directory or file of a trained tokenizer."""
    out: Path = Path("data_cache/codes")
    """Folder of the cache; the split becomes a sub-folder."""
    data: Any = plugin("visgen.data", "fashion_mnist")
    split: Split = "train"
    views: Views = "flip"
    """center: 1 view. flip: the image and its mirror. shift: nine of each, moved by a pixel. ten_crop: LlamaGen's ten
    crops per crop range."""
    crop_ranges: tuple[float, ...] = (1.1,)
    """ten_crop: side of the cropped square over the image size; LlamaGen's results use 1.1 and 1.05."""
    batch: Positive = 256
    """Views encoded at once."""
    shard: Positive = 8192
    """Images per file."""
    workers: Natural = 0
    """Processes that read images; 0 is fastest for data in memory, else about the number of CPU cores."""
    cpu: bool = False
    """Do not use a GPU."""
    preflight_db: Annotated[float, Range(-1000)] = 1.0
    """By how many dB decoded codes must be nearer to their own images than to others; see `preflight`."""


def main(argv: Sequence[str]) -> None:
    from visgen.checkpoint import load_tokenizer, tokenizer_hash

    config = load(Config, argv, prog="python -m visgen.encode")
    if config.tokenizer is None:
        raise UserError("tokenizer is not set; pass --tokenizer with the run directory or file of a trained tokenizer")
    state = PartialState(cpu=on_cpu(config.cpu))
    data = build(config.data, config.split)
    tokenizer = load_tokenizer(config.tokenizer).to(state.device)

    def accept(codes: Codes) -> None:
        seen = preflight(tokenizer, codes, margin_db=config.preflight_db)
        skipped = f", {data.skipped} unreadable images replaced" if data.skipped else ""
        views = f"{len(codes)} images x {codes.view_count} views x {int(np.prod(codes.grid))} codes"
        print(f"{codes.folder}: {views}{skipped}")
        print(f"preflight: {seen.matched:.2f} dB to its own images, {seen.shuffled:.2f} dB to others")

    encode(
        tokenizer,
        data,
        config.out,
        tokenizer_hash(tokenizer),
        views=config.views,
        ranges=config.crop_ranges,
        batch=config.batch,
        shard=config.shard,
        workers=config.workers,
        state=state,
        accept=accept,
    )


def encode(
    tokenizer: Tokenizer,
    data: Data,
    out: Path,
    tokenizer_hash: str,
    *,
    views: Views = "flip",
    ranges: Sequence[float] = (1.1,),
    batch: int = 256,
    shard: int = 8192,
    workers: int = 0,
    state: PartialState | None = None,
    accept: Callable[[Codes], None] = lambda codes: None,
) -> Path:
    """Write, or complete, the cache of `data` in `out/<split>` and return that folder.

    Runs where the tokenizer's parameters lie. `state` shares the shards out over its processes.

    Args:
        accept: looks at the whole cache on the main process. Where it raises, the cache stays incomplete, so nothing
            is trained on it.

    Raises:
        UserError: tokenizer and data do not fit, or the folder holds a cache with other settings.
    """
    _check(tokenizer, data, views, ranges, batch, shard)
    wanted = cache.make_index(
        data,
        tokenizer=tokenizer_hash,
        grid=[data.frames * tokenizer.grid[0], *tokenizer.grid[1:]],
        vocab=tokenizer.vocab or 0,
        channels=0 if tokenizer.vocab else tokenizer.channels,
        views=views,
        ranges=list(ranges) if views == "ten_crop" else [],
        shard_images=shard,
        beside={name: list(shape) for name, shape in data.beside.items()},
    )
    folder = from_home(out) / data.split
    index = _agreed(folder, wanted)
    missing = [i for i in range(index.shard_count) if cache.shard_record(folder, index, i) is None]
    first = state is None or state.is_main_process
    wait = (lambda: None) if state is None else state.wait_for_everyone
    wait()  # every process has compared its settings before the index is written
    if first and (missing or not index.complete):
        _prepare(folder, index)
    wait()
    mine = missing if state is None else missing[state.process_index :: state.num_processes]
    _encode_shards(tokenizer, data, folder, index, mine, batch, workers, show=first)
    wait()
    if first:
        _finish(folder, index, accept)
    wait()
    return folder


@dataclass(frozen=True)
class Preflight:
    """What `preflight` measured: mean PSNR in dB of decoded codes to their own and to the others' source images, and
    the share of codes (of latents: to within `CLOSE`) that encoding the source again gives."""

    matched: float
    shuffled: float
    agreement: float


@torch.inference_mode()
def preflight(tokenizer: Tokenizer, codes: Codes, n: int = 8, margin_db: float = 1.0) -> Preflight:
    """Decodes codes of `n` images spread over the cache and compares them with the source's images.

    The decoded images must be `margin_db` nearer to their own source than to the others', which shuffled or foreign
    codes are not, and half of each image's codes must come out again when its source is encoded. One image alone is
    compared by its codes only. Runs where the tokenizer's parameters lie; the source must still be readable.

    Raises:
        UserError: the cache does not look like its source, or a code lies outside the vocabulary.
    """
    chosen = np.unique(np.linspace(0, len(codes) - 1, n).round().astype(int)).tolist()
    view = [k % codes.view_count for k in range(len(chosen))]
    kept = np.stack([codes.tokens(i)[v] for i, v in zip(chosen, view, strict=True)])
    ids = torch.from_numpy(kept.astype(np.float32 if tokenizer.vocab is None else np.int64))
    _check_range(ids, tokenizer.vocab, str(codes.folder))
    source = codes.source()
    if len(source) != len(codes):
        raise UserError(f"code cache {codes.folder} has {len(codes)} images but its source {len(source)}; encode again")
    pixels = source.views(chosen, codes.index.views, codes.index.ranges)["pixels"]
    device = _device(tokenizer.eval())
    with exact_float32():
        ids = ids.to(device)
        own = _to_float(pixels[torch.arange(len(chosen)), view].to(device))  # [n, T, 3, H, W]
        again = tokenizer.encode(own)
        same = again == ids if tokenizer.vocab else (again - ids).abs() <= CLOSE * (1 + ids.abs())
        agreement = same.flatten(1).float().mean(1)  # [n]
        decoded = tokenizer.decode(ids)
    error = (decoded[:, None] - own[None]).square().flatten(2).mean(2)  # [n, n]: decoded i against source j
    psnr = 10 * torch.log10(4 / error.clamp_min(1e-10))  # the range is 2 wide
    others = ~torch.eye(len(chosen), dtype=torch.bool, device=device)
    matched = psnr.diagonal().mean().item()
    shuffled = psnr[others].mean().item() if len(chosen) > 1 else float("-inf")
    seen = Preflight(matched, shuffled, agreement.mean().item())
    worst = int(agreement.argmin())
    if agreement[worst] < 0.5:
        raise UserError(
            f"code cache {codes.folder} does not match its source: encoding image {chosen[worst]} gives "
            f"{agreement[worst]:.0%} of its codes; delete the cache and encode again"
        )
    if matched - shuffled < margin_db:
        raise UserError(
            f"code cache {codes.folder} does not look like its source: {matched:.1f} dB to its own images, "
            f"{shuffled:.1f} dB to others; train the tokenizer further and encode again (or lower preflight_db)"
        )
    return seen


# ---------------------------------------------------------------------------------------------------- steps


def _check(tokenizer: Tokenizer, data: Data, views: Views, ranges: Sequence[float], batch: int, shard: int) -> None:
    if tuple(tokenizer.image_size) != tuple(data.image_size):
        want, have = ("x".join(map(str, size)) for size in (tokenizer.image_size, data.image_size))
        raise UserError(
            f"the tokenizer was made for {want} px but the data has {have} px; change the data's image size"
        )
    if any(p.is_floating_point() and p.dtype != torch.float32 for p in tokenizer.parameters()):
        raise UserError("the tokenizer's weights are not float32; codes are made in float32, call tokenizer.float()")
    if views != "ten_crop" and tuple(ranges) != Config.crop_ranges:
        raise UserError(f"crop_ranges {tuple(ranges)} belongs to --views ten_crop, not {views}; leave one of them out")
    if views == "ten_crop" and (not ranges or not all(1 <= r <= 100 for r in ranges)):
        raise UserError(f"crop_ranges {tuple(ranges)} must be one or more numbers from 1 to 100, such as 1.1 1.05")
    if batch < 1 or shard < 1:
        raise UserError(f"batch {batch} and shard {shard} must be at least 1")


def _agreed(folder: Path, wanted: cache.Index) -> cache.Index:
    """The index in `folder` if it has the wanted settings, the wanted one if there is none."""
    if not (folder / "index.json").is_file():
        return wanted
    found = cache.read_index(folder)
    for field in dataclasses.fields(cache.Index)[:-2]:
        old, new = getattr(found, field.name), getattr(wanted, field.name)
        name = field.name
        if isinstance(old, dict):
            key = next((k for k in {**old, **new} if old.get(k) != new.get(k)), None)
            if key is not None:
                name, old, new = f"data.{key}", old.get(key), new.get(key)
        if old != new:
            raise UserError(
                f"code cache {folder} was written with {name} {_brief(old)}, now it is {_brief(new)}; "
                "delete the folder or choose another --out"
            )
    return found


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _prepare(folder: Path, index: cache.Index) -> None:
    """Marks the cache as incomplete; what was complete before keeps its records one by one."""
    try:
        for number in range(len(index.shards)):
            record = cache.shard_record(folder, index, number)
            if record is not None:
                cache.write_record(folder, number, record)
        index.complete, index.shards = False, []
        cache.write_index(folder, index)
    except OSError as error:
        raise UserError(f"out {folder} cannot be written ({error.strerror}); choose another --out") from None


def _finish(folder: Path, index: cache.Index, accept: Callable[[Codes], None]) -> None:
    """Mark the cache as complete, once `accept` has looked at it; without it the cache is incomplete."""
    records = [cache.read_record(folder, index, i) for i in range(index.shard_count)]
    if None in records:
        raise UserError(f"code cache {folder}: shard {records.index(None)} is missing; run the same command again")
    index.shards = [r for r in records if r is not None]
    try:
        accept(Codes(cache.Config(folder.parent), index.split, index))
    except UserError:
        _prepare(folder, index)
        raise
    if index.complete:
        return
    index.complete = True
    cache.write_index(folder, index)
    for number in range(index.shard_count):
        cache.shard_path(folder, number, "done").unlink(missing_ok=True)


class _Jobs(Dataset):
    """Item k is the views of one batch of images."""

    def __init__(self, data: Data, index: cache.Index, jobs: Sequence[range]) -> None:
        self.data, self.index, self.jobs = data, index, jobs

    def __len__(self) -> int:
        return len(self.jobs)

    def __getitem__(self, k: int) -> dict[str, Tensor]:
        return self.data.views(self.jobs[k], self.index.views, self.index.ranges)


@torch.inference_mode()
def _encode_shards(
    tokenizer: Tokenizer,
    data: Data,
    folder: Path,
    index: cache.Index,
    shards: Sequence[int],
    batch: int,
    workers: int,
    show: bool,
) -> None:
    step = max(1, batch // index.view_count)
    jobs, ends = [], {}
    for number in shards:
        images = index.shard(number)
        jobs += [images[k : k + step] for k in range(0, len(images), step)]
        ends[len(jobs) - 1] = number  # the job that completes this shard
    device = _device(tokenizer.eval())
    source = _Jobs(data, index, jobs)
    pin, readers = device.type == "cuda", min(workers, cpus())
    loader = DataLoader(source, batch_size=None, num_workers=readers, pin_memory=pin, worker_init_fn=reader)
    codes: list[Tensor] = []
    labels: list[Tensor] = []
    beside: dict[str, list[Tensor]] = {name: [] for name in index.beside}
    done, total = 0, sum(map(len, jobs))
    with Progress("encode", show and total > 0) as shown, exact_float32():
        for k, views in enumerate(loader):
            pixels = views["pixels"]  # [B, V, T, 3, H, W] uint8
            ids = tokenizer.encode(_to_float(pixels.to(device, non_blocking=True).flatten(0, 1)))
            codes.append(ids.unflatten(0, pixels.shape[:2]))
            labels.append(views["label"])
            for name, parts in beside.items():
                parts.append(views[name])
            done += len(pixels)
            shown(done, total)
            if k in ends:
                stacked = torch.cat(codes).cpu()  # one host read per shard
                _check_range(stacked.half() if index.channels else stacked, tokenizer.vocab, "the tokenizer")
                more = {name: torch.cat(parts).numpy() for name, parts in beside.items()}
                cache.write_shard(folder, index, ends[k], stacked.numpy(), torch.cat(labels).numpy(), **more)
                codes, labels, beside = [], [], {name: [] for name in beside}


def _check_range(ids: Tensor, vocab: int | None, where: str) -> None:
    if vocab is None:
        if not torch.isfinite(ids).all():
            raise UserError(f"{where}: latents that are not finite in float16; is it the right tokenizer?")
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        raise UserError(
            f"{where}: codes {low}..{high} lie outside the vocabulary of {vocab}; is it the right tokenizer?"
        )


def _to_float(pixels: Tensor) -> Tensor:
    return pixels.float() / 127.5 - 1


def _device(module: torch.nn.Module) -> torch.device:
    return next((p.device for p in module.parameters()), torch.device("cpu"))


if __name__ == "__main__":
    run_program(lambda: main(sys.argv[1:]))
