"""What the kinds of control make of pictures, and which given maps they refuse."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from safetensors.torch import save_file

from visgen.config import UserError, build, plugin_config
from visgen.controls import Control
from visgen.controls.seg import colours
from visgen.controls.softedge import HED


def control(kind: str, **values: Any) -> Control:
    return build(plugin_config("visgen.controls", kind, **values))


def photo(side: int = 48) -> np.ndarray:
    rng = np.random.default_rng(0)
    image = Image.new("RGB", (side, side), "white")
    draw = ImageDraw.Draw(image)
    draw.rectangle((8, 8, side // 2, side // 2), fill=(20, 120, 200))
    draw.ellipse((20, 20, side - 6, side - 8), fill=(220, 60, 30))
    return np.clip(np.array(image).astype(int) + rng.integers(-6, 6, (side, side, 3)), 0, 255).astype(np.uint8)


def pixels(image: np.ndarray) -> torch.Tensor:
    return (torch.from_numpy(image).permute(2, 0, 1).float() / 127.5 - 1)[None, None]


# ------------------------------------------------------------------------------------------------------- canny


def test_canny_is_opencvs_of_the_colour_image() -> None:
    image = photo()
    edges = cv2.Canny(image, 100, 200)
    found = control("canny").extract(pixels(image))
    assert 0.02 < (edges > 0).mean() < 0.5
    assert torch.equal((found[0, 0] > 0), torch.from_numpy(edges > 0).expand(3, -1, -1))
    assert set(found.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(control("canny", polarity="dark_on_light").extract(pixels(image)), -found)
    assert (control("canny", low=1500, high=2500).extract(pixels(image)) == 1).sum() < (found == 1).sum()


def test_canny_thresholds_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(UserError, match=r"control\.low 300 must be at most control\.high 200"):
        control("canny", low=300)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda e: 255 - e,
            r"looks like dark lines on light, this checkpoint knows light lines on dark; pass --control",
        ),
        (lambda e: cv2.cvtColor(photo(), cv2.COLOR_RGB2BGR), "is a colour picture, a canny map is grey"),
        (lambda e: e // 2, "has faint lines alone, at most 127 of 255 from their background"),
        (lambda e: cv2.cvtColor(photo(), cv2.COLOR_RGB2GRAY) // 3 + 20, "is mostly grey .* pass it as --control.image"),
    ],
)
def test_what_is_no_canny_map_is_refused(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "x.png"), change(cv2.Canny(photo(), 100, 200)))
    with pytest.raises(UserError, match=message):
        control("canny").read(tmp_path / "x.png")


def test_a_canny_map_is_made_black_and_white_and_may_be_inverted(tmp_path: Path) -> None:
    edges = cv2.Canny(photo(), 100, 200)
    Image.fromarray(edges).save(tmp_path / "a.jpg", quality=90)
    assert set(control("canny").read(tmp_path / "a.jpg").unique().tolist()) == {0, 255}
    cv2.imwrite(str(tmp_path / "b.png"), 255 - edges)
    values = control("canny").read(tmp_path / "b.png", invert=True)
    assert torch.equal(values, torch.from_numpy(edges).expand(3, -1, -1))


@pytest.mark.parametrize(("kind", "shown"), [("canny", 0), ("lineart", 255)])
def test_transparent_parts_are_background(kind: str, shown: int, tmp_path: Path) -> None:
    clear = Image.new("RGBA", (24, 24), (128, 128, 128, 0))
    ImageDraw.Draw(clear).line((2, 2, 20, 9), fill=(255 - shown,) * 3 + (255,))
    clear.save(tmp_path / "x.png")
    assert int(control(kind).read(tmp_path / "x.png")[0, -1, -1]) == shown


# -------------------------------------------------------------------------------------------------- soft edges


def test_hed_mixes_the_upsampled_sides(tmp_path: Path) -> None:
    """Against the definition, block by block."""
    torch.manual_seed(0)
    network = HED().eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.025 if parameter.ndim > 1 else 0.1)
    image = pixels(photo(37))[0]
    x = (image.flip(1) + 1) * 127.5 - torch.tensor([104.00699, 116.66877, 122.67892]).view(1, 3, 1, 1)
    total = network.fuse.bias.view(1, 1, 1, 1).expand(1, 1, 37, 37)
    for i, block in enumerate(network.blocks):
        x = x if i == 0 else torch.nn.functional.max_pool2d(x, 2, ceil_mode=True)
        for conv in block.children():
            x = conv(x).relu()
        side = torch.nn.functional.interpolate(network.side[i](x), (37, 37), mode="bilinear")
        total = total + network.fuse.weight[0, i] * side
    wanted = total.sigmoid()
    assert wanted.std() > 1e-3 and torch.allclose(network(image), wanted, atol=1e-5)
    save_file({k: v.half().contiguous() for k, v in network.state_dict().items()}, tmp_path / "hed.safetensors")
    soft = control("softedge", weights=tmp_path / "hed.safetensors")
    soft.ready()
    found = soft.extract(image[None])
    assert found.shape == (1, 1, 3, 37, 37) and torch.allclose(found[0, :, :1] / 2 + 0.5, wanted, atol=0.02)


def test_enlarged_images_are_read_at_the_larger_size(tmp_path: Path) -> None:
    torch.manual_seed(0)
    save_file({k: v.contiguous() for k, v in HED().state_dict().items()}, tmp_path / "hed.safetensors")
    image = pixels(photo(32))
    found = {}
    for times in (1, 3):
        soft: Any = control("softedge", weights=tmp_path / "hed.safetensors", enlarge=times)
        soft.ready()
        found[times] = soft.extract(image)
        large = torch.nn.functional.interpolate(image[0], scale_factor=times, mode="bilinear")
        wanted = torch.nn.functional.avg_pool2d(soft.network(large), times) * 2 - 1
        assert found[times].shape == image.shape and torch.allclose(found[times][0, :, :1], wanted, atol=1e-5)
    assert not torch.allclose(found[1], found[3], atol=1e-4)


def test_hed_weights_that_are_missing_or_others_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"softedge: needs weights; .*visgen\.convert hed"):
        control("softedge").ready()
    with pytest.raises(UserError, match=r"softedge: weights .*x\.safetensors do not exist"):
        control("softedge", weights=tmp_path / "x.safetensors").ready()
    save_file({"fuse.weight": torch.zeros(1)}, tmp_path / "y.safetensors")
    with pytest.raises(UserError, match=r"y\.safetensors does not hold HED"):
        control("softedge", weights=tmp_path / "y.safetensors").ready()


# ------------------------------------------------------------------------------------------------------- depth


def test_depth_maps_of_any_depth(tmp_path: Path) -> None:
    depth = np.linspace(1000, 3000, 12 * 10).reshape(12, 10)
    np.save(tmp_path / "a.npy", depth.astype(np.float32))
    Image.fromarray(depth.astype(np.uint16)).save(tmp_path / "b.png")
    for name in ("a.npy", "b.png"):
        values = control("depth").read(tmp_path / name)
        assert values.shape == (3, 12, 10) and (int(values.min()), int(values.max())) == (0, 255)
        largest = control("depth", norm="max").read(tmp_path / name)
        assert (int(largest.min()), int(largest.max())) == (85, 255)
    assert torch.equal(
        control("depth").read(tmp_path / "a.npy", invert=True), 255 - control("depth").read(tmp_path / "a.npy")
    )
    np.save(tmp_path / "flat.npy", np.ones((4, 4)))
    assert control("depth").read(tmp_path / "flat.npy").max() == 0
    Image.fromarray(np.arange(16, dtype=np.uint8).reshape(4, 4)).save(tmp_path / "c.png")
    assert control("depth").read(tmp_path / "c.png")[0].flatten().tolist() == list(range(16)), (
        "8 bits are taken as they are"
    )


def test_depth_arrays_that_are_no_depth_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3, 4, 5)))
    with pytest.raises(UserError, match=r"a\.npy holds float64 \[2, 3, 4, 5\]; give finite depths"):
        control("depth").read(tmp_path / "a.npy")
    broken = np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
    broken[0, 0] = np.nan
    Image.fromarray(broken).save(tmp_path / "nan.tif")
    np.save(tmp_path / "empty.npy", np.zeros((0, 5)))
    np.save(tmp_path / "far.npy", np.full((4, 4), 1e300))
    for name in ("nan.tif", "empty.npy", "far.npy"):
        with pytest.raises(UserError, match=rf"{name} holds float64 \[.*\]; give finite depths"):
            control("depth").read(tmp_path / name)
    (tmp_path / "b.npy").write_bytes(b"no array")
    with pytest.raises(UserError, match=r"b\.npy cannot be read"):
        control("depth").read(tmp_path / "b.npy")
    Image.fromarray(photo()).save(tmp_path / "c.png")
    with pytest.raises(UserError, match="is a colour picture, a depth map is grey"):
        control("depth").read(tmp_path / "c.png")


def test_depth_of_a_local_network(tmp_path: Path) -> None:
    import transformers

    backbone = transformers.Dinov2Config(
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=28,
        out_indices=[1, 2, 3, 4],
        reshape_hidden_states=False,
        apply_layernorm=True,
    )
    settings = transformers.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=16,
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
        head_hidden_size=4,
    )
    torch.manual_seed(0)
    transformers.DepthAnythingForDepthEstimation(settings).save_pretrained(tmp_path)
    transformers.DPTImageProcessor(size={"height": 28, "width": 28}).save_pretrained(tmp_path)
    depth = control("depth", network=str(tmp_path))
    depth.ready()
    found = depth.extract(pixels(photo(40)).expand(2, 1, 3, 40, 40))
    assert found.shape == (2, 1, 3, 40, 40) and found.min() == -1 and found.max() == 1 and found.unique().numel() > 50
    with pytest.raises(UserError, match="is no depth network"):
        control("depth", network=str(tmp_path / "nowhere")).ready()


# --------------------------------------------------------------------------------------------------------- seg


def test_labels_of_a_local_network(tmp_path: Path) -> None:
    import transformers

    settings = transformers.SegformerConfig(
        num_encoder_blocks=1,
        depths=[1],
        sr_ratios=[1],
        hidden_sizes=[8],
        patch_sizes=[3],
        strides=[2],
        num_attention_heads=[1],
        mlp_ratios=[1],
        decoder_hidden_size=8,
        num_labels=5,
    )
    torch.manual_seed(0)
    transformers.SegformerForSemanticSegmentation(settings).save_pretrained(tmp_path)
    transformers.SegformerImageProcessor(size={"height": 24, "width": 24}).save_pretrained(tmp_path)
    seg: Any = control("seg", network=str(tmp_path))
    seg.ready()
    given = pixels(photo(40)).expand(2, 1, 3, 40, 40)
    labels, found = seg.labels(given), seg.extract(given)
    assert labels.shape == (2, 1, 40, 40) and labels.unique().numel() > 1 and labels.max() < 5
    assert torch.equal(((found[0, 0] + 1) * 127.5).round().byte().permute(1, 2, 0), colours()[labels[0, 0]])


def test_label_maps_get_the_colours_of_the_devkit(tmp_path: Path) -> None:
    assert colours()[:5].tolist() == [[0, 0, 0], [128, 0, 0], [0, 128, 0], [128, 128, 0], [0, 0, 128]]
    assert len({tuple(c) for c in colours().tolist()}) == 256
    numbers = np.array([[0, 1], [2, 4]], dtype=np.uint8)
    palette = Image.fromarray(numbers).convert("P")
    palette.putdata(numbers.flatten().tolist())
    palette.putpalette([9] * 768)
    for name, picture in (("l.png", Image.fromarray(numbers)), ("p.png", palette)):
        picture.save(tmp_path / name)
        values = control("seg").read(tmp_path / name)
        assert values.permute(1, 2, 0).flatten(0, 1).tolist() == colours()[[0, 1, 2, 4]].tolist()
    Image.fromarray(photo()).save(tmp_path / "c.png")
    assert torch.equal(control("seg").read(tmp_path / "c.png"), torch.from_numpy(photo()).permute(2, 0, 1))
    with pytest.raises(UserError, match="invert has no meaning"):
        control("seg").read(tmp_path / "c.png", invert=True)


def deep(values: np.ndarray) -> dict[str, Image.Image]:
    alpha = Image.new("L", (values.shape[1], values.shape[0]), 255)
    return {
        "16.png": Image.fromarray(values.astype(np.uint16)),
        "32.tif": Image.fromarray(values.astype(np.int32)),
        "float.tif": Image.fromarray(values.astype(np.float32)),
        "alpha.png": Image.merge("LA", [Image.fromarray(values.astype(np.uint8)), alpha]),
    }


def test_label_maps_of_any_depth_keep_their_numbers(tmp_path: Path) -> None:
    numbers = np.array([[0, 1], [2, 255]])
    for name, picture in deep(numbers).items():
        picture.save(tmp_path / name)
        values = control("seg").read(tmp_path / name)
        assert values.permute(1, 2, 0).flatten(0, 1).tolist() == colours()[[0, 1, 2, 255]].tolist(), name


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (np.array([[0, 256]], np.uint16), "256"),
        (np.array([[0, -1]], np.int32), "-1"),
        (np.array([[0, 1.5]], np.float32), "1.5"),
        (np.array([[0, np.nan]], np.float32), "nan"),
    ],
)
def test_what_is_no_class_number_is_refused(values: np.ndarray, named: str, tmp_path: Path) -> None:
    Image.fromarray(values).save(tmp_path / "x.tif")
    with pytest.raises(UserError, match=rf"x\.tif holds {named}, which is no class number; allowed: 0 to 255"):
        control("seg").read(tmp_path / "x.tif")


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_label_maps_of_few_bits_are_not_stretched(bits: int, tmp_path: Path) -> None:
    """Pillow shows the largest value of 4 bits as 255."""
    numbers = [0, 1] * 4 if bits == 1 else [0, 1, 2, 3] * 2
    row = int("".join(format(n, f"0{bits}b") for n in numbers), 2).to_bytes(bits)
    header = struct.pack(">IIBBBBB", 8, 1, bits, 0, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n"
    for name, chunk in ((b"IHDR", header), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")):
        data += struct.pack(">I", len(chunk)) + name + chunk + struct.pack(">I", zlib.crc32(name + chunk))
    (tmp_path / "x.png").write_bytes(data)
    assert control("seg").read(tmp_path / "x.png")[:, 0].T.tolist() == colours()[numbers].tolist()


@pytest.mark.parametrize("largest", [20, 255, 300])
def test_a_pgm_may_name_its_largest_class(largest: int, tmp_path: Path) -> None:
    numbers = [0, 1, 7, 20]
    (tmp_path / "x.pgm").write_bytes(
        f"P5\n4 1\n{largest}\n".encode() + np.array(numbers, ">u2" if largest > 255 else "u1").tobytes()
    )
    assert control("seg").read(tmp_path / "x.pgm")[:, 0].T.tolist() == colours()[numbers].tolist()
