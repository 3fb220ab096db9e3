"""How fast an engine decodes, against what its memory allows, or its arithmetic.

The floor of a decode is the time in which the device copies the bytes that every step must read once: all weights, and
the live part of the cache. Its bandwidth is measured in the same process, by a large device-to-device copy. A student
reads its weights once for all tokens, so bytes are no floor; it is held against the rate of a matrix product, measured
in the same process too.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from visgen import config as configs
from visgen.decode.engine import Generation
from visgen.decode.guidance import Guidance
from visgen.decode.noise import Noise
from visgen.decode.refill import refill, refillable
from visgen.decode.warp import Warp
from visgen.metrics.timing import Stopwatch
from visgen.model import Model
from visgen.sampling import EngineConfig


@dataclass(frozen=True)
class Speed:
    """A batch size measured. Seconds are of one decode, pixels apart; bytes are counted, not read off the device.

    Attributes:
        batch: images decoded at once.
        images: of one decode; more than `batch` of them are taken on by rows as these finish (`decode/refill.py`).
        seconds: median over the repeats; first: the first decode, kernels compiled and graph captured.
        begin: median seconds of what comes before a decode: the encoder of a control's maps, the slots of a prefix.
        nfe: backbone evaluations of all repeats' decodes, their mean; nfe_per_image: until an image is complete, mean.
        images_per_s: of the median; ms_per_step: mean.
        floor: seconds at the bandwidth of a copy, for the steps of plain autoregression, batch by batch, or of vectors
            for the weights that the decode reads; fraction: floor / seconds.
        peak_bytes: most that the allocator held during decodes, weights included; None off CUDA.
        over: peak_bytes over weights and cache.
        rate: operations a second of a student's passes (`pass_work`); share: of a matrix product's; None of others.
        notes: what the sampler chose or counted in the last decode.
    """

    batch: int
    images: int
    nfe: float
    nfe_per_image: float
    seconds: float
    first: float
    begin: float
    images_per_s: float
    ms_per_step: float
    floor: float
    fraction: float
    peak_bytes: int | None
    over: float | None
    rate: float | None
    share: float | None
    notes: dict[str, Any]


def bandwidth(device: torch.device, repeats: int = 10) -> float:
    """Bytes a second of a copy, read and written bytes both counted; the best of `repeats`."""
    size = (1 << 30) if device.type == "cuda" else (1 << 27)
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    watch = Stopwatch(device, warmup=1)
    for _ in range(repeats + 1):
        with watch.lap():
            target.copy_(source)
    return 2 * size / min(seconds for seconds, _ in watch.counted)


def matmul_rate(device: torch.device, dtype: torch.dtype, side: int | None = None, repeats: int = 20) -> float:
    """Operations a second of a product of square matrices, the best of `repeats`; a multiplication with its addition
    are two."""
    side = side or (8192 if device.type == "cuda" else 1024)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    watch = Stopwatch(device, warmup=3)
    for _ in range(repeats + 3):
        with watch.lap():
            torch.mm(a, b)
    return 2 * side**3 / min(seconds for seconds, _ in watch.counted)


def products_of(module: nn.Module) -> int:
    """Weights of a module's matrix products."""
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear))


def pass_work(model: Any) -> float:
    """Operations of one pass of a causal transformer over all slots of an image, its head included: products of the
    linear maps, and of queries with the keys that they may see. A multiplication with its addition are two."""
    config, slots = model.config.backbone, model.condition.prefix + model.tokens - model.backbone.shift
    products = products_of(model.backbone) * slots + products_of(model.head) * model.tokens
    return 2 * products + 4 * config.width * config.layers * slots * (slots + 1) / 2


def randomize(model: Model, rng: torch.Generator | None = None) -> None:
    """N(0, 0.02), of vectors N(1, 0.02): a head of zeros would draw from a law that no trained model has."""
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.02, generator=rng)


def peak(device: torch.device) -> int | None:
    """Most bytes that the allocator held since it was last asked to forget; None off CUDA."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def floor_bytes(model: Model, rows: int) -> int:
    """Bytes that decoding N tokens reads at least: all weights once a step, and the keys and values of the slots that
    the step's token may see. A control is read before."""
    read = (p for name, p in model.named_parameters() if not name.startswith(("control.", "condition.control.")))
    weights = sum(p.numel() * p.element_size() for p in read)
    cache = model.backbone.make_cache(1, torch.device("meta"), next(model.parameters()).dtype)
    slot = 2 * cache.keys[:, 0, :, 0].numel() * cache.keys.element_size()  # of one row
    prefix = model.condition.prefix
    seen = sum(prefix + k for k in range(model.tokens))
    return weights * model.tokens + rows * slot * seen


def walked_bytes(model: Model, nfe: float, head_steps: float | None = None) -> float:
    """Bytes that decoding vectors reads at least, by `nfe` evaluations of the backbone and `head_steps` of the head (as
    many, where the head has no steps of its own): their weights. What a walked head makes of its times and of the
    hidden states is read once for all its steps. A cache is left out."""
    whole = ("modulation.", "time.", "condition.")  # of a walked head

    def stepped(name: str) -> bool:
        return name.startswith("head.") and (head_steps is None or not any(part in name for part in whole))

    head, rest = (
        sum(p.numel() * p.element_size() for name, p in model.named_parameters() if stepped(name) == wanted)
        for wanted in (True, False)
    )
    return rest * nfe + head * (nfe if head_steps is None else head_steps)


def cache_bytes(model: Model, rows: int) -> int:
    if not model.backbone.cached:
        return 0
    cache = model.backbone.make_cache(rows, torch.device("meta"), next(model.parameters()).dtype)
    return 2 * cache.keys.numel() * cache.keys.element_size()


@torch.inference_mode()
def measure(
    model: Model,
    engine: EngineConfig,
    sampler: Any,
    guidance: Guidance,
    warp: Warp,
    batch: int,
    copy: float,
    repeats: int = 3,
    kernels: list[str] | None = None,
    batches: int = 1,
    control: bool = True,
    product: float | None = None,
) -> Speed:
    """Decodes `batches` times `batch` images, `repeats` times after a first one.

    Args:
        model: class-conditional, where and in the precision that it shall run.
        copy: bytes a second, of `bandwidth`.
        kernels: gets a table of the kernels of one more decode.
        control: decode a model that has a control under a map.
        product: operations a second, of `matmul_rate`; asked for by samplers that read the whole sequence at once.
    """
    device = model.parameter_device()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    made = engine.make(model, guidance, warp)
    built = configs.build(sampler)
    images = batch * (batches if refillable(model, built) and model.controls is None else 1)
    asked, watch = _asked(model, images, batch, control), Stopwatch(device)

    def decode(first_seed: int) -> Generation:
        noise = Noise(torch.arange(first_seed, first_seed + images, device=device))
        if images > batch:
            return refill(made, built, asked, noise, batch)
        with watch.lap():
            made.begin(asked)
        return made.run(built, noise)

    first = decode(0).seconds
    laps = [decode((i + 1) * images) for i in range(repeats)]
    begin = statistics.median([seconds for seconds, _ in watch.laps[1:]] or [0.0])
    most = peak(device)
    if kernels is not None:
        kernels.append(_kernels(lambda: decode(0), device))
    return _summed(model, laps, first, begin, most, batch, guidance.branches, copy, product)


def _asked(model: Model, images: int, batch: int, control: bool) -> dict[str, Tensor]:
    """Labels that go round the classes, and maps for a model that has a control, if it is wanted."""
    device = model.parameter_device()
    asked = {"label": torch.arange(images, device=device) % model.config.condition.classes}
    if model.controls is not None and control:
        frames, height, width = model.grid
        asked["map"] = torch.rand(batch, frames, 3, 16 * height, 16 * width, device=device) * 2 - 1
    return asked


def _summed(
    model: Model,
    laps: list[Generation],
    first: float,
    begin: float,
    most: int | None,
    batch: int,
    branches: int,
    copy: float,
    product: float | None,
) -> Speed:
    """What the decodes `laps` say, beside the floor at a bandwidth of `copy`, and the rate of a `product`."""
    images, rows = len(laps[0].tokens), batch * branches
    seconds, nfe = statistics.median(lap.seconds for lap in laps), statistics.mean(lap.nfe for lap in laps)
    read = walked_bytes(model, nfe, laps[-1].notes.get("head_steps")) if model.continuous else floor_bytes(model, rows)
    floor = read / copy * images / batch
    rate = None
    if product is not None and not laps[-1].notes.get("teacher_evaluations"):
        rate = pass_work(model) * nfe * images / seconds
    held = sum(p.numel() * p.element_size() for p in model.parameters()) + cache_bytes(model, rows)
    return Speed(
        batch=batch,
        images=images,
        nfe=nfe,
        nfe_per_image=statistics.mean(lap.nfe_per_image.float().mean().item() for lap in laps),
        seconds=seconds,
        first=first,
        begin=begin,
        images_per_s=images / seconds,
        ms_per_step=1e3 * sum(lap.seconds for lap in laps) / (nfe * len(laps)),
        floor=floor,
        fraction=floor / seconds,
        peak_bytes=most,
        over=None if most is None else most / held - 1,
        rate=rate,
        share=None if rate is None or product is None else rate / product,
        notes=laps[-1].notes,
    )


def table(rows: list[Speed]) -> str:
    """Markdown."""
    out = [
        "| batch | images | s | images/s | ms/step | NFE | an image | floor s | fraction | TFLOP/s | of a product | "
        "peak MiB | over | first s | begin s |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        peak, over = ("", "") if r.peak_bytes is None else (f"{r.peak_bytes / 2**20:.0f}", f"{r.over:.1%}")
        rate, share = ("", "") if r.rate is None else (f"{r.rate / 1e12:.4g}", f"{r.share:.1%}")
        out.append(
            f"| {r.batch} | {r.images} | {r.seconds:.4f} | {r.images_per_s:.1f} | {r.ms_per_step:.3f} | {r.nfe:g} | "
            f"{r.nfe_per_image:.1f} | {r.floor:.4f} | "
            f"{r.fraction:.1%} | {rate} | {share} | {peak} | {over} | {r.first:.1f} | {r.begin:.4f} |"
        )
    return "\n".join(out)


def _kernels(work: Callable[[], Any], device: torch.device) -> str:
    on = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        on.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=on) as found:
        work()
    by = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return found.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=60)
