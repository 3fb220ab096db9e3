import math

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from visgen.config import UserError
from visgen.metrics.recon import CodeUsage, ReconMeter, psnr, ssim


def _pair(n=3, size=24, noise=20):
    g = torch.Generator().manual_seed(0)
    coarse = torch.rand(n, 3, 5, 5, generator=g)
    a = torch.nn.functional.interpolate(coarse, size=(size, size + 3), mode="bicubic").clamp(0, 1) * 255
    b = (a + noise * torch.randn(a.shape, generator=g)).clamp(0, 255)
    return a.to(torch.uint8), b.to(torch.uint8)


def test_psnr_equals_skimage():
    a, b = _pair()
    for i, value in enumerate(psnr(a, b)):
        expected = peak_signal_noise_ratio(a[i].numpy() / 255, b[i].numpy() / 255, data_range=1)
        assert float(value) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("data_range", [1.0, 2.0])
@pytest.mark.parametrize("noise", [3, 40])
def test_ssim_equals_skimage(data_range, noise):
    a, b = _pair(noise=noise)
    for i, value in enumerate(ssim(a, b, data_range)):
        left, right = (v[i].permute(1, 2, 0).numpy() / 255 for v in (a, b))
        expected = structural_similarity(left, right, data_range=data_range, channel_axis=2)
        assert float(value) == pytest.approx(expected, abs=1e-6)


def test_floats_are_rounded_to_uint8_first():
    a, b = _pair()
    offset = 0.4 / 127.5  # below half a level
    assert torch.equal(psnr(a, b), psnr(a, b.float() / 127.5 - 1 + offset))
    assert torch.equal(ssim(a.float() / 127.5 - 1, b), ssim(a, b))


def test_identity_is_perfect_and_counted():
    a, b = _pair()
    meter = ReconMeter()
    meter.update(a, a)
    meter.update(a[:1], b[:1])
    scores = meter.scores()
    assert scores["psnr"].terms == {"n_inf": 3} and scores["psnr"].n == 4
    assert scores["psnr"].value == pytest.approx((300 + float(psnr(a[:1], b[:1]))) / 4)
    assert float(ssim(a, a).min()) == pytest.approx(1, abs=1e-12)
    one_pixel = a.clone()
    one_pixel[0, 0, 0, 0] ^= 1
    assert float(psnr(a, one_pixel)[0]) < 100


def _distance(x, y):
    assert x.dtype == torch.float32 and x.min() >= -1 and x.max() <= 1
    return (x - y).abs().mean((1, 2, 3))


def test_meter_merges_and_carries_errors():
    a, b = _pair(8)
    whole, shares = (
        ReconMeter(_distance, "vgg_hed", llamagen_ssim=True),
        [ReconMeter(_distance, "vgg_hed", llamagen_ssim=True) for _ in "ab"],
    )
    per_image = whole.update(a.unsqueeze(1), b.unsqueeze(1))  # video layout, T = 1
    for rank, share in enumerate(shares):
        share.update(a[rank::2], b[rank::2])
    others = iter((shares[1].sums, shares[1].counts))
    shares[0].reduce(lambda t: t + next(others))
    ours, theirs = shares[0].scores(), whole.scores()
    assert set(ours) == {"psnr", "ssim", "ssim_llamagen", "vgg_hed", "psnr_pooled"}
    for name in ours:
        assert ours[name].value == pytest.approx(theirs[name].value, rel=1e-12)
    assert theirs["ssim"].value == pytest.approx(float(per_image["ssim"].mean()), rel=1e-12)
    assert theirs["ssim"].se == pytest.approx(float(per_image["ssim"].std() / math.sqrt(8)), rel=1e-9)
    assert theirs["ssim_llamagen"].value > theirs["ssim"].value
    mse = ((a.double() - b.double()) / 255).square().mean()
    assert theirs["psnr_pooled"].value == pytest.approx(float(-10 * mse.log10()), rel=1e-9)


def test_code_usage():
    usage = CodeUsage(8)
    usage.update(torch.arange(8).repeat(5).reshape(4, 10))
    scores = usage.scores()
    assert scores["usage"].value == 1 and scores["perplexity"].value == pytest.approx(8)
    assert scores["bits_per_token"].value == pytest.approx(3) and scores["usage_99"].value == 1
    assert scores["usage"].n == 40 and usage.dead == []
    constant = CodeUsage(8)
    constant.update(torch.full((2, 100), 3))
    scores = constant.scores()
    assert scores["perplexity"].value == pytest.approx(1) and scores["usage"].value == 1 / 8
    assert constant.dead == [0, 1, 2, 4, 5, 6, 7]


def test_usage_99_leaves_out_the_rare_codes():
    usage = CodeUsage(8)
    usage.update(torch.arange(4).repeat_interleave(torch.tensor([450, 500, 10, 40])))
    scores = usage.scores()
    assert scores["usage"].value == 4 / 8 and scores["usage_99"].value == 3 / 8  # 0.5 + 0.45 + 0.04
    p = np.array([0.5, 0.45, 0.04, 0.01])
    assert scores["perplexity"].value == pytest.approx(np.exp(-(p * np.log(p)).sum()))


def test_code_usage_merges():
    shares = [CodeUsage(16), CodeUsage(16)]
    ids = torch.randint(0, 16, (2, 50), generator=torch.Generator().manual_seed(0))
    for share, row in zip(shares, ids, strict=True):
        share.update(row)
    shares[0].reduce(lambda t: t + shares[1].counts)
    assert torch.equal(shares[0].counts, ids.flatten().bincount(minlength=16))


def test_errors():
    a, b = _pair()
    with pytest.raises(UserError, match=r"shapes .* compare images of one crop"):
        psnr(a, b[..., 1:])
    with pytest.raises(UserError, match="6x6 px are smaller than its window of 7"):
        ssim(a[..., :6, :6], b[..., :6, :6])
    with pytest.raises(UserError, match="no image was reconstructed"):
        ReconMeter().scores()
    with pytest.raises(UserError, match="no code was counted"):
        CodeUsage(4).scores()
    for bad in (-1, 4):
        with pytest.raises(UserError, match=rf"code {bad} is outside the vocabulary 0\.\.3"):
            CodeUsage(4).update(torch.tensor([0, bad]))
