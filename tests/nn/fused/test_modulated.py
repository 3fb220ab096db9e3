"""The products of a diffusion head's layer by tensor descriptors against the modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

modulated = pytest.importorskip("visgen.nn.fused.modulated")  # needs Triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter multiplies no bfloat16


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(130, 72), (192, 128)])
def test_described_operands_give_the_same(rows: int, width: int, gated: bool) -> None:
    torch.manual_seed(rows)
    linear = nn.Linear(width, width).to(DEVICE, HALF).requires_grad_(False)
    x, h, told = (torch.randn(rows, n, device=DEVICE).to(HALF) for n in (width, width, 3 * width))
    found = F.linear(x.float(), linear.weight.float(), linear.bias.float())
    wanted = h.float() + told[:, 2 * width :].float() * found if gated else F.silu(found)
    moments = modulated.Moments(rows, width, DEVICE)
    for tile in (modulated.Tile(64, 32, 64, 1, 4, 3, described=True), modulated.Tile(128, 64, 32, 1, 8, 2, True)):
        out = h.clone()
        modulated.product(x, linear, out, moments, modulation=told, gated=gated, tile=tile)
        assert (out.float() - wanted).abs().max() <= (4e-2 if DEVICE.type == "cuda" else 5e-3) * wanted.abs().max()


def test_tiles_are_the_larger_ones_that_fill_the_device() -> None:
    tiles = {rows: modulated.tile_of(rows, 1024, 1024, False, True) for rows in (8, 64, 128, 256, 896)}
    assert [tile.described for tile in tiles.values()] == [False, False, True, True, True]
    assert [tile.m for tile in tiles.values()] == [16, 64, 64, 64, 128]
    assert not any(modulated.tile_of(rows, 1024, 1024, False).described for rows in tiles)
