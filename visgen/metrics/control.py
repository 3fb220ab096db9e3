"""Whether an image follows its control: the map made of it against the map that it was asked for.

Both maps come from one extractor at one resolution. Everything is per image; what a study reports is the mean over
prompts. Definitions and what papers call them: ControlAR (arXiv:2410.02705) reports F1 of Canny edges, MS-SSIM of HED
and line drawings under the name SSIM, RMSE of depth on 0..255, and mIoU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from visgen.config import UserError

BETAS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)  # of MS-SSIM's scales (Wang et al. 2003)
WINDOW, SIGMA = 11, 1.5
SMALLEST = (WINDOW - 1) * 2 ** (len(BETAS) - 1) + 1  # the side that the coarsest scale needs: 161 px


def edge_counts(found: Tensor, wanted: Tensor, tolerance: int = 0) -> Tensor:
    """True positives, false positives, false negatives of edge pixels [3, B] float64, of masks [B, H, W] bool.

    Args:
        tolerance: an edge counts as met by one at most so many pixels away, in each direction. Then true positives
            are counted among the found edges, and the false negatives among the wanted ones.
    """
    found, wanted = found.bool(), wanted.bool()
    near = [_grown(mask, tolerance) for mask in (found, wanted)]
    counts = [(found & near[1]), (found & ~near[1]), (wanted & ~near[0])]
    return torch.stack([c.flatten(1).sum(1).double() for c in counts])


def f1(counts: Tensor) -> Tensor:
    """2 TP / (2 TP + FP + FN) of counts [3, ...]; 1 where there is no edge on either side (sklearn says 0)."""
    tp, fp, fn = counts
    total = 2 * tp + fp + fn
    return torch.where(total > 0, 2 * tp / total.clamp(min=1), 1.0)


def _grown(mask: Tensor, by: int) -> Tensor:
    if by == 0:
        return mask
    return F.max_pool2d(mask.float().unsqueeze(1), 2 * by + 1, 1, by).squeeze(1) > 0


def ms_ssim(found: Tensor, wanted: Tensor) -> Tensor:
    """Multi-scale SSIM [B] float64 of grey maps [B, H, W] in [0, 1] (Wang et al. 2003): five scales, Gaussian windows.

    Negative means of a scale count as 0, as in torchmetrics (`normalize="relu"`).

    Raises:
        UserError: a side of less than 161 px, of which the fifth scale would be smaller than its window.
    """
    if min(found.shape[-2:]) < SMALLEST:
        raise UserError(f"MS-SSIM needs maps of at least {SMALLEST} px, got {tuple(found.shape[-2:])}; use SSIM")
    a, b = found.double().unsqueeze(1), wanted.double().unsqueeze(1)
    total = torch.ones(len(a), dtype=torch.float64, device=a.device)
    for scale, beta in enumerate(BETAS):
        luminance, structure = _ssim_parts(a, b)
        value = structure if scale < len(BETAS) - 1 else luminance * structure
        total *= value.mean((1, 2, 3)).clamp(min=0) ** beta
        a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
    return total


def _ssim_parts(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Luminance, and contrast times structure, wherever the window lies inside [B, 1, H, W]."""
    at = torch.arange(WINDOW, dtype=torch.float64, device=a.device) - WINDOW // 2
    line = (-(at**2) / (2 * SIGMA**2)).exp()
    kernel = torch.outer(line, line)[None, None] / line.sum() ** 2
    mean_a, mean_b, aa, bb, ab = (F.conv2d(v, kernel) for v in (a, b, a * a, b * b, a * b))
    c1, c2 = 0.01**2, 0.03**2
    variances = (aa - mean_a**2) + (bb - mean_b**2)
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    return luminance, (2 * (ab - mean_a * mean_b) + c2) / (variances + c2)


def depth_rmse(found: Tensor, wanted: Tensor, norm: Literal["minmax", "max", "affine"] = "minmax") -> Tensor:
    """Root mean squared difference [B] float64 of depth maps [B, H, W], on the scale 0..255.

    Args:
        norm: each map less its smallest value, over its range; or over its largest value; or `found` scaled and shifted
            by least squares to `wanted`, which is normalised by its range. A constant map becomes 0.
    """
    a, b = found.double().flatten(1), wanted.double().flatten(1)
    b = _normalised(b, norm == "max")
    if norm == "affine":
        centred, target = a - a.mean(1, keepdim=True), b.mean(1, keepdim=True)
        spread = centred.square().sum(1, keepdim=True)
        slope = (centred * (b - target)).sum(1, keepdim=True) / spread.clamp(min=1e-12)
        a = torch.where(spread > 0, slope * centred, 0.0) + target
    else:
        a = _normalised(a, norm == "max")
    return (255 * (a - b)).square().mean(1).sqrt()


def _normalised(depth: Tensor, by_largest: bool) -> Tensor:
    low = torch.zeros_like(depth[:, :1]) if by_largest else depth.amin(1, keepdim=True)
    span = depth.amax(1, keepdim=True) - low
    return torch.where(span > 0, (depth - low) / span.clamp(min=1e-12), 0.0)


class Confusion:
    """Counts of (wanted, found) class pairs over a data set.

    Args:
        classes: class numbers are 0 .. classes - 1.
        ignore: the wanted number whose pixels do not count.
    """

    def __init__(self, classes: int, ignore: int | None = None) -> None:
        self.classes, self.ignore = classes, ignore
        self.counts = torch.zeros(classes, classes, dtype=torch.int64)

    def update(self, found: Tensor, wanted: Tensor) -> None:
        """Adds label maps of one shape.

        Raises:
            UserError: a number that is no class.
        """
        found, wanted = found.flatten().cpu().long(), wanted.flatten().cpu().long()
        kept = torch.ones_like(wanted, dtype=torch.bool) if self.ignore is None else wanted != self.ignore
        for name, values in (("found", found[kept]), ("wanted", wanted[kept])):
            if values.numel() and not 0 <= int(values.min()) <= int(values.max()) < self.classes:
                worst = int(values.max() if values.max() >= self.classes else values.min())
                raise UserError(f"label {worst} of the {name} map is no class; there are {self.classes}")
        pairs = wanted[kept] * self.classes + found[kept]
        self.counts += torch.bincount(pairs, minlength=self.classes**2).view(self.classes, -1)

    def mean_iou(self, dropped: Sequence[int] = ()) -> float:
        """Mean over the classes that occur in the wanted maps of intersection over union.

        Args:
            dropped: classes that are left out: ControlAR's ADE20K numbers lack the last one, which its code mixes up
                with the ignored pixels.
        """
        counts = self.counts.double()
        met, wanted, found = counts.diag(), counts.sum(1), counts.sum(0)
        present = wanted > 0
        present[list(dropped)] = False
        if not present.any():
            raise UserError("no class occurs in the wanted label maps, so there is no mIoU; look at the maps")
        return float((met / (wanted + found - met).clamp(min=1))[present].mean())
