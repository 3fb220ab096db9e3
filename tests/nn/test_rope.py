"""2-D rotary positions against complex numbers."""

from __future__ import annotations

import pytest
import reference
import torch

from visgen.layout import Layout
from visgen.nn.rope import check_head_dim, rope_2d, rotate


@pytest.mark.parametrize("head_dim", [4, 16, 100])
@pytest.mark.parametrize("base", [10000.0, 100.0])
def test_agrees_with_complex_multiplication(head_dim: int, base: float) -> None:
    torch.manual_seed(0)
    layout = Layout.raster((1, 3, 5)).with_prefix(2)
    x = torch.randn(2, 3, layout.slots, head_dim)
    found = rotate(x, rope_2d(layout.coords, head_dim, base).unsqueeze(0))
    for slot, (_, row, column) in enumerate(layout.coords.tolist()):
        for b in range(2):
            for h in range(3):
                twin = reference.rope_2d(x[b, h, slot].tolist(), row, column, base)
                assert torch.allclose(found[b, h, slot], torch.tensor(twin), atol=1e-5), (slot, b, h)


def test_turns_as_its_formula_to_the_last_bit_and_backwards_too() -> None:
    torch.manual_seed(0)
    table = rope_2d(Layout.raster((1, 3, 5)).coords, 16)
    for dtype in (torch.float32, torch.bfloat16):
        x, pull = (torch.randn(2, 3, 15, 16).to(dtype).requires_grad_() for _ in range(2))
        a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = table[None, None].unbind(-1)
        wanted = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2).to(dtype)
        found = rotate(x, table.unsqueeze(0))
        assert torch.equal(found, wanted)
        assert torch.equal(*(torch.autograd.grad(y, x, pull)[0] for y in (found, wanted)))


def test_prefix_slots_become_the_zero_vector_and_the_first_cell_stays() -> None:
    layout = Layout.raster((1, 2, 2)).with_prefix(1)
    x = torch.ones(1, 1, layout.slots, 8)
    found = rotate(x, rope_2d(layout.coords, 8).unsqueeze(0))
    assert (found[:, :, 0] == 0).all()
    assert torch.equal(found[:, :, 1], x[:, :, 1])


def test_scores_depend_on_the_distance_between_cells_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(8), torch.randn(8)

    def score(a: tuple[int, int], b: tuple[int, int]) -> float:
        coords = torch.tensor([[0, *a], [0, *b]])
        turned = rotate(torch.stack([q, k])[None, None], rope_2d(coords, 8).unsqueeze(0))[0, 0]
        return float(turned[0] @ turned[1])

    assert score((2, 3), (1, 5)) == pytest.approx(score((6, 4), (5, 6)), abs=1e-5)
    assert score((2, 3), (1, 5)) != pytest.approx(score((2, 3), (5, 1)), abs=1e-3)


def test_rows_may_have_their_own_positions() -> None:
    torch.manual_seed(0)
    table = rope_2d(Layout.raster((1, 3, 3)).coords, 8)
    pos = torch.tensor([[0, 5], [8, 2]])
    x = torch.randn(2, 2, 2, 8)
    both = rotate(x, table[pos])
    for b in range(2):
        assert torch.equal(both[b : b + 1], rotate(x[b : b + 1], table[pos[b : b + 1]]))


def test_angles_are_float32_whatever_the_input() -> None:
    layout = Layout.raster((1, 1, 64))
    x = torch.ones(1, 1, 64, 8)
    half = rotate(x.bfloat16(), rope_2d(layout.coords, 8).unsqueeze(0))
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, rotate(x, rope_2d(layout.coords, 8).unsqueeze(0)).bfloat16())


def test_head_dimension_must_serve_both_axes() -> None:
    check_head_dim(100)
    with pytest.raises(ValueError, match=r"head dimension 6 \(width / heads\) must be a multiple of 4"):
        check_head_dim(6)
