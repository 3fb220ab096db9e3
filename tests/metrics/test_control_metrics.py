"""Control metrics against their definitions, torchmetrics and scikit-learn-like counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from visgen.config import UserError
from visgen.metrics.control import SMALLEST, Confusion, depth_rmse, edge_counts, f1, ms_ssim


def masks(seed: int = 0, share: float = 0.2) -> torch.Tensor:
    return torch.rand(3, 12, 10, generator=torch.Generator().manual_seed(seed)) < share


def test_f1_counts_pixels() -> None:
    found, wanted = masks(0), masks(1)
    for i in range(3):
        a, b = found[i].numpy(), wanted[i].numpy()
        tp, fp, fn = (a & b).sum(), (a & ~b).sum(), (~a & b).sum()
        assert edge_counts(found, wanted)[:, i].tolist() == [tp, fp, fn]
        assert math.isclose(float(f1(edge_counts(found, wanted))[i]), 2 * tp / (2 * tp + fp + fn))
    assert f1(edge_counts(found, found)).tolist() == [1, 1, 1]


def test_f1_of_empty_maps() -> None:
    none, some = torch.zeros(1, 4, 4, dtype=torch.bool), torch.ones(1, 4, 4, dtype=torch.bool)
    assert f1(edge_counts(none, none)).item() == 1 and f1(edge_counts(none, some)).item() == 0
    assert f1(edge_counts(some, none)).item() == 0


def test_one_pixel_of_tolerance() -> None:
    wanted = torch.zeros(1, 9, 9, dtype=torch.bool)
    wanted[0, :, 4] = True
    for shift, plain, tolerant in ((0, 1.0, 1.0), (1, 0.0, 1.0), (2, 0.0, 0.0)):
        found = wanted.roll(shift, 2)
        assert f1(edge_counts(found, wanted)).item() == plain
        assert f1(edge_counts(found, wanted, 1)).item() == tolerant
    both = wanted | wanted.roll(3, 2)
    assert edge_counts(both, wanted, 1)[:, 0].tolist() == [9, 9, 0]
    assert edge_counts(wanted, both, 1)[:, 0].tolist() == [9, 0, 9]


def test_ms_ssim_is_torchmetrics() -> None:
    import torchmetrics.image as metrics

    rng = torch.Generator().manual_seed(0)
    smooth = torch.nn.functional.interpolate(torch.rand(2, 1, 12, 13, generator=rng), (184, 200), mode="bilinear")[:, 0]
    noisy = (smooth + 0.2 * torch.randn(smooth.shape, generator=rng)).clamp(0, 1)
    other = metrics.MultiScaleStructuralSimilarityIndexMeasure(data_range=1.0, reduction="none")
    wanted = other(noisy.double().unsqueeze(1), smooth.double().unsqueeze(1))
    found = ms_ssim(noisy, smooth)
    assert 0.2 < found.min() < found.max() < 0.99 and torch.allclose(found, wanted.double(), atol=2e-3)
    assert torch.allclose(ms_ssim(smooth, smooth), torch.ones(2, dtype=torch.float64))
    with pytest.raises(UserError, match=f"at least {SMALLEST} px, got \\(160, 200\\)"):
        ms_ssim(smooth[:, :160], smooth[:, :160])


def test_depth_rmse() -> None:
    wanted = torch.arange(12.0).view(1, 3, 4)
    for norm in ("minmax", "affine"):
        assert depth_rmse(wanted * 7 + 30, wanted, norm).item() < 1e-6  # type: ignore[arg-type]
    assert depth_rmse(wanted * 7, wanted, "max").item() < 1e-6 < depth_rmse(wanted * 7 + 30, wanted, "max").item()
    assert depth_rmse(-wanted, wanted, "affine").item() < 1e-6 < 100 < depth_rmse(-wanted, wanted).item()
    rng = np.random.default_rng(0)
    a, b = rng.random((2, 3, 4))
    scaled = [255 * (x - x.min()) / (x.max() - x.min()) for x in (a, b)]
    expected = np.sqrt(((scaled[0] - scaled[1]) ** 2).mean())
    assert math.isclose(depth_rmse(torch.tensor(a)[None], torch.tensor(b)[None]).item(), expected, rel_tol=1e-9)
    design = np.stack([a.ravel(), np.ones(12)], 1)
    fit = design @ np.linalg.lstsq(design, scaled[1].ravel(), rcond=None)[0]
    expected = np.sqrt(((fit - scaled[1].ravel()) ** 2).mean())
    assert math.isclose(
        depth_rmse(torch.tensor(a)[None], torch.tensor(b)[None], "affine").item(), expected, rel_tol=1e-9
    )
    flat = torch.full((1, 3, 4), 5.0)
    assert math.isclose(
        depth_rmse(flat, wanted).item(), float((255 * wanted / 11).square().mean().sqrt()), rel_tol=1e-6
    )
    assert depth_rmse(flat, flat).item() == 0 and depth_rmse(flat, wanted, "affine").isfinite().all()


def test_mean_iou_over_the_data_set() -> None:
    confusion = Confusion(4, ignore=9)
    confusion.update(torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 9]))
    confusion.update(torch.tensor([2, 1]), torch.tensor([0, 1]))
    # class 0: met 1, wanted 2, found 2; class 1: met 2, wanted 3, found 2; class 2 is not wanted, class 3 is nowhere
    assert math.isclose(confusion.mean_iou(), (1 / 3 + 2 / 3) / 2)
    assert math.isclose(confusion.mean_iou(dropped=[1]), 1 / 3)
    with pytest.raises(UserError, match="label 4 of the found map is no class; there are 4"):
        confusion.update(torch.tensor([4]), torch.tensor([0]))
    with pytest.raises(UserError, match="no class occurs"):
        Confusion(3).mean_iou()
