"""What the products of a layer fetch for the next one, in the fused step of `ar`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from visgen.conditions import Prefix

fused = pytest.importorskip("visgen.backbones._ar_fused")  # needs Triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_every_slot_is_fetched_once_and_the_step_is_the_same(
    make_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_model((1, 1, 5), layers=3).to(DEVICE).backbone
    cond = Prefix(torch.randn(2, 1, 32, device=DEVICE), None)
    tokens, index = torch.tensor([[1, 2, 3, 4, 5]] * 2, device=DEVICE), torch.tensor([[2], [2]], device=DEVICE)
    told: list[Any] = []
    near: list[int] = []
    linear, attend = fused.linear, fused.decode_attention
    monkeypatch.setattr(fused, "linear", lambda *a, later=None, **b: told.append(later) or linear(*a, **b))
    monkeypatch.setattr(fused, "decode_attention", lambda *a: near.append(a[9]) or attend(*a))
    found = []
    for able in (False, True):
        told.clear()
        near.clear()
        monkeypatch.setattr(fused, "fetches", lambda x, weight, gate, able=able: able)
        cache = net.make_cache(2, DEVICE, torch.float32)
        cache.keys.fill_(0.5)
        found.append(fused.FusedAR(net)(tokens, index, cond, cache))
        if not able:
            assert told == [None] * 12 and near == [0, 0, 0]
    assert torch.equal(*found)
    assert near == [0, 6, 6], "all slots fit the room"
    for layer in range(2):
        qkv, *each = told[4 * layer : 4 * layer + 4]
        assert qkv is None and [each[0].first, each[-1].end] == [0, 6]
        assert [a.end for a in each[:-1]] == [b.first for b in each[1:]]
        assert all(a.keys.data_ptr() == cache.keys[layer + 1].data_ptr() for a in each)
    assert told[8:] == [None] * 4
