import pytest
import torch

from visgen.config import UserError
from visgen.metrics.frechet import Moments
from visgen.metrics.images import ImageAudit, as_frames, to_uint8
from visgen.metrics.inception_score import InceptionScore
from visgen.metrics.kid import FeatureBank
from visgen.metrics.recon import ReconMeter

LEVELS = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_to_uint8_returns_every_level(dtype):
    pixels = (LEVELS.double() / 127.5 - 1).to(dtype)
    assert torch.equal(to_uint8(pixels), LEVELS)


def test_bfloat16_arithmetic_would_lose_levels():
    pixels = (LEVELS.double() / 127.5 - 1).to(torch.bfloat16)
    wrong = (127.5 * pixels + 128).clamp(0, 255).to(torch.uint8)
    assert int((wrong != LEVELS).sum()) == 63


def test_to_uint8_clamps_and_rounds_half_up():
    pixels = torch.tensor([-1.03, -1.0, 0.0, 0.9999, 1.0, 1.4, 7.0])
    assert to_uint8(pixels).tolist() == [0, 0, 128, 255, 255, 255, 255]
    assert torch.equal(to_uint8(LEVELS), LEVELS)


def test_as_frames_takes_images_and_videos_and_refuses_grey():
    assert as_frames(torch.zeros(2, 5, 3, 8, 8)).shape == (10, 3, 8, 8)
    with pytest.raises(UserError, match=r"\(2, 1, 8, 8\).*grey repeated to RGB"):
        as_frames(torch.zeros(2, 1, 8, 8))


def _images(n):
    return torch.randint(0, 256, (n, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_audit_is_the_same_for_any_split_and_sees_twins():
    images = _images(10)
    images[7] = images[2]
    whole = ImageAudit(10)
    whole.update(images, torch.arange(10))
    shares = [ImageAudit(10) for _ in range(3)]
    for rank, share in enumerate(shares):
        for i in range(rank, 10, 3):
            share.update(images[i : i + 1], torch.tensor([i]))
    total = ImageAudit(10)
    for name in ("seen", "keys", "counts"):
        setattr(total, name, sum(getattr(share, name) for share in shares))
    assert total.hash == whole.hash and total.checks() == whole.checks()
    assert whole.checks() == {"images": 10, "unique_images": 9, "clipped_fraction": 0.0}
    swapped = ImageAudit(10)
    swapped.update(images.flip(0), torch.arange(10))
    assert swapped.hash != whole.hash


def test_audit_counts_clipped_and_missing():
    pixels = torch.zeros(4, 3, 8, 8)
    pixels[1, 0, 0, :3] = 1.5
    audit = ImageAudit(5)
    assert audit.update(pixels, torch.arange(4)).dtype == torch.uint8
    with pytest.raises(UserError, match=r"image 4 \(0 times"):
        audit.checks()
    audit.update(pixels[:1], torch.tensor([4]))
    checks = audit.checks()
    assert checks["clipped_fraction"] == pytest.approx(3 / (5 * 192))
    audit.update(pixels[:1], torch.tensor([4]))
    with pytest.raises(UserError, match=r"image 4 \(2 times"):
        audit.require_complete()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_never_scored(value):
    pixels, features = torch.zeros(3, 3, 8, 8), torch.zeros(3, 5)
    pixels[1, 2, 7, 7], features[1, 4] = value, value
    index = torch.tensor([6, 4, 8])
    with pytest.raises(UserError, match="pixels of image 4 are not finite"):
        ImageAudit(9).update(pixels, index)
    with pytest.raises(UserError, match="pixels of image 1 are not finite"):
        ReconMeter().update(torch.zeros(3, 3, 8, 8), pixels)
    for refuse in (Moments(5, 9, 3).update, FeatureBank(5, 9).update, InceptionScore(5, 9).update):
        with pytest.raises(UserError, match="image 4 are not finite"):
            refuse(features, index)
