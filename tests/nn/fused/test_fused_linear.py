"""The fused linear layer against the modules that it stands for, at odd sizes and every way of cutting."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

linear = pytest.importorskip("visgen.nn.fused.linear")  # needs Triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(2, 12, 20), (1, 24, 64), (3, 40, 48), (16, 64, 96), (70, 33, 130)]
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter multiplies no bfloat16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def case(m: int, n: int, k: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(m)
    made = {"x": (m, k), "weight": (n, k), "up": (n, k), "gain": (k,), "residual": (m, n)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in made.items()}
    for name in ("weight", "up"):
        tensors[name] /= k**0.5
    return {name: t.to(dtype).to(DEVICE) for name, t in tensors.items()}


def eager(given: dict[str, torch.Tensor], norm: bool, up: bool, residual: bool) -> torch.Tensor:
    x, weight, second, gain, before = (t.float() for t in given.values())
    x = F.rms_norm(x, x.shape[1:], gain, 1e-5) if norm else x
    y = F.silu(x @ weight.T) * (x @ second.T) if up else x @ weight.T
    return y + before if residual else y


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("up", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_equals_the_modules(size: tuple[int, int, int], norm: bool, up: bool, residual: bool) -> None:
    for dtype in (torch.float32, HALF):
        given = case(*size, dtype)
        options = {"gain": norm, "up": up, "residual": residual}
        chosen = {name: given[name] for name, wanted in options.items() if wanted}
        for tile in (None, linear.Tile(16, 16, 16, 1, 4, 1)):
            space = linear.Workspace(DEVICE)
            out = torch.full((size[0], size[1]), torch.nan, dtype=dtype, device=DEVICE)
            found = linear.linear(given["x"], given["weight"], space, out=out, tile=tile, **chosen)
            assert found is out
            wanted = eager(given, norm, up, residual)
            assert (found.float() - wanted).abs().max() <= TOLERANCE[dtype] * wanted.abs().max(), tile


@pytest.mark.parametrize("width", [64, 128])
def test_many_rows_that_fill_no_tile(width: int) -> None:
    given, space = case(150, 200, 70, torch.float32), linear.Workspace(DEVICE)
    options = {name: given[name] for name in ("gain", "residual")}
    found = linear.linear(given["x"], given["weight"], space, tile=linear.Tile(128, width, 64, 1, 8, 2), **options)
    assert torch.allclose(found, eager(given, True, False, True), atol=2e-5)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("up", [False, True])
def test_described_operands_give_the_same(residual: bool, up: bool) -> None:
    for size in ((70, 40, 136), (128, 96, 64), (3, 33, 72)):
        given, space = case(*size, HALF), linear.Workspace(DEVICE)
        options = {name: given[name] for name, wanted in (("residual", residual), ("up", up)) if wanted}
        tile = linear.Tile(64, 32, 64, 1, 4, 3, described=True)
        found = linear.linear(given["x"], given["weight"], space, tile=tile, **options)
        wanted = eager(given, False, up, residual)
        assert (found.float() - wanted).abs().max() <= TOLERANCE[HALF] * wanted.abs().max(), size


def test_operands_are_described_where_that_measured_faster() -> None:
    shapes = {(3840, 1280, False): (128, 32), (3584, 1280, True): (128, 32), (1024, 1024, False): (64, 32)}
    for (n, k, gate), tile in shapes.items():
        found = linear.choose(128, n, k, norm=False, gate=gate, described=True)
        assert found.described and (found.m, found.n) == tile
        for m, norm, able in ((128, True, True), (64, False, True), (256, False, True), (128, False, False)):
            assert not linear.choose(m, n, k, norm=norm, gate=gate, described=able).described
    assert not linear.choose(128, 1280, 3584, norm=False, gate=False, described=True).described
    x = torch.zeros(128, 1280, dtype=HALF, device=DEVICE)
    hopper = DEVICE.type == "cuda" and torch.cuda.get_device_capability()[0] >= 9
    for given, aligned in ((x, True), (x[:, :1276].contiguous(), False), (x.flatten()[1:1281].view(1, -1), False)):
        assert linear.describable(given, x) == (hopper and aligned)
    assert not linear.describable(x.float(), x.float())


def test_few_rows_of_wide_models_split_long_sums_and_norm_beforehand() -> None:
    for (n, k), split in {(1024, 1024): 4, (1024, 2736): 8, (16384, 1024): 1, (192, 512): 1}.items():
        assert linear.choose(16, n, k, norm=False, gate=False).split == split, (n, k)
    assert linear.with_norm(2, 1024) and linear.with_norm(16, 192)
    assert not linear.with_norm(16, 1024) and not linear.with_norm(17, 192)


def test_more_rows_take_wider_tiles_once_they_fill_the_device() -> None:
    widths = [linear.choose(rows, 3072, 1024, norm=False, gate=False).n for rows in (128, 256, 384, 1024)]
    assert widths == [64, 32, 64, 128]
    assert linear.choose(1024, 3072, 1024, norm=False, gate=True, exact=True).n == 32
    assert linear.choose(8192, 1024, 1024, norm=False, gate=False).split == 1


@pytest.mark.parametrize("split", [2, 3, 4])
def test_a_split_product_leaves_its_counters_at_zero(split: int) -> None:
    given, space = case(70, 33, 130, torch.float32), linear.Workspace(DEVICE)
    tile = linear.Tile(16, 16, 16, split, 4, 1)
    for _ in range(2):
        found = linear.linear(given["x"], given["weight"], space, residual=given["residual"], tile=tile)
        assert torch.allclose(found, eager(given, False, False, True), atol=2e-5)
        assert not space.arrived.any()


def test_the_residual_may_be_the_output() -> None:
    given, space = case(3, 40, 48, torch.float32), linear.Workspace(DEVICE)
    wanted = eager(given, False, False, True)
    out = given["residual"].clone()
    linear.linear(given["x"], given["weight"], space, residual=out, out=out)
    assert torch.allclose(out, wanted, atol=2e-5)


def test_a_chosen_tile_fits_the_workspace() -> None:
    space = linear.Workspace(torch.device("meta"))
    for rows in (1, 2, 4, 16, 33, 64, 128, 150, 512, 2000, 8192):
        for n, k in ((768, 768), (1280, 3584), (3200, 8704), (9600, 3200), (128, 352)):
            tile = linear.choose(rows, n, k, norm=False, gate=False)
            tiles = -(-n // tile.n) * -(-rows // tile.m)
            assert tile.split == 1 or tiles * tile.split * tile.m * tile.n <= space.parts.numel()
            assert tile.split == 1 or tiles <= space.arrived.numel()
            assert linear.choose(rows, n, k, norm=True, gate=False).split == 1
