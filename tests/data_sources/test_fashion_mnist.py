"""`fashion_mnist`: idx parsing, padding, augmentation, what it says when files are missing or damaged."""

import gzip

import numpy as np
import pytest
import torch

from visgen.config import UserError, build, plugin_config
from visgen.data import fashion_mnist


def idx(array):
    header = (0x800 + array.ndim).to_bytes(4, "big") + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return header + array.astype(np.uint8).tobytes()


PIXELS = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
LABELS = np.arange(12) % 10


def write(root, images=PIXELS, labels=LABELS, stem="train", pack=True):
    root.mkdir(parents=True, exist_ok=True)
    for name, array in ((f"{stem}-images-idx3-ubyte", images), (f"{stem}-labels-idx1-ubyte", labels)):
        data = array if isinstance(array, bytes) else idx(array)
        (root / f"{name}{'.gz' if pack else ''}").write_bytes(gzip.compress(data) if pack else data)
    return root


def fashion(root, split="train", **options):
    return build(plugin_config("visgen.data", "fashion_mnist", root=root, **options), split)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("inner", ["", "FashionMNIST/raw"])
def test_pixels_are_padded_with_zeros_and_grey(tmp_path, pack, inner):
    write(tmp_path / inner, pack=pack)
    data = fashion(tmp_path)
    assert (len(data), data.image_size, len(data.classes)) == (12, (32, 32), 10)
    sample = data.get(7)
    pixels = sample["pixels"]
    assert (pixels.shape, pixels.dtype, sample["label"]) == ((1, 3, 32, 32), torch.uint8, 7)
    assert np.array_equal(pixels[0, 1, 2:-2, 2:-2].numpy(), PIXELS[7])
    border = pixels.clone()
    border[..., 2:-2, 2:-2] = 0
    assert border.sum() == 0
    assert torch.equal(pixels[:, 0], pixels[:, 2])
    many = data.get_many([7, 0])
    assert torch.equal(many["pixels"], torch.stack([data.get(7)["pixels"], data.get(0)["pixels"]]))
    assert many["label"].tolist() == [7, 0]


def test_held_out_is_the_test_set(tmp_path):
    write(tmp_path)
    write(tmp_path, PIXELS[:3], LABELS[:3], stem="t10k")
    assert len(fashion(tmp_path, "held_out")) == 3


def test_augmentation(tmp_path):
    write(tmp_path)
    write(tmp_path, stem="t10k")
    plain = fashion(tmp_path).get(0)["pixels"]
    data = fashion(tmp_path, hflip=True, shift=2)
    assert torch.equal(data.get(0)["pixels"], plain)
    seen = set()
    for seed in range(200):
        pixels = data.get(0, np.random.default_rng(seed))["pixels"]
        rows = pixels[0, 0].sum(1).nonzero().flatten()
        columns = pixels[0, 0].sum(0).nonzero().flatten()
        cut = pixels[0, 0, rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        mirrored = not torch.equal(cut, plain[0, 0, 2:-2, 2:-2])
        assert torch.equal(cut.flip(-1) if mirrored else cut, plain[0, 0, 2:-2, 2:-2])  # nothing wraps around
        seen.add((int(rows[0]), int(columns[0]), mirrored))
    assert len(seen) == 50  # 5 x 5 shifts x mirror
    held = fashion(tmp_path, "held_out", hflip=True, shift=2)
    assert torch.equal(held.get(0, np.random.default_rng(1))["pixels"], plain)
    with pytest.raises(UserError, match=r"data\.shift 3 must lie in 0\.\.2"):
        fashion(tmp_path, shift=3)


def test_missing_files_name_both_remedies(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"train-images.*apt install dataset-fashion-mnist.*--data\.download"):
        fashion(tmp_path)
    monkeypatch.setattr(fashion_mnist, "SEARCHED", (tmp_path / "a", tmp_path / "b"))
    with pytest.raises(UserError, match=r"a or .*b; `apt install"):
        fashion(None)


def test_download_goes_through_torchvision(tmp_path, monkeypatch):
    import torchvision.datasets

    def download(root, download):
        assert download
        write(tmp_path / "FashionMNIST" / "raw")

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", download)
    assert len(fashion(tmp_path, download=True)) == 12

    def offline(root, download):
        raise RuntimeError("Error\ndownloading")

    monkeypatch.setattr(torchvision.datasets, "FashionMNIST", offline)
    with pytest.raises(UserError, match=r"cannot be downloaded to .* \(Error downloading\)"):
        fashion(tmp_path / "other", download=True)


def test_damaged_files(tmp_path):
    root = write(tmp_path)
    path = root / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"train-images-idx3-ubyte\.gz cannot be read .* truncated or damaged"):
        fashion(root)
    path.write_bytes(b"not gzip")
    with pytest.raises(UserError, match="truncated or damaged"):
        fashion(root)
    path.write_bytes(gzip.compress(idx(PIXELS)[:-1]))
    with pytest.raises(UserError, match=r"holds 9407 bytes of \(12, 28, 28\)"):
        fashion(root)
    path.write_bytes(gzip.compress(idx(LABELS)))
    with pytest.raises(UserError, match=r"begins with 0x0801, .* 0x0803"):
        fashion(root)


@pytest.mark.parametrize(
    ("images", "labels", "text"),
    [
        (PIXELS, LABELS[:-1], "12 images but .* 11 labels"),
        (PIXELS, LABELS + 1, r"label 10, Fashion-MNIST's are 0\.\.9"),
        (PIXELS[:, :27], LABELS, "27 x 28"),
    ],
)
def test_files_that_do_not_fit(tmp_path, images, labels, text):
    with pytest.raises(UserError, match=text):
        fashion(write(tmp_path, images, labels))


def test_ten_crop_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"'fashion_mnist' has no 'ten_crop' views; allowed: center, flip"):
        fashion(write(tmp_path)).views([0], "ten_crop")


@pytest.mark.skipif(not fashion_mnist.SEARCHED[0].is_dir(), reason="apt install dataset-fashion-mnist")
def test_the_real_test_set():
    data = fashion(None, "held_out")
    assert len(data) == 10_000
    assert torch.bincount(data.labels).tolist() == [1000] * 10
    assert data.classes[data.get(0)["label"]] == "Ankle boot"
    mean = data.get_many(range(10_000))["pixels"].float().mean().item()
    assert mean == pytest.approx(73.15 * 28**2 / 32**2, abs=0.1)  # 0.2868 of 255 over the 28 x 28 images
