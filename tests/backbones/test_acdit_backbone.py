"""ACDiT: one set of weights that trains on two streams, decodes block by block, and is DiT where there is one block."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import dit
from torch import Tensor

from visgen.backbones.acdit import ACDiT, Config
from visgen.conditions import Prefix
from visgen.config import UserError, build, plugin_config
from visgen.layout import Grid, Layout
from visgen.nn import blockwise
from visgen.nn.blockwise import BlockCache, Kernel, Streams

B, C, WIDTH = 2, 3, 32
IMAGE, CLIP = (1, 4, 4), (4, 2, 2)
BLOCKS = [
    *((IMAGE, block) for block in [(1, 1, 1), (1, 1, 4), (1, 2, 2), (1, 4, 2), (1, 4, 4)]),
    *((CLIP, block) for block in [(1, 1, 1), (1, 2, 2), (2, 2, 2), (2, 1, 2), (4, 2, 2)]),
]


def made(grid: Grid, block: Grid, **values: Any) -> ACDiT:
    torch.manual_seed(0)
    config = plugin_config("visgen.backbones", "acdit", block=block, layers=2, heads=2, width=WIDTH, **values)
    backbone = build(config, ACDiT.arrange(config, grid, 1), C).eval()
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), 0.2)
    return backbone


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def inputs(backbone: ACDiT) -> tuple[Tensor, Tensor, Tensor, Prefix]:
    """clean and noised [B, N, C], times [1, blocks], condition."""
    count = backbone.layout.tokens // backbone.layout.block
    times = torch.linspace(5, 990, count).unsqueeze(0)
    return draw(B, 16, C), draw(B, 16, C, seed=2), times, Prefix(draw(B, 1, WIDTH, seed=3))


def trained(backbone: ACDiT, clean: Tensor, noised: Tensor, times: Tensor, cond: Prefix) -> Tensor:
    before = backbone.layout.tokens - backbone.layout.block
    return backbone(torch.cat([clean[:, :before], noised], 1), None, cond=cond, level=times.expand(len(clean), -1))


@pytest.mark.parametrize(("grid", "block"), BLOCKS)
@pytest.mark.parametrize("rope", ["axial", "acdit_legacy"])
def test_cached_blocks_equal_the_training_pass(grid: Grid, block: Grid, rope: Any) -> None:
    """For two guidance branches, which share one cache."""
    backbone = made(grid, block, rope=rope)
    clean, noised, times, cond = inputs(backbone)
    null = Prefix(draw(B, 1, WIDTH, seed=4))
    size, count = backbone.layout.block, times.shape[1]
    with torch.no_grad():
        whole = torch.cat([trained(backbone, clean, noised, times, c) for c in (null, cond)])
        cache = backbone.make_cache(B, torch.device("cpu"), torch.float32, blocks=count, branches=2)
        cache.keys.fill_(7)  # stale
        both, parts = Prefix.cat([null, cond]), []
        for i in range(count):
            pos, here = torch.arange(i * size, (i + 1) * size).unsqueeze(0), slice(i * size, (i + 1) * size)
            for values, level in ((noised, 900.0), (noised, float(times[0, i]))):  # a step does not disturb the next
                window = values[:, here].repeat(2, 1, 1)
                out = backbone(window, pos, cond=both, level=torch.tensor([level]), cache=cache)
            parts.append(out)
            backbone(clean[:, here].repeat(2, 1, 1), pos, cond=both, level=torch.tensor([-1.0]), cache=cache)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-4)


@pytest.mark.parametrize("grid", [IMAGE, CLIP])
def test_one_block_is_a_plain_dit_of_the_same_weights(grid: Grid) -> None:
    backbone = made(grid, grid)
    _, noised, times, cond = inputs(backbone)
    with torch.no_grad():
        h = trained(backbone, noised, noised, times, cond)
    places = [[place[a] for a in backbone.axes] for place in backbone.layout.coords.tolist()]
    for row in range(B):
        wanted = dit(
            backbone.state_dict(), noised[row], places, 5.0, cond.vectors[row, 0], 2, backbone.split, backbone.bases
        )
        assert torch.allclose(h[row], wanted, atol=1e-4)


def test_every_parameter_is_trained_and_rows_are_independent() -> None:
    backbone = made(IMAGE, (1, 2, 2))
    clean, noised, times, cond = inputs(backbone)
    h = trained(backbone, clean, noised, times, cond)
    assert h.shape == (B, 16, WIDTH) and h.isfinite().all()
    h.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in backbone.parameters())
    alone = trained(backbone, clean[1:], noised[1:], times, Prefix(cond.vectors[1:]))
    assert torch.allclose(h[1:], alone, atol=1e-5)


def test_what_a_noised_block_depends_on() -> None:
    """The clean blocks before it and itself: no later one, and no other noised one."""
    backbone = made(IMAGE, (1, 2, 2))
    clean, noised, times, cond = inputs(backbone)
    with torch.no_grad():
        plain = trained(backbone, clean, noised, times, cond)
        for i in range(4):
            other = clean.clone()
            other[:, 4 * i : 4 * i + 4] += 1
            after = trained(backbone, other, noised, times, cond)
            assert torch.equal(after[:, : 4 * i + 4], plain[:, : 4 * i + 4])
            assert i == 3 or not torch.allclose(after[:, 4 * i + 4 :], plain[:, 4 * i + 4 :], atol=1e-3)
            other = noised.clone()
            other[:, 4 * i : 4 * i + 4] += 1
            after = trained(backbone, clean, other, times, cond)
            changed = (after != plain).any(-1)[0].unflatten(0, (4, 4))
            assert changed.all(1).tolist() == changed.any(1).tolist() == [j == i for j in range(4)]


@torch.no_grad()
def test_clean_keys_depend_on_neither_label_nor_noise() -> None:
    backbone = made(IMAGE, (1, 2, 2))
    clean, _, _, cond = inputs(backbone)
    kept = []
    for other in (cond, Prefix(cond.vectors + 1)):
        cache = backbone.make_cache(B, torch.device("cpu"), torch.float32, blocks=2)
        pos = torch.arange(4).unsqueeze(0)
        backbone(clean[:, :4], pos, cond=other, level=torch.tensor([-1.0]), cache=cache)
        kept.append(cache.values[:, :, :, :4].clone())
    assert torch.equal(*kept) and kept[0].abs().sum() > 0


@pytest.mark.parametrize(("grid", "block"), [(IMAGE, (1, 2, 2)), (CLIP, (1, 2, 2)), (IMAGE, (1, 1, 1))])
def test_flex_attention_equals_the_dense_mask(grid: Grid, block: Grid) -> None:
    layout = Layout.blocks(grid, block)
    slots = layout.doubled().slots
    q, k, v = (draw(B, 2, slots, 16, seed=s) for s in range(3))
    assert torch.allclose(Streams(layout, "flex", 8)(q, k, v), Streams(layout, "dense", 8)(q, k, v), atol=1e-5)


def check_ring(size: int, kernel: Kernel = "auto", device: str = "cpu", dim: int = 4, branches: int = 2) -> None:
    """Eight blocks through a ring of three: a block sees two clean ones before it, and its own branch."""
    cache = BlockCache(1, B, 2, dim, size, blocks=3, branches=branches, device=device, kernel=kernel)
    assert (cache.tiled is not None) == (size % 128 == 0 and (kernel == "flex" or device == "cuda"))
    clean = [draw(B, 2, size, dim, seed=10 + i).to(device) for i in range(8)]
    for i in range(8):
        q, k, v = (draw(branches * B, 2, size, dim, seed=100 + 3 * i + j).to(device) for j in range(3))
        (attend,) = cache.window(torch.arange(i * size, (i + 1) * size, device=device).unsqueeze(0))
        out = attend(q, k, v)
        before = clean[max(0, i - 2) : i]
        keys, values = (torch.cat([*(c.repeat(branches, 1, 1, 1) for c in before), own], 2) for own in (k, v))
        wanted = torch.nn.functional.scaled_dot_product_attention(q, keys, values)
        assert torch.allclose(out, wanted, atol=1e-5 if device == "cpu" else 1e-2), i
        every = clean[i].repeat(branches, 1, 1, 1)
        attend(every, every, every)  # committed: keys and values are the clean block itself


@pytest.mark.parametrize(
    ("size", "kernel", "branches"),
    [
        (2, "auto", 1),
        (2, "auto", 2),
        (2, "flex", 3),
        (128, "dense", 2),
        (128, "flex", 1),
        (128, "flex", 3),
        (256, "flex", 2),
    ],
)
def test_a_ring_of_blocks_holds_the_last_ones(size: int, kernel: Kernel, branches: int) -> None:
    check_ring(size, kernel, branches=branches)


@pytest.mark.slow
def test_tiles_that_are_not_seen_are_skipped_by_the_compiled_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled for the CPU, where the rule that the plain form reads is made to let everything pass."""
    monkeypatch.setattr(blockwise, "_flex", lambda device: blockwise._compiled_flex())
    show = blockwise._Tiled.show

    def all_pass(self: Any, seen: Tensor) -> None:
        show(self, seen)
        self.seen.fill_(True)

    monkeypatch.setattr(blockwise._Tiled, "show", all_pass)
    with torch.inference_mode():
        check_ring(128, "flex", dim=64)
        check_ring(256, "flex", dim=64)
    monkeypatch.setattr(blockwise, "_flex", lambda device: torch.nn.attention.flex_attention.flex_attention)
    with pytest.raises(AssertionError):
        check_ring(128, "flex", dim=64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("size", [2, 128, 256])
def test_a_ring_of_blocks_on_a_gpu(size: int) -> None:
    with torch.inference_mode():
        check_ring(size, device="cuda", dim=64)


@pytest.mark.parametrize("grid", [IMAGE, CLIP])
def test_axial_scores_depend_on_relative_positions_and_legacy_ones_do_not(grid: Grid) -> None:
    for rope, relative in (("axial", True), ("acdit_legacy", False)):
        backbone = made(grid, grid, rope=rope)
        turn = backbone.layers[0].attention.turn  # type: ignore[union-attr]
        q, k = (draw(16, seed=s).expand(1, 1, 16, 16) for s in (1, 2))  # the same vector everywhere
        table = backbone.rotation(torch.arange(16).unsqueeze(0))
        scores = (turn(q, table) @ turn(k, table).mT)[0, 0]  # type: ignore[operator]
        moved = {}
        for i, a in enumerate(backbone.layout.coords.tolist()):
            for j, b in enumerate(backbone.layout.coords.tolist()):
                moved.setdefault(tuple(x - y for x, y in zip(a, b, strict=True)), []).append(float(scores[i, j]))
        spread = max(max(found) - min(found) for found in moved.values())
        assert (spread < 1e-4) == relative
        norms = turn(q, table).norm(dim=-1) / q.norm(dim=-1)  # type: ignore[operator]
        assert bool((norms - 1).abs().max() < 1e-5) == relative


def test_the_published_split_and_bases() -> None:
    with torch.device("meta"):
        image = ACDiT(Config(), Layout.blocks((1, 32, 32), (1, 16, 16)), 4)
        clip = ACDiT(Config(), Layout.blocks((16, 16, 16), (4, 16, 16)), 16)
    assert (image.split, image.bases) == ((32, 32), [100, 100])
    assert (clip.split, clip.bases) == ((16, 24, 24), [100, 100, 100])


def test_slots_beyond_the_layout_are_later_frames() -> None:
    backbone = made(CLIP, (2, 2, 2))
    assert backbone.place(torch.tensor([0, 15, 16, 21, 35])).tolist() == [
        [0, 0, 0],
        [3, 1, 1],
        [4, 0, 0],
        [5, 0, 1],
        [8, 1, 1],
    ]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match=r"block \(1, 3, 3\) does not divide the grid \(1, 4, 4\)"):
        made(IMAGE, (1, 3, 3))
    with pytest.raises(UserError, match="takes a condition of one vector, such as label; this one has 120"):
        ACDiT.arrange(Config(), IMAGE, 120)
