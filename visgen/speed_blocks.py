"""How fast blockwise diffusion decodes and trains, against the rate of a matrix product in the same process.

Work is counted as what the method needs (ACDiT, arXiv 2412.07720, section 3): products of the linear maps, and of
queries with the keys that they may see; the embedding of times is left out. What an implementation does besides
(masked keys, a clean pass that is run for every guidance branch) makes it slower, not busier. A multiplication with its
addition are two operations.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from visgen import config as configs
from visgen.checks import UserError
from visgen.decode.engine import Engine, Generation
from visgen.decode.noise import Noise
from visgen.metrics.timing import Stopwatch
from visgen.model import Model
from visgen.nn.blocks import compile_blocks
from visgen.nn.blockwise import Attend, BlockCache, Kernel
from visgen.speed import peak, randomize


@dataclass(frozen=True)
class Decode:
    """A way to decode a batch, measured; seconds of one decode, pixels apart.

    Attributes:
        batch, frames: images, or clips and the frames of each.
        way: captured (with a cache), cached (eagerly) or uncached.
        seconds: median over the repeats; first: the first decode, kernels compiled and graph captured.
        images_per_s: or clips.
        nfe: evaluations of the backbone.
        flops: that a decode needs; rate: a second; fraction: of the matrix product's rate.
        peak_bytes: most that the allocator held, weights included; None off CUDA.
    """

    batch: int
    frames: int
    way: str
    seconds: float
    first: float
    images_per_s: float
    nfe: int
    flops: float
    rate: float
    fraction: float
    peak_bytes: int | None


@dataclass(frozen=True)
class Step:
    """A training step, measured: forward, backward and AdamW. As `Decode` otherwise.

    Attributes:
        way: how attention is computed, flex or dense.
        loss: of the first step; the same batch and weights whatever the way.
    """

    batch: int
    way: str
    seconds: float
    first: float
    images_per_s: float
    flops: float
    rate: float
    fraction: float
    loss: float
    peak_bytes: int | None


# ------------------------------------------------------------------------------------------------ operations


def work(model: Model, clean: int, noised: int, vectors: int, pairs: int) -> int:
    """Operations of a pass over `clean` and `noised` tokens that `vectors` conditions modulate, with `pairs` of a query
    and a key that it may see."""
    config, channels = model.config.backbone, model.config.channels or 0
    width, hidden = config.width, int(config.width * config.mlp)
    token = config.layers * 2 * (4 * width * width + 2 * width * hidden) + 2 * channels * width
    vector = (config.layers * 12 + 4) * width * width
    return (
        (clean + noised) * token + noised * 2 * width * channels + vectors * vector + config.layers * 4 * width * pairs
    )


def decode_work(
    model: Model, images: int, branches: int, blocks: int, steps: int, context: int | None = None, cached: bool = True
) -> int:
    """Operations that decoding `blocks` blocks by `steps` evaluations each needs.

    With a cache every block but the last goes through once more, clean, once for all branches. Without, each
    evaluation computes the clean blocks before its own again, once for all branches.
    """
    size, total = model.backbone.layout.block, 0
    for block in range(blocks):
        seen = block if context is None else min(block, context)
        own = branches * (seen + 1) * size * size
        if cached:
            total += steps * work(model, 0, branches * size, branches, own)
            if block < blocks - 1:
                total += work(model, size, 0, 0, (seen + 1) * size * size)
        else:
            again = block * (block + 1) // 2 * size * size
            total += steps * work(model, block * size, branches * size, branches, own + again)
    return images * total


def training_work(model: Model, images: int) -> int:
    """Operations of a training step: the forward pass, and twice as many for the backward one."""
    layout = model.backbone.layout
    size, count = layout.block, layout.tokens // layout.block
    pairs = (count * (count - 1) // 2 + count * (count + 1) // 2) * size * size
    return 3 * images * work(model, (count - 1) * size, count * size, count, pairs)


# -------------------------------------------------------------------------------------------- without a cache


class NoCache(BlockCache):
    """Attention of [clean blocks | the same noised block of every branch], all in one window: nothing is kept.

    Block after block, so that no product is computed to be masked.
    """

    def __init__(self, layers: int, block: int, branches: int) -> None:
        self.layers, self.block, self.branches = layers, block, branches

    def window(self, pos: Tensor) -> list[Attend]:
        size, before = self.block, pos.shape[1] // self.block - self.branches

        def attend(q: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return torch.cat(
                [
                    F.scaled_dot_product_attention(own, seen(key, i), seen(value, i))
                    for i, own in enumerate(q.split(size, 2))  # [B, H, W, d]
                ],
                2,
            )

        def seen(x: Tensor, i: int) -> Tensor:
            """Those of the keys or values [B, H, S, d] that block i of the window sees."""
            if i <= before:
                return x[:, :, : (i + 1) * size]
            return torch.cat([x[:, :, : before * size], x[:, :, i * size : (i + 1) * size]], 2)

        return [attend] * self.layers


class Uncached(Engine):
    """Decodes as `Engine` does, but every evaluation computes the clean blocks again. Nothing else is worse than with a
    cache: clean blocks are computed once for all branches, and none is committed."""

    @torch.inference_mode()
    def begin(self, batch: dict[str, Any], known: tuple[Tensor, Tensor] | None = None) -> None:
        super().begin(batch, known)
        self._clean: list[Tensor] = []

    def reserve(self, blocks: int) -> None:
        """There is nothing to reserve."""

    def denoise(self, values: Tensor, index: Tensor, level: Tensor) -> Tensor:
        if float(level) < 0:  # read by the host, as is the position: of no weight beside a pass over all blocks
            self._clean.append(values)
            return torch.zeros_like(values)
        size, k = self.model.backbone.layout.block, self.guidance.branches
        assert len(self._clean) == int(index[0, 0]) // size, "all blocks before are clean"
        pos = torch.cat([torch.arange(len(self._clean) * size, device=index.device), index[0].repeat(k)]).unsqueeze(0)
        tokens = torch.cat([*self._clean, values.repeat(1, k, 1)], 1)
        vectors = self.condition.vectors.unflatten(0, (k, -1)).squeeze(2).transpose(0, 1)  # [B, K, D]
        cond = self.condition._replace(vectors=vectors)
        cache = NoCache(len(self.model.backbone.layers), size, k)
        h = self.model.backbone(tokens, pos, cond=cond, level=level, cache=cache)  # [B, K W, D]
        weights = self.guidance.weights(index.clamp(max=self.tokens - 1), self.tokens)
        return self.model.head.dist(h.unflatten(1, (k, -1)).transpose(0, 1), weights)


# -------------------------------------------------------------------------------------------------- measures


@torch.inference_mode()
def decode(engine: Engine, sampler: Any, batch: int, rate: float, repeats: int = 3) -> tuple[Decode, Tensor]:
    """Decodes `batch` images `repeats` times after a first one; with the first decode's tokens [B, N, C].

    Args:
        engine: of a class-conditional model of blocks.
        sampler: config of `blockwise`.
        rate: operations a second of a matrix product.
    """
    device, model = engine.device, engine.model
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if isinstance(engine, Uncached) and sampler.context is not None:
        raise UserError(f"sampler.context {sampler.context} is what a cache keeps; without one leave it out")
    built = configs.build(sampler)
    label = torch.arange(batch, device=device) % model.config.condition.classes

    def run(seed: int) -> Generation:
        engine.begin({"label": label})
        return engine.run(built, Noise(torch.arange(seed, seed + batch, device=device)))

    first = run(0)
    seconds = statistics.median(run((i + 1) * batch).seconds for i in range(repeats))
    blocks, cached = first.notes["blocks"], not isinstance(engine, Uncached)
    way = "captured" if engine.fused else "cached" if cached else "uncached"
    steps = (first.nfe - blocks + 1) // blocks  # each but the last has one evaluation more, its commit
    flops = decode_work(model, batch, engine.guidance.branches, blocks, steps, sampler.context, cached)
    found = Decode(
        batch=batch,
        frames=first.tokens.shape[1] * model.grid[0] // model.tokens,
        way=way,
        seconds=seconds,
        first=first.seconds,
        images_per_s=batch / seconds,
        nfe=first.nfe if cached else steps * blocks,
        flops=flops,
        rate=flops / seconds,
        fraction=flops / seconds / rate,
        peak_bytes=peak(device),
    )
    return found, first.tokens


def training(
    objective: Any,
    way: Kernel,
    batch: int,
    rate: float,
    device: torch.device,
    dtype: torch.dtype,
    repeats: int = 3,
    compiled: bool = False,
) -> Step:
    """Steps of AdamW on one batch of random tokens, `repeats` after a first one; weights float32, autocast to `dtype`.

    Args:
        objective: config of `acdit`.
        way: `attention` of its backbone.
        rate: operations a second of a matrix product.
        compiled: compile the net's blocks, as `loop.compile` does.
    """
    backbone = replace(objective.model.backbone, attention=way)
    objective = replace(objective, model=replace(objective.model, backbone=backbone))
    with torch.device(device):
        made = configs.build(objective)
    model, net = made.exported(), made.nets[made.export]
    fixed = torch.Generator(device).manual_seed(0)
    randomize(model, fixed)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    if compiled:
        compile_blocks(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=device.type == "cuda")
    tokens = torch.randn(batch, model.tokens, model.config.channels, device=device, generator=fixed)
    given = {"tokens": tokens, "label": torch.arange(batch, device=device) % model.config.condition.classes}

    def step() -> Tensor:
        rng = torch.Generator(device).manual_seed(1)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss, _ = made.loss(made.export, {made.export: net}, given, 0, rng)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    watch = Stopwatch(device, warmup=2)  # compiled; and the optimizer's state made
    with watch.lap():
        loss = step()
    for _ in range(repeats + 1):
        with watch.lap(batch):
            step()
    seconds = statistics.median(lap for lap, _ in watch.counted)
    flops = training_work(model, batch)
    return Step(
        batch=batch,
        way=way,
        seconds=seconds,
        first=watch.laps[0][0],
        images_per_s=batch / seconds,
        flops=flops,
        rate=flops / seconds,
        fraction=flops / seconds / rate,
        loss=loss.item(),
        peak_bytes=peak(device),
    )


def table(rows: list[Decode] | list[Step]) -> str:
    """Markdown; the last column says how many times faster a row is than the slowest of its batch."""
    out = [
        "| batch | frames | way | s | images/s | NFE | TFLOP | TFLOP/s | fraction | peak MiB | first s | times |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        slowest = max(other.seconds for other in rows if other.batch == r.batch)
        held = "" if r.peak_bytes is None else f"{r.peak_bytes / 2**20:.0f}"
        frames, nfe = getattr(r, "frames", ""), getattr(r, "nfe", "")
        out.append(
            f"| {r.batch} | {frames} | {r.way} | {r.seconds:.4f} | {r.images_per_s:.2f} | {nfe} | "
            f"{r.flops / 1e12:.4g} | {r.rate / 1e12:.4g} | {r.fraction:.1%} | {held} | {r.first:.1f} | "
            f"{slowest / r.seconds:.2f} |"
        )
    return "\n".join(out)
