"""Conditional decoding: what control adds, where, and that the null control adds nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from visgen.config import UserError
from visgen.nn.control import (
    ConditionalDecoding,
    ControlEncoder,
    EncoderConfig,
    Hint,
    at_slots,
    hints_of,
    places,
    resized,
)

TINY = EncoderConfig(width=16, layers=2, heads=2, patch=4, side=4)


def made(small: Callable[..., Any], grid: tuple[int, int, int] = (1, 4, 4), **values: Any) -> ConditionalDecoding:
    torch.manual_seed(0)
    decoding = ConditionalDecoding(replace(small("controls", "canny"), **values), 24, grid).eval()
    for parameter in decoding.parameters():
        nn.init.normal_(parameter, std=0.3)
    return decoding.requires_grad_(False)


def maps(rows: int = 2, height: int = 16, width: int = 16, frames: int = 1) -> Tensor:
    return torch.rand(rows, frames, 3, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_places_are_controlars_where_it_defines_them() -> None:
    assert places(3, 12) == [0, 4, 8] and places(3, 24) == [0, 8, 16] and places(3, 36) == [0, 12, 24]
    assert (
        places(3, 22) == [0, 7, 14] and places(3, 7) == [0, 2, 4] and places(3, 2) == [0, 0, 1] and places(1, 5) == [0]
    )


def test_training_starts_at_the_plain_model(small: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    decoding = ConditionalDecoding(small("controls", "canny"), 24, (1, 4, 4))
    added = decoding([Hint(maps())])
    assert added.shape == (3, 2, 16, 24) and not added.any()
    (added - 1).square().sum().backward()
    assert decoding.layers[0].fc2.weight.grad.any(), "but it can learn"  # type: ignore[union-attr]


def test_the_null_control_adds_exactly_nothing(small: Callable[..., Any]) -> None:
    decoding = made(small)
    assert torch.equal(decoding.added(torch.zeros(2, 16, 32)), torch.zeros(3, 2, 16, 24))
    dropped = decoding([Hint(maps())], torch.tensor([True, False]))
    assert not dropped[:, 0].any() and torch.equal(dropped[:, 1], decoding([Hint(maps())])[:, 1])
    assert dropped[:, 1].std() > 0.1


def test_a_token_of_control_depends_on_its_map_and_the_layers_differ(small: Callable[..., Any]) -> None:
    decoding = made(small)
    added = decoding([Hint(maps())])
    assert not torch.allclose(added[0], added[1], atol=0.1) and not torch.allclose(added[:, 0], added[:, 1], atol=0.1)
    assert torch.allclose(decoding([Hint(maps()[1:])]), added[:, 1:], atol=1e-5), "rows do not meet"


def test_strength_region_and_mixture(small: Callable[..., Any]) -> None:
    decoding = made(small)
    first, second = maps(), maps().flip(-1)
    plain, other = decoding([Hint(first)]), decoding([Hint(second)])
    assert torch.allclose(decoding([Hint(first, 0.6)]), 0.6 * plain, atol=1e-6)
    each = decoding([Hint(first, (0.0, 0.5, 2.0))])
    assert not each[0].any() and torch.allclose(
        each[1:], torch.tensor([0.5, 2.0]).view(2, 1, 1, 1) * plain[1:], atol=1e-5
    )
    region = torch.arange(16).remainder(2).float()[None]
    within = decoding([Hint(first, 1.0, region)])
    assert not within[:, :, ::2].any() and torch.equal(within[:, :, 1::2], plain[:, :, 1::2])
    mixed = decoding([Hint(first, 0.5, region), Hint(second, 2.0, 1 - region)])
    assert torch.allclose(mixed[:, :, 1::2], 0.5 * plain[:, :, 1::2], atol=1e-6)
    assert torch.allclose(mixed[:, :, ::2], 2 * other[:, :, ::2], atol=1e-5)
    with pytest.raises(UserError, match="2 control strengths for 3 injections"):
        decoding([Hint(first, (1.0, 2.0))])


def test_hints_of_a_batch() -> None:
    hint = Hint(maps(), 0.5)
    assert hints_of({}) == [] and hints_of({"hints": [hint], "map": maps()}) == [hint]
    assert torch.equal(hints_of({"map": maps()})[0].map, maps()) and hints_of({"map": maps()})[0].strength == 1


@pytest.mark.parametrize("stride", [4, 8, 16])
@pytest.mark.parametrize("grid", [(1, 4, 4), (1, 2, 5), (2, 3, 4)])
def test_one_token_for_each_cell_at_every_stride(small: Callable[..., Any], stride: int, grid: Any) -> None:
    decoding = made(small, grid)
    frames, rows, columns = grid
    given = maps(2, rows * stride, columns * stride, frames)
    added = decoding([Hint(given)])
    assert added.shape == (3, 2, frames * rows * columns, 24) and added.isfinite().all()
    if frames == 2:  # frames are read one by one
        alone = made(small, (1, rows, columns))([Hint(given[:, 1:])])
        assert torch.allclose(alone, added[:, :, rows * columns :], atol=1e-5)


@pytest.mark.parametrize(
    "shape", [(2, 1, 3, 16, 20), (2, 1, 1, 16, 16), (2, 2, 3, 16, 16), (2, 3, 16, 16), (2, 1, 3, 2, 2)]
)
def test_maps_that_do_not_cover_the_grid_are_refused(small: Callable[..., Any], shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"the control map is \[.*resize it to the image's size"):
        made(small)([Hint(torch.zeros(shape))])


# ----------------------------------------------------------------------------------------------------- encoder


def test_the_small_encoder_is_a_vit_without_class_token() -> None:
    torch.manual_seed(0)
    encoder = ControlEncoder(TINY).eval()
    images = maps()[:, 0]
    assert torch.allclose(encoder(images, (4, 4)), encoder.vit(images), atol=1e-5), "as timm itself runs it"
    assert encoder(images, (6, 5)).shape == (2, 30, 16)
    with pytest.raises(UserError, match=r"width 16 must be a multiple of its heads 3"):
        ControlEncoder(replace(TINY, heads=3))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_little_patch16_reg4_gap_256"])
def test_a_vit_of_timm_by_name(name: str, tmp_path: Path) -> None:
    """Also its pretrained weights: any file that timm itself would take."""
    import timm
    from safetensors.torch import save_file

    torch.manual_seed(0)
    source = timm.create_model(name, pretrained=False, num_classes=0, dynamic_img_size=True).eval()
    save_file({k: v.contiguous() for k, v in source.state_dict().items()}, tmp_path / "vit.safetensors")
    encoder = ControlEncoder(EncoderConfig(name, weights=tmp_path / "vit.safetensors")).eval()
    images = maps(1, *source.patch_embed.img_size)[:, 0]
    encoder.load_pretrained()
    with torch.no_grad():
        cells = source.patch_embed.grid_size
        wanted = source.forward_features(images)[:, source.num_prefix_tokens :]
        assert torch.allclose(encoder(images, cells), wanted, atol=1e-4)
        assert encoder(images, (2, 3)).shape == (1, 6, source.embed_dim)


def test_encoder_names_and_weights_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no ViT of timm"):
        ControlEncoder(EncoderConfig("vit_of_nobody"))
    with pytest.raises(UserError, match="is a Eva; name a plain ViT of timm"), torch.device("meta"):
        ControlEncoder(EncoderConfig("eva02_tiny_patch14_224"))
    with pytest.raises(UserError, match=r"weights .*none\.pth do not exist"):
        ControlEncoder(EncoderConfig("vit_tiny_patch16_224", weights=tmp_path / "none.pth")).load_pretrained()
    (tmp_path / "bad.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"bad\.safetensors are not vit_tiny_patch16_224's"):
        ControlEncoder(EncoderConfig("vit_tiny_patch16_224", weights=tmp_path / "bad.safetensors")).load_pretrained()
    with pytest.raises(UserError, match="belong to a ViT of timm"):
        ControlEncoder(replace(TINY, weights=tmp_path)).load_pretrained()


def test_fourteen_pixels_of_sixteen() -> None:
    """DINOv2 reads a map of 16-pixel cells at 14/16 of its size; nearest keeps canny's two values."""
    edges = torch.where(maps()[:, 0] > 0, 1.0, -1.0)
    small = resized(edges, (14, 14), "nearest")
    assert small.shape[-2:] == (14, 14) and set(small.unique().tolist()) == {-1.0, 1.0}
    ramp = torch.linspace(-1, 1, 16).expand(1, 3, 16, 16)
    assert torch.allclose(resized(ramp, (14, 14), "bicubic")[..., [0, -1]], torch.tensor([-1.0, 1.0]), atol=1e-5)
    assert resized(ramp, (16, 16), "bicubic") is ramp


# ------------------------------------------------------------------------------------------------------- slots


def test_control_k_belongs_to_the_slot_that_predicts_token_k() -> None:
    control = torch.arange(1.0, 7.0).view(1, 1, 6, 1).expand(3, 2, 6, 4)
    whole = at_slots(control, None, 3, 8)[0, 0, :, 0]
    assert whole.tolist() == [0, 0, 1, 2, 3, 4, 5, 6]
    assert at_slots(control, None, 3, 4)[0, 0, :, 0].tolist() == [0, 0, 1, 2], "a pass over some of the tokens"
    assert at_slots(control, None, 3, 9)[0, 0, :, 0].tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 0]
    assert at_slots(control, None, 3, 2)[0, 0, :, 0].tolist() == [0, 0]
    pos = torch.tensor([[0, 2, 8], [7, 1, 4]])
    assert at_slots(control, pos, 3, 3)[1, :, :, 2].tolist() == [[0, 1, 0], [6, 0, 3]]
