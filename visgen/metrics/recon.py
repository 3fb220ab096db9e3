"""How faithfully a tokenizer returns an image (PSNR, SSIM, a perceptual distance), and how it uses its codes.

Both sides are rounded to uint8 first, then taken as [0, 1]; every image counts once. Published SSIM of LlamaGen used
data_range = 2 on [0, 1] images, which reads 0.04 to 0.08 higher: `ssim_llamagen` reproduces that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from visgen.config import UserError
from visgen.metrics.images import AllReduce, as_frames, require_finite, to_uint8
from visgen.metrics.intervals import interval
from visgen.metrics.protocol import Score

PSNR_CAP = 100.0  # dB, stands for infinity in a mean; `n_inf` counts those


def mean_squared_error(original: Tensor, reconstruction: Tensor) -> Tensor:
    """Per image [B] float64, of [B, 3, H, W] uint8 images (or floats in [-1, 1], rounded here) on the [0, 1] scale."""
    a, b = _pair(original, reconstruction)
    return (a - b).square().mean((1, 2, 3))


def psnr(original: Tensor, reconstruction: Tensor) -> Tensor:
    """Per image [B] float64, in dB with data range 1, at most `PSNR_CAP`."""
    return _decibel(mean_squared_error(original, reconstruction))


def ssim(original: Tensor, reconstruction: Tensor, data_range: float = 1.0, window: int = 7) -> Tensor:
    """Structural similarity per image [B] float64 (Wang et al. 2004), as scikit-image's default computes it.

    Uniform window, sample covariance, K1 = 0.01, K2 = 0.03, windows inside the image only, mean over channels.
    """
    a, b = _pair(original, reconstruction)
    if min(a.shape[-2:]) < window:
        raise UserError(f"SSIM: images of {a.shape[-2]}x{a.shape[-1]} px are smaller than its window of {window} px")
    mean_a, mean_b, aa, bb, ab = (F.avg_pool2d(v, window, stride=1) for v in (a, b, a * a, b * b, a * b))
    sample = window**2 / (window**2 - 1)
    var_a, var_b, cov = sample * (aa - mean_a**2), sample * (bb - mean_b**2), sample * (ab - mean_a * mean_b)
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * cov + c2) / (var_a + var_b + c2)
    return (luminance * structure).mean((1, 2, 3))


def _pair(original: Tensor, reconstruction: Tensor) -> tuple[Tensor, Tensor]:
    if original.shape != reconstruction.shape:
        shapes = f"{tuple(original.shape)} and {tuple(reconstruction.shape)}"
        raise UserError(f"original and reconstruction have shapes {shapes}; compare images of one crop and size")
    a, b = (_bytes(v).double() / 255 for v in (original, reconstruction))
    return a, b


def _bytes(images: Tensor) -> Tensor:
    """uint8 [B, 3, H, W] of images or clips, whose pixels must be finite."""
    require_finite(images, what="pixels")
    return to_uint8(as_frames(images))


def _decibel(mse: Tensor) -> Tensor:
    return (-10 * mse.log10()).clamp(max=PSNR_CAP)


class ReconMeter:
    """Running means over images of PSNR, SSIM and a perceptual distance.

    Args:
        perceptual: takes two [B, 3, H, W] float32 in [-1, 1] (both sides rounded to uint8 before) and returns [B].
        perceptual_name: what it is, e.g. `vgg_hed` or `lpips_vgg`; the key of its score.
        llamagen_ssim: also report SSIM with data_range = 2.
    """

    def __init__(
        self,
        perceptual: Callable[[Tensor, Tensor], Tensor] | None = None,
        perceptual_name: str = "perceptual",
        llamagen_ssim: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.perceptual = perceptual
        extra = [name for name, on in (("ssim_llamagen", llamagen_ssim), (perceptual_name, perceptual)) if on]
        self.names = ["mse", "psnr", "ssim", *extra]
        self.sums = torch.zeros(len(self.names), 2, dtype=torch.float64, device=device)  # sum, sum of squares
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)  # images, images without any error

    def update(self, original: Tensor, reconstruction: Tensor) -> dict[str, Tensor]:
        """Adds images [B, 3, H, W] or [B, T, 3, H, W], uint8 or float in [-1, 1]; returns each metric per image [B]."""
        a, b = _bytes(original), _bytes(reconstruction)
        mse = mean_squared_error(a, b)
        values = [mse, _decibel(mse), ssim(a, b)]
        if "ssim_llamagen" in self.names:
            values.append(ssim(a, b, data_range=2.0))
        if self.perceptual is not None:
            values.append(self.perceptual(a.float() / 127.5 - 1, b.float() / 127.5 - 1).double().reshape(-1))
            require_finite(values[-1][:, None], what="perceptual distances")
        rows = torch.stack(values).to(self.sums.device)  # [metrics, B]
        self.sums += torch.stack([rows.sum(1), rows.square().sum(1)], 1)
        self.counts += torch.stack([torch.tensor(len(mse), device=mse.device), (mse == 0).sum()]).to(self.counts.device)
        return dict(zip(self.names, values, strict=True))

    def reduce(self, all_reduce: AllReduce) -> None:
        """Adds the other processes' sums."""
        self.sums, self.counts = all_reduce(self.sums), all_reduce(self.counts)

    def scores(self) -> dict[str, Score]:
        """Mean over images with its standard error; `psnr_pooled` is the PSNR of the mean squared error."""
        n, perfect = self.counts.tolist()
        if n == 0:
            raise UserError("no image was reconstructed; the data set is empty or every batch was masked")
        out = {}
        for name, (total, squares) in zip(self.names, self.sums.tolist(), strict=True):
            mean = total / n
            se = math.sqrt(max(squares / n - mean**2, 0) / (n - 1)) if n > 1 else None
            ci95 = interval(mean, se, n - 1) if se is not None else None
            out[name] = Score(mean, se=se, ci95=ci95, n=n, terms={"n_inf": perfect} if name == "psnr" else {})
        mse = out.pop("mse").value
        out["psnr_pooled"] = Score(float(_decibel(torch.tensor(mse, dtype=torch.float64))), n=n)
        return out


class CodeUsage:
    """Counts how often each of `vocab` codes is used."""

    def __init__(self, vocab: int, device: torch.device | str = "cpu") -> None:
        self.counts = torch.zeros(vocab, dtype=torch.int64, device=device)  # [V]

    def update(self, ids: Tensor) -> None:
        """Adds code indices of any shape.

        Raises:
            UserError: an index outside the vocabulary.
        """
        shifted = ids.reshape(-1).to(self.counts.device).clamp(min=-1) + 1  # 0: below the vocabulary
        counts = torch.bincount(shifted, minlength=len(self.counts) + 1)
        if counts[0] or len(counts) > len(self.counts) + 1:
            worst = int(ids.min()) if counts[0] else int(ids.max())
            raise UserError(f"code {worst} is outside the vocabulary 0..{len(self.counts) - 1}; wrong tokenizer?")
        self.counts += counts[1:]

    def reduce(self, all_reduce: AllReduce) -> None:
        """Adds the other processes' counts."""
        self.counts = all_reduce(self.counts)

    @property
    def dead(self) -> list[int]:
        """The codes never used."""
        return (self.counts == 0).nonzero().flatten().tolist()

    def scores(self) -> dict[str, Score]:
        """`usage`: share of codes used; `usage_99`: share that covers 99 % of the tokens; `perplexity` = exp(H);
        `bits_per_token` = H / ln 2, with H the entropy of the code histogram."""
        tokens = int(self.counts.sum())
        if tokens == 0:
            raise UserError("no code was counted; the data set is empty or every batch was masked")
        p = self.counts[self.counts > 0].double() / tokens
        entropy = float(-(p * p.log()).sum())
        needed = int((p.sort(descending=True).values.cumsum(0) < 0.99 - 1e-12).sum()) + 1
        vocab = len(self.counts)
        values = {
            "usage": len(p) / vocab,
            "usage_99": needed / vocab,
            "perplexity": math.exp(entropy),
            "bits_per_token": entropy / math.log(2),
        }
        return {name: Score(value, n=tokens) for name, value in values.items()}
