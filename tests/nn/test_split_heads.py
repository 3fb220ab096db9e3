"""Packed queries, keys and values against the plain formula, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from visgen.layout import Layout
from visgen.nn.heads import split_heads
from visgen.nn.rope import rope_2d, rotate

DIM = 8


def _plain(packed: Tensor, rotation: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = packed.unflatten(-1, (-1, DIM)).transpose(1, 2).split(sizes, dim=1)
    return rotate(q, rotation), rotate(k, rotation), v


@pytest.mark.parametrize("sizes", [[3, 3, 3], [4, 2, 2]])
@pytest.mark.parametrize("each_row", [False, True])
def test_heads_and_gradient_are_those_of_the_formula_to_the_last_bit(sizes: list[int], each_row: bool) -> None:
    torch.manual_seed(0)
    table = rope_2d(Layout.raster((1, 2, 3)).with_prefix(1).coords, DIM)
    rotation = torch.stack([table, table.roll(1, 0)]) if each_row else table.unsqueeze(0)
    packed = torch.randn(2, len(table), sum(sizes) * DIM, requires_grad=True)
    found, wanted = split_heads(packed, rotation, sizes), _plain(packed, rotation, sizes)
    pulls = [torch.randn_like(part) for part in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b)
    grads = [torch.autograd.grad(parts, packed, pulls)[0] for parts in (found, wanted)]
    assert torch.equal(*grads) and grads[0].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("behind", [False, True], ids=["of the input", "behind a product"])
def test_compiles_without_a_break_and_to_the_same_gradient(dtype: torch.dtype, behind: bool) -> None:
    torch.manual_seed(0)
    rotation = rope_2d(Layout.raster((1, 2, 3)).coords, DIM).unsqueeze(0)
    x = torch.randn(2, 6, 6 * DIM).to(dtype).requires_grad_()
    weight = torch.randn(6 * DIM, 6 * DIM).to(dtype).requires_grad_()

    def mixed(x: Tensor) -> Tensor:
        packed = F.linear(x, weight) if behind else x
        return F.scaled_dot_product_attention(*split_heads(packed, rotation, [2, 2, 2]))

    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    inputs = [x, weight] if behind else [x]
    found, wanted = ([y, *torch.autograd.grad(y.square().sum(), inputs)] for y in (compiled(x), mixed(x)))
    for a, b in zip(found, wanted, strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 1e-2)
        assert b.abs().max() > 0.1
