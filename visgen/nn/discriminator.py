"""Discriminators (PatchGAN, or heads on frozen features), hinge loss and the LeCAM regulariser.

Sources: Isola et al., arXiv:1611.07004 (70x70 patches with three layers); hinge loss as in Lim & Ye, arXiv:1705.02894;
LeCAM: Tseng et al., arXiv:2104.03310, eq. 5. GroupNorm stands where the papers have BatchNorm, so an image's logits
depend on no other image and ranks share no statistics. Heads on the features of a pretrained network: Sauer et al.,
"Projected GANs", arXiv:2111.01007, here without the random projections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from visgen.checks import Depth, Positive, Rate
from visgen.config import UserError
from visgen.nn.conv import group_norm
from visgen.nn.perceptual import WIDTHS

Features = Callable[[Tensor], list[Tensor]]  # images [B, 3, H, W] -> maps [B, C_l, h_l, w_l] of unit length over C_l


@dataclass(frozen=True)
class Config:
    kind: Literal["patch", "features"] = "patch"  # features: on the trunk of objective.losses.perceptual_weights
    width: Positive = 64  # channels of the first layer, patch: doubled by each further one up to eight times
    layers: Depth = 3  # patch: of stride 2, receptive field 16, 34, 70, 142 px for 1, 2, 3, 4; features: maps used
    norm: Literal["group", "none"] = "group"
    lecam_decay: Rate = 0.999  # of the moving means of the logits


class PatchDiscriminator(nn.Module):
    """Convolutions of kernel 4: `layers` of stride 2, one of stride 1, then one logit per patch."""

    def __init__(self, config: Config, in_channels: int = 3) -> None:
        super().__init__()
        widths = [config.width * min(2**i, 8) for i in range(config.layers + 1)]
        layers: list[nn.Module] = [nn.Conv2d(in_channels, widths[0], 4, 2, 1), nn.LeakyReLU(0.2)]
        for i in range(1, len(widths)):
            normed = config.norm == "group"
            stride = 2 if i < config.layers else 1
            layers.append(nn.Conv2d(widths[i - 1], widths[i], 4, stride, 1, bias=not normed))
            layers += [group_norm(widths[i])] * normed + [nn.LeakyReLU(0.2)]
        layers.append(nn.Conv2d(widths[-1], 1, 4, 1, 1))
        self.net = nn.Sequential(*layers)
        for layer in self.net:
            if isinstance(layer, nn.Conv2d):
                nn.init.normal_(layer.weight, 0.0, 0.02)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)

    def forward(self, pixels: Tensor, features: Features | None = None) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> logits [B, 1, h, w], float32; large means real. `features` are not needed."""
        return self.net(pixels).float()


class FeatureDiscriminator(nn.Module):
    """One head per depth of a frozen feature network: 3x3 convolutions on its map, then one logit per patch.

    The network is an argument of `forward`, not a part, so it is neither trained nor saved.
    """

    def __init__(self, config: Config, channels: Sequence[int]) -> None:
        """channels: of the feature maps, from the finest on; deeper maps of the network are not looked at."""
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(n, config.width, 3, padding=1, bias=config.norm == "none"),
                *[group_norm(config.width)] * (config.norm == "group"),
                nn.LeakyReLU(0.2),
                nn.Conv2d(config.width, 1, 3, padding=1),
            )
            for n in channels
        )

    def forward(self, pixels: Tensor, features: Features) -> Tensor:
        """[B, 3, H, W] in [-1, 1] -> logits [B, heads, h, w], float32; large means real.

        Every map counts alike: the logits of all are averaged down to the grid of the coarsest.
        """
        maps = features(pixels)[: len(self.heads)]
        grid = maps[-1].shape[2], maps[-1].shape[3]
        logits = [head(f * f.shape[1] ** 0.5) for head, f in zip(self.heads, maps, strict=True)]
        return torch.cat([F.adaptive_avg_pool2d(x.float(), grid) for x in logits], 1)


def build_discriminator(config: Config) -> nn.Module:
    """The discriminator of a config."""
    if config.kind == "patch":
        return PatchDiscriminator(config)
    channels = [widths[-1] for widths in WIDTHS]
    if config.layers > len(channels):
        raise UserError(f"discriminator.layers is {config.layers}; the feature network has {len(channels)} maps")
    return FeatureDiscriminator(config, channels[: config.layers])


class LeCam(nn.Module):
    """Keeps the logits near moving means of the opposite side; its state is saved and equal on every rank.

    The means take one update a step of the optimiser, by the mean over its micro-batches.
    """

    micro_batch = (0, 1)  # which of how many micro-batches of a step the next training forward sees; set by the loop

    def __init__(self, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.register_buffer("pending", torch.zeros(2), persistent=False)  # sums of this step so far: real, fake
        self.register_buffer("real", torch.zeros(()))
        self.register_buffer("fake", torch.zeros(()))
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    pending: Tensor
    real: Tensor
    fake: Tensor
    updates: Tensor

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        """Logits of any shape -> regulariser (scalar), measured against the means before this batch enters them.

        One-sided, the form in common use: real logits above the fakes' mean are pulled down towards it, fake logits
        below the reals' mean are pulled up. Eq. 5 also pulls what already lies on the far side.
        """
        bias = 1 - self.decay ** self.updates.clamp(min=1)  # zero-started means, corrected as in Adam
        mean_real, mean_fake = self.real / bias, self.fake / bias
        penalty = F.relu(real - mean_fake).square().mean() + F.relu(mean_real - fake).square().mean()
        penalty = torch.where(self.updates > 0, penalty, penalty * 0)
        if self.training:
            self._update(torch.stack([real.detach().float().mean(), fake.detach().float().mean()]))
        return penalty

    @torch.no_grad()
    def _update(self, means: Tensor) -> None:
        part, parts = self.micro_batch
        self.pending.copy_(self.pending + means if part else means)
        if part < parts - 1:
            return
        means = self.pending / parts
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(means)
            means = means / dist.get_world_size()
        self.real.lerp_(means[0], 1 - self.decay)
        self.fake.lerp_(means[1], 1 - self.decay)
        self.updates += 1


def hinge_discriminator(real: Tensor, fake: Tensor) -> Tensor:
    """Loss of the discriminator: half the sum of both hinges."""
    return 0.5 * (F.relu(1 - real).mean() + F.relu(1 + fake).mean())


def hinge_generator(fake: Tensor) -> Tensor:
    """Loss of the generator."""
    return -fake.mean()
