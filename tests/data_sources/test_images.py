"""Decoding of every kind of image file, and the crops against naive implementations."""

from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import functional as tv

from visgen.config import UserError
from visgen.data import _images as images


def noise(width, height, seed=0):
    """Smooth-ish noise, so that resampling errors show but do not alias."""
    small = np.random.default_rng(seed).integers(0, 256, (height // 3 + 2, width // 3 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BILINEAR)


def resample(array, length, kernel, support):
    """Naive antialiased resampling of axis 0 with rounding to bytes: weights of the source centres, normalised."""
    scale = len(array) / length
    stretch = max(scale, 1.0)
    out = np.zeros((length, *array.shape[1:]))
    for i in range(length):
        centre = (i + 0.5) * scale
        first, last = max(0, int(centre - support * stretch + 0.5)), int(centre + support * stretch + 0.5)
        at = np.arange(first, min(last, len(array)))
        weight = np.array([kernel((x + 0.5 - centre) / stretch) for x in at])
        out[i] = np.tensordot(weight / weight.sum(), array[at].astype(float), 1)
    return np.clip(np.floor(out + 0.5), 0, 255)


def box(x):
    return 1.0 if -0.5 < x <= 0.5 else 0.0


def cubic(x, a=-0.5):
    x = abs(x)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


def naive_adm(image, size):
    array = np.asarray(image)

    def both(array, width, height, kernel, support):
        wide = resample(array.transpose(1, 0, 2), width, kernel, support).transpose(1, 0, 2)
        return resample(wide, height, kernel, support)

    while min(array.shape[:2]) >= 2 * size:
        array = both(array, array.shape[1] // 2, array.shape[0] // 2, box, 0.5)
    scale = size / min(array.shape[:2])
    array = both(array, round(array.shape[1] * scale), round(array.shape[0] * scale), cubic, 2.0)
    top, left = (array.shape[0] - size) // 2, (array.shape[1] - size) // 2
    return array[top : top + size, left : left + size]


@pytest.mark.parametrize(("width", "height"), [(173, 97), (41, 88), (40, 40), (20, 31), (13, 17), (79, 200)])
def test_center_crop_is_adms(width, height):
    image = noise(width, height)
    found = np.asarray(images.center_crop(image, 20)).astype(int)
    assert found.shape == (20, 20, 3)
    assert np.abs(found - naive_adm(image, 20)).max() <= 1  # Pillow rounds its weights


def test_center_crop_leaves_an_image_of_that_size_alone():
    image = noise(32, 32)
    assert np.array_equal(np.asarray(images.center_crop(image, 32)), np.asarray(image))


@pytest.mark.parametrize("size", [16, 33])
def test_ten_crop_is_torchvisions(size):
    image = noise(120, 77)
    square = images.center_crop(image, int(size * 1.1))
    expected = tv.ten_crop(square, [size, size])
    for ours, theirs in zip(images.ten_crop(image, size, 1.1), expected, strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    with pytest.raises(UserError, match=r"crop range 0\.9"):
        images.ten_crop(image, size, 0.9)


def test_random_crop_covers_its_range_and_repeats():
    image = noise(64, 48)
    crops = [np.asarray(images.random_crop(image, 16, np.random.default_rng(i))) for i in range(40)]
    again = [np.asarray(images.random_crop(image, 16, np.random.default_rng(i))) for i in range(40)]
    assert all(c.shape == (16, 16, 3) for c in crops)
    assert all(np.array_equal(a, b) for a, b in zip(crops, again, strict=True))
    assert len({c.tobytes() for c in crops}) > 30

    sides = set()

    class Spy:
        def __init__(self, seed):
            self.rng, self.calls = np.random.default_rng(seed), 0

        def integers(self, low, high, endpoint):
            value = self.rng.integers(low, high, endpoint=endpoint)
            if self.calls == 0:
                sides.add(int(value))
            self.calls += 1
            return value

    for seed in range(60):
        images.random_crop(image, 16, Spy(seed))
    assert sides == {16, 17, 18, 19, 20}  # [size, ceil(size / 0.8)]


def decoded(image, fmt, **options):
    buffer = BytesIO()
    image.save(buffer, fmt, **options)
    buffer.seek(0)
    return images.read_image(buffer)


def test_alpha_is_composited_on_white():
    rgba = Image.new("RGBA", (4, 2), (200, 0, 0, 0))
    rgba.putpixel((1, 0), (100, 50, 0, 255))
    rgba.putpixel((2, 0), (0, 0, 0, 128))
    for fmt, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        out = np.asarray(decoded(rgba, fmt, **options)).astype(int)
        assert out[0, 0].tolist() == [255, 255, 255]
        assert out[0, 1].tolist() == [100, 50, 0]
        assert np.abs(out[0, 2] - 127).max() <= 1


def test_palette_and_grey_transparency():
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((1, 0), 1)
    assert np.asarray(decoded(palette, "PNG")).tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert np.asarray(decoded(palette, "PNG", transparency=1)).tolist() == [[[10, 20, 30], [255, 255, 255]]]
    la = Image.merge("LA", [Image.new("L", (1, 1), 80), Image.new("L", (1, 1), 0)])
    assert np.asarray(decoded(la, "PNG")).tolist() == [[[255, 255, 255]]]


def test_grey_16_bit_cmyk_and_bilevel():
    values = np.array([[0, 257, 300, 32768, 65535]], dtype=np.uint16)
    out = np.asarray(decoded(Image.fromarray(values), "PNG"))
    assert out[0, :, 0].tolist() == np.round(values[0] / 257).astype(int).tolist()
    assert (out[..., 0] == out[..., 2]).all()
    assert np.asarray(decoded(Image.new("L", (2, 2), 77), "PNG")).reshape(-1, 3).tolist() == [[77] * 3] * 4
    red = np.asarray(decoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=95)).astype(int)
    assert np.abs(red - [255, 0, 0]).max() <= 8
    assert np.asarray(decoded(Image.new("1", (2, 2), 1), "PNG")).min() == 255


def test_exif_orientation():
    image = noise(24, 16)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    turned = decoded(image, "PNG", exif=exif)
    assert np.array_equal(np.asarray(turned), np.rot90(np.asarray(image), -1))


def test_float_pixels_are_refused():
    with pytest.raises(ValueError, match="floats"):
        decoded(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF")


def test_to_pixels():
    image = noise(5, 4)
    pixels = images.to_pixels(image)
    assert pixels.shape == (1, 3, 4, 5)
    assert pixels.dtype == torch.uint8
    assert pixels[0, 2, 3, 1] == image.getpixel((1, 3))[2]
