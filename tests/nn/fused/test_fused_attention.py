"""The fused attention step against `nn/attention.py` over the same cache."""

from __future__ import annotations

import pytest
import torch

from visgen.checks import UserError
from visgen.layout import Layout
from visgen.nn.attention import Attention
from visgen.nn.cache import KVCache
from visgen.nn.rope import rope_2d

fused = pytest.importorskip("visgen.nn.fused.attention")  # needs Triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IMAGES, BRANCHES = 3, 2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "prefix", "padded"),
    [(2, 2, 8, 1, False), (4, 2, 16, 3, True), (4, 1, 12, 1, False), (6, 2, 20, 4, True)],
)
@pytest.mark.parametrize("window", [1, 2, 11])
@pytest.mark.parametrize("raster", [True, False])
def test_equals_attention_over_the_cache(
    heads: int, kv_heads: int, head_dim: int, prefix: int, padded: bool, raster: bool, window: int
) -> None:
    torch.manual_seed(heads * head_dim)
    rows, width = IMAGES * BRANCHES, heads * head_dim
    layout = (Layout.raster if raster else Layout.full)((1, 4, 5)).with_prefix(prefix)
    module = Attention(width, heads, kv_heads).eval().to(DEVICE)
    caches = [KVCache(1, rows, kv_heads, layout.slots, head_dim, DEVICE) for _ in range(2)]
    for cache in caches:  # stale values everywhere: what may not be seen must not matter
        cache.keys.copy_(torch.randn(cache.keys.shape, generator=torch.Generator().manual_seed(1)))
        cache.values.copy_(torch.randn(cache.values.shape, generator=torch.Generator().manual_seed(2)))
    rotation = rope_2d(layout.coords.to(DEVICE), head_dim)
    group = layout.group.to(DEVICE)
    visible = None
    if padded:
        visible = torch.rand(rows, prefix, device=DEVICE) < 0.5
        visible[:, -1] = True
    slots = torch.arange(layout.slots, device=DEVICE)
    for _ in range(2):
        order = torch.rand(IMAGES, layout.slots - prefix + 1, device=DEVICE).argsort(1)  # of a window's slots: any
        pos = (order + prefix - 1)[:, :window].contiguous()
        at = pos.repeat(BRANCHES, 1)
        x = torch.randn(rows, window, width, device=DEVICE)
        mask = layout.visible(at, slots)  # [R, W, S]
        if visible is not None:
            present = torch.nn.functional.pad(visible, (0, layout.slots - prefix), value=True)
            mask = mask & present.unsqueeze(1) | (at.unsqueeze(-1) == slots)
        seen: list[torch.Tensor] = []
        hook = module.wo.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        with torch.no_grad():
            module(x, rotation[at], mask.unsqueeze(1), at, caches[0], 0)
            qkv = module.wqkv(x).flatten(0, 1)
        hook.remove()
        out = torch.full((rows * window, width), torch.nan, device=DEVICE)
        given = None if visible is None else visible.to(torch.uint8)
        keys, values = caches[1].keys[0], caches[1].values[0]
        fused.decode_attention(qkv, rotation, keys, values, pos, group.int(), fused.reach_of(group), given, out)
        assert torch.allclose(out, seen[0].flatten(0, 1), atol=1e-5)
        assert torch.allclose(caches[1].keys, caches[0].keys, atol=1e-6)
        assert torch.equal(caches[1].values, caches[0].values)


def test_half_precision_is_near() -> None:
    """Also other blocks: float32 has its own."""
    rows, kv_heads, queries, head_dim, window = 4, 2, 3, 16, 19
    layout = Layout.raster((1, 4, 5)).with_prefix(1)
    group = layout.group.to(DEVICE)
    rotation = rope_2d(layout.coords.to(DEVICE), head_dim)
    pos = torch.stack([torch.randperm(layout.slots)[:window] for _ in range(2)]).to(DEVICE)
    qkv = torch.randn(rows * window, kv_heads * (queries + 2) * head_dim, device=DEVICE)
    cache = torch.randn(2, rows, kv_heads, layout.slots, head_dim, device=DEVICE)
    found = []
    for dtype in (torch.float32, torch.bfloat16 if DEVICE.type == "cuda" else torch.float16):
        out = torch.empty(rows * window, kv_heads * queries * head_dim, dtype=dtype, device=DEVICE)
        given, (keys, values) = qkv.to(dtype), cache.to(dtype, copy=True)
        reach = fused.reach_of(group)
        found.append(fused.decode_attention(given, rotation, keys, values, pos, group.int(), reach, None, out).float())
    assert (found[0] - found[1]).abs().max() <= 0.02 * found[0].abs().max()


def test_blocks_fit_the_queries_and_the_device() -> None:
    assert fused._cut(pairs=32, asked=64, head_dim=64, exact=False)[0] == 16  # few rows: small blocks
    assert fused._cut(pairs=2048, asked=64, head_dim=64, exact=False)[0] == 64
    assert fused._cut(pairs=2048, asked=24, head_dim=64, exact=False)[0] == 32
    assert fused._cut(pairs=2048, asked=64, head_dim=256, exact=False)[0] == 32


def test_reach_is_one_past_the_last_visible_slot() -> None:
    layout = Layout.raster((1, 2, 2)).with_prefix(2)
    assert fused.reach_of(layout.group).tolist() == [1, 2, 3, 4, 5, 6]
    assert fused.reach_of(Layout.full((1, 2, 2)).with_prefix(2).group).tolist() == [1, 2, 6, 6, 6, 6]


@pytest.mark.parametrize("head_dim", [7, 258])
def test_a_head_beyond_a_program(head_dim: int) -> None:
    with pytest.raises(UserError, match=rf"head size {head_dim} .*--engine.kind eager"):
        fused.check_head_dim(head_dim)
