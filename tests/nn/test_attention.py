"""Attention against one softmax at a time."""

from __future__ import annotations

import pytest
import reference
import torch
from torch import Tensor

from visgen.layout import Layout
from visgen.nn.attention import Attention
from visgen.nn.cache import KVCache
from visgen.nn.rope import rope_2d

B, W, D, H = 2, 6, 16, 4  # head dimension 4, a 2 x 3 grid
LAYOUT = Layout.raster((1, 2, 3))


def _twin(layer: Attention, x: Tensor, visible: Tensor) -> Tensor:
    heads, kv, d = layer.heads, layer.kv_heads, layer.head_dim
    packed = x @ layer.wqkv.weight.T
    q, k, v = packed.split([heads * d, kv * d, kv * d], dim=-1)  # [B, W, D], [B, W, kv d] twice

    def turned(t: Tensor, count: int) -> Tensor:
        out = t.reshape(B, W, count, d).transpose(1, 2).clone()
        for b in range(B):
            for h in range(count):
                for w, (_, y, column) in enumerate(LAYOUT.coords.tolist()):
                    out[b, h, w] = torch.tensor(reference.rope_2d(out[b, h, w].tolist(), y, column))
        return out

    mixed = reference.attention(turned(q, heads), turned(k, kv), v.reshape(B, W, kv, d).transpose(1, 2), visible)
    return mixed.transpose(1, 2).reshape(B, W, D) @ layer.wo.weight.T


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("masked", [False, True])
def test_agrees_with_its_twin(kv_heads: int, masked: bool) -> None:
    torch.manual_seed(kv_heads)
    layer = Attention(D, H, kv_heads).eval()
    x = torch.randn(B, W, D)
    visible = torch.ones(B, W, W, dtype=torch.bool).tril()
    if masked:
        visible[1, :, 2] = False
        visible[1, 2, 2] = True
    with torch.no_grad():
        found = layer(x, rope_2d(LAYOUT.coords, 4).unsqueeze(0), visible.unsqueeze(1) if masked else None)
        assert torch.allclose(found, _twin(layer, x, visible), atol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_window_by_window_with_a_cache_equals_one_pass(kv_heads: int) -> None:
    torch.manual_seed(0)
    layer = Attention(D, H, kv_heads).eval()
    x, rotation = torch.randn(B, W, D), rope_2d(LAYOUT.coords, 4)
    cache = KVCache(1, B, kv_heads, W, 4)
    parts = []
    with torch.no_grad():
        for start, end in ((0, 1), (1, 4), (4, 6)):
            pos = torch.arange(start, end).expand(B, -1)
            mask = LAYOUT.visible(pos).unsqueeze(1)
            parts.append(layer(x[:, start:end], rotation[pos], mask, pos, cache))
        assert torch.allclose(torch.cat(parts, 1), layer(x, rotation.unsqueeze(0), None), atol=1e-5)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="width 10 must be a multiple of heads 4; change"):
        Attention(10, 4)
    with pytest.raises(ValueError, match="and heads of kv_heads 3"):
        Attention(16, 4, 3)


def test_dropout_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    layer, x, rotation = Attention(D, H, dropout=0.5), torch.randn(B, W, D), rope_2d(LAYOUT.coords, 4).unsqueeze(0)
    assert (layer.train()(x, rotation, None) == 0).any()
    assert torch.equal(layer.eval()(x, rotation, None), layer(x, rotation, None))
