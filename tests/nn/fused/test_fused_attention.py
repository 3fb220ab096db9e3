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
@pytest.mark.parametrize("raster", [True, False])
def test_equals_attention_over_the_cache(
    heads: int, kv_heads: int, head_dim: int, prefix: int, padded: bool, raster: bool
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
    for _ in range(3):
        pos = torch.randint(prefix - 1, layout.slots, (IMAGES,), device=DEVICE)
        x, at = torch.randn(rows, 1, width, device=DEVICE), pos.repeat(BRANCHES).unsqueeze(1)
        mask = layout.visible(at, slots)  # [R, 1, S]
        if visible is not None:
            present = torch.nn.functional.pad(visible, (0, layout.slots - prefix), value=True)
            mask = mask & present.unsqueeze(1) | (at.unsqueeze(-1) == slots)
        seen: list[torch.Tensor] = []
        hook = module.wo.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        with torch.no_grad():
            module(x, rotation[at], mask.unsqueeze(1), at, caches[0], 0)
            qkv = module.wqkv(x[:, 0])
        hook.remove()
        out = torch.full((rows, width), torch.nan, device=DEVICE)
        given = None if visible is None else visible.to(torch.uint8)
        keys, values = caches[1].keys[0], caches[1].values[0]
        fused.decode_attention(qkv, rotation, keys, values, pos, group.int(), fused.reach_of(group), given, out)
        assert torch.allclose(out, seen[0][:, 0], atol=1e-5)
        assert torch.allclose(caches[1].keys, caches[0].keys, atol=1e-6)
        assert torch.equal(caches[1].values, caches[0].values)


def test_reach_is_one_past_the_last_visible_slot() -> None:
    layout = Layout.raster((1, 2, 2)).with_prefix(2)
    assert fused.reach_of(layout.group).tolist() == [1, 2, 3, 4, 5, 6]
    assert fused.reach_of(Layout.full((1, 2, 2)).with_prefix(2).group).tolist() == [1, 2, 6, 6, 6, 6]


@pytest.mark.parametrize("head_dim", [7, 258])
def test_a_head_beyond_a_program(head_dim: int) -> None:
    with pytest.raises(UserError, match=rf"head size {head_dim} .*--engine.kind eager"):
        fused.check_head_dim(head_dim)
