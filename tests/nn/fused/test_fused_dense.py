"""Rotary positions and SwiGLU's gate in place against the modules that they stand for, at odd sizes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from visgen.layout import Layout
from visgen.nn.heads import joined
from visgen.nn.rope import rope_2d, rotate

dense = pytest.importorskip("visgen.nn.fused.dense")  # needs Triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter rounds bfloat16 its own way


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("queries", "shared", "head_dim"), [(2, 2, 8), (4, 1, 12), (3, 3, 64)])
def test_queries_and_keys_turn_and_values_stay(queries: int, shared: int, head_dim: int, dtype: torch.dtype) -> None:
    table = rope_2d(Layout.raster((1, 2, 3)).with_prefix(2).coords, head_dim).to(DEVICE)
    rng, heads = torch.Generator().manual_seed(0), queries + shared
    packed = torch.randn(3, len(table), (heads + shared) * head_dim, generator=rng).to(DEVICE, dtype)
    parts = packed.unflatten(-1, (-1, head_dim)).transpose(1, 2)  # [B, H, S, d]
    wanted = torch.cat([rotate(parts[:, :heads], table.unsqueeze(0)), parts[:, heads:]], 1).transpose(1, 2).flatten(2)
    found = packed.clone()
    dense.turn(found, table, heads)
    near = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 8e-3}
    assert torch.allclose(found, wanted, **near) and not torch.allclose(found, packed, **near)
    assert torch.equal(found[..., heads * head_dim :], packed[..., heads * head_dim :])
    assert (found[:, :2, : heads * head_dim] == 0).all(), "those of the prefix become the zero vector"


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("queries", "shared", "head_dim"), [(2, 2, 8), (4, 1, 12), (3, 3, 64)])
def test_gradients_turn_back_into_rows(queries: int, shared: int, head_dim: int, dtype: torch.dtype) -> None:
    table = rope_2d(Layout.raster((1, 2, 3)).with_prefix(1).coords, head_dim).to(DEVICE)
    rng, shape = torch.Generator().manual_seed(0), (2, len(table), queries, head_dim)
    dq = torch.randn(shape, generator=rng).to(DEVICE, dtype).transpose(1, 2)  # lies slot by slot, as products leave it
    dk, dv = (torch.randn(2, shared, len(table), head_dim, generator=rng).to(DEVICE, dtype) for _ in range(2))
    apart = torch.stack([dv, dv], -1)[..., 0]  # no two values side by side
    near = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 8e-3}
    for rotation in (table.unsqueeze(0), torch.stack([table, table.roll(1, 0)])):
        wanted = joined(dq, dk, dv, rotation)
        for given in (dv, apart):
            found = dense.turn_back(dq, dk, given, rotation)
            assert found.shape == wanted.shape and torch.allclose(found, wanted, **near)
            assert torch.equal(found[..., (queries + shared) * head_dim :], dv.transpose(1, 2).flatten(2))
        assert not torch.allclose(found, joined(dq, dk, dv, -rotation), **near)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(3, 5), (7, 640), (2, 4096)])
def test_the_gate_equals_its_formula(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    x, up = (4 * torch.randn(shape, generator=rng).to(DEVICE, dtype) for _ in range(2))
    wanted, before = F.silu(x.float()) * up.float(), up.clone()
    dense.gate(x, up)
    near = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 8e-3}
    assert torch.allclose(x.float(), wanted, **near) and torch.equal(up, before)


def test_sizes_that_do_not_fit_are_refused() -> None:
    table = torch.zeros(4, 2, 2)
    for packed, heads in ((torch.zeros(1, 3, 8), 2), (torch.zeros(1, 4, 8), 3), (torch.zeros(1, 4, 16)[..., ::2], 2)):
        with pytest.raises(ValueError, match="do not fit rows"):
            dense.turn(packed, table, heads)
    part = torch.zeros(2, 1, 4, 4)
    for rotation in (torch.zeros(1, 4, 4, 2), torch.zeros(3, 4, 2, 2), torch.zeros(1, 3, 2, 2)):
        with pytest.raises(ValueError, match="does not fit gradients"):
            dense.turn_back(part, part, part, rotation)
    with pytest.raises(ValueError, match="alike and contiguous"):
        dense.gate(torch.zeros(2, 4), torch.zeros(4, 2).T)
