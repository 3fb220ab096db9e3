"""Tokenizer training: reconstruction, perceptual distance, a patch discriminator, the quantizer's own losses.

Source: VQGAN, arXiv:2012.09841, with LlamaGen's choices (arXiv:2406.06525): hinge losses and a fixed adversarial weight
instead of the adaptive one, which needs two more backward passes and an unsharded last layer. Regulariser: LeCAM.

The turns of a step are the tokenizer, then the discriminator on the same batch and the reconstruction of the first
turn. In the tokenizer's turn the discriminator runs with detached parameters: no gradient reaches it, so nothing that
DDP waits for is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from visgen import config as configs
from visgen.checks import Natural, Positive, Scale, Weight
from visgen.config import UserError, build, plugin
from visgen.data import Batch, Data
from visgen.nn import discriminator
from visgen.nn.discriminator import Features, LeCam, build_discriminator, hinge_discriminator, hinge_generator
from visgen.nn.keyed import Rng
from visgen.nn.perceptual import CONVERT, Perceptual, load_perceptual
from visgen.objectives import Logs, Objective
from visgen.tokenizers import Tokenizer


@dataclass(frozen=True)
class Losses:
    """Weights of the tokenizer's losses.

    Attributes:
        l1, l2: pixel losses, means over all values in [-1, 1].
        perceptual: weight; 0 needs no weights file.
        perceptual_weights: VGG-HED safetensors of `python -m visgen.convert hed`, or torchvision's VGG16 for LPIPS.
        perceptual_heads: linear heads of LPIPS; given, the distance is LPIPS.
        perceptual_zoom: images are enlarged so many times before, for small ones.
        adversarial: weight of -D(reconstruction); 0 leaves the discriminator out.
        lecam: weight of LeCAM in the discriminator's loss; 0 leaves it out.
    """

    l1: Weight = 0.0
    l2: Weight = 1.0
    perceptual: Weight = 0.0
    perceptual_weights: Path | None = None
    perceptual_heads: Path | None = None
    perceptual_zoom: Positive = 1
    adversarial: Weight = 0.1
    lecam: Weight = 0.001


@dataclass(frozen=True)
class Config:
    """Tokenizer objective.

    Attributes:
        tokenizer: what is trained and saved.
        start: run directory or safetensors file of a tokenizer of the same config to start from.
        train: decoder: the codes stay those of `start`, so that caches of them and models stay valid. Adversarial
            training comes last this way, and never moves the codes.
        losses: their weights.
        discriminator: its kind and size.
        gan_start: step from which the tokenizer sees the discriminator.
        discriminator_start: step from which the discriminator trains, at most gan_start; gan_start if none. Started
            together, both are cold and reconstructions suffer.
        discriminator_lr_scale: its learning rate over the tokenizer's.
    """

    tokenizer: Any = plugin("visgen.tokenizers", "conv_vq")
    start: Path | None = None
    train: Literal["all", "decoder"] = "all"
    losses: Losses = field(default_factory=Losses)
    discriminator: discriminator.Config = field(default_factory=discriminator.Config)
    gan_start: Natural = 20_000
    discriminator_start: Natural | None = None
    discriminator_lr_scale: Scale = 1.0


class VQ(Objective):
    """`nets["tokenizer"]`, and `nets["discriminator"]` where the adversarial weight is not 0."""

    export = "tokenizer"
    held_out_values = larger_is_better = ("psnr",)

    def __init__(self, config: Config) -> None:
        self.config = config
        self.nets: dict[str, nn.Module] = {"tokenizer": TokenizerNet(build(config.tokenizer), config.losses)}
        self.frozen: dict[str, nn.Module] = {}
        self.optim_overrides = {}
        start = config.discriminator_start
        self.discriminator_start = config.gan_start if start is None else start
        if self.discriminator_start > config.gan_start:
            raise UserError(
                f"objective.discriminator_start is {start}; it must not exceed gan_start ({config.gan_start})"
            )
        if config.train == "decoder":
            if config.start is None:
                raise UserError(
                    "objective.train is decoder, but objective.start names no tokenizer whose codes to keep"
                )
            self.exported().freeze_codes()
        if config.losses.adversarial > 0:
            if config.discriminator.kind == "features" and config.losses.perceptual_weights is None:
                raise UserError(
                    f"objective.discriminator.kind is features but losses.perceptual_weights names no file; {CONVERT}"
                )
            self.nets["discriminator"] = DiscriminatorNet(config.discriminator, config.losses.lecam)
            self.optim_overrides["discriminator"] = {"lr_scale": config.discriminator_lr_scale}
        self._fakes: list[tuple[Tensor, Tensor]] = []  # (pixels, reconstruction) of this step's micro-batches
        self._step = -1

    def check_steps(self, steps: int) -> None:
        name = "objective.tokenizer.quantizer.init_after"
        bypassed = getattr(getattr(self.config.tokenizer, "quantizer", None), "init_after", -1)
        if bypassed >= steps and self.config.start is None:
            raise UserError(
                f"{name} is {bypassed}, loop.steps {steps}: the codebook would never be used; for a short trial pass "
                f"--{name} {steps // 10}"
            )

    def setup(self, data: Data) -> None:
        losses, wanted = self.config.losses, tuple(self.exported().image_size)
        if hasattr(data, "grid"):
            raise UserError("objective vq needs pixels, but the data are cached codes; choose another data.kind")
        if tuple(data.image_size) != wanted:
            raise UserError(
                f"the data's image_size is {tuple(data.image_size)}, objective.tokenizer.image_size is {wanted}; "
                f"pass --objective.tokenizer.image_size {data.image_size[0]} or change the data's"
            )
        if losses.perceptual > 0 and losses.perceptual_weights is None:
            raise UserError(
                f"objective.losses.perceptual is {losses.perceptual} but perceptual_weights names no file; "
                f"{CONVERT}, or set the weight to 0"
            )
        if self.config.start is not None:
            self._start_from(self.config.start)
        if losses.perceptual > 0 or (losses.adversarial > 0 and self.config.discriminator.kind == "features"):
            assert losses.perceptual_weights is not None
            self.frozen["perceptual"] = load_perceptual(losses.perceptual_weights, losses.perceptual_heads)

    def _start_from(self, path: Path) -> None:
        from visgen.checkpoint import load_tokenizer  # reads files, so it is not needed to build the nets

        found, wanted = load_tokenizer(path), self.exported()
        given, own = (configs.flat(configs.dump(t.config)) for t in (found, wanted))
        differing = [f"{key} {value}" for key, value in given.items() if own.get(key) != value]
        if differing or type(found) is not type(wanted):
            raise UserError(
                f"objective.start {path} was made with another config than objective.tokenizer's; set in the latter: "
                f"{', '.join(differing) or type(found).__name__}"
            )
        wanted.load_state_dict(found.state_dict())

    def turns(self, step: int) -> list[str]:
        adversarial = "discriminator" in self.nets and step >= self.discriminator_start
        return ["tokenizer", "discriminator"] if adversarial else ["tokenizer"]

    def loss(self, name: str, nets: dict[str, nn.Module], batch: Batch, step: int, rng: Rng) -> tuple[Tensor, Logs]:
        pixels = batch["pixels"]
        if name == "discriminator":
            return nets[name](pixels, self._fake(pixels), self._features())
        critic = None
        if "discriminator" in nets and step >= self.config.gan_start:
            critic = partial(detached(self.nets["discriminator"].model), features=self._features())  # type: ignore[arg-type]
        loss, logs = nets[name](pixels, self.frozen.get("perceptual"), critic)
        fake = logs.pop("reconstruction")
        if step != self._step:
            self._step, self._fakes = step, []
        if "discriminator" in self.turns(step):
            self._fakes.append((pixels, fake))
        return loss, logs

    def preview(self, model: nn.Module, batch: Batch, seed: int) -> Tensor:
        """Rows of inputs, each above the row of their reconstructions, as many as fill a square grid."""
        pixels = batch["pixels"]
        side = max(1, math.isqrt(2 * len(pixels)) // 2 * 2)  # a square of even side holds side^2 / 2 pairs
        pixels = pixels[: max(1, side * side // 2)]
        found = _round_trip(model, pixels)
        rows = zip(pixels[:, 0].split(side), found[:, 0].split(side), strict=True)
        return torch.cat([row for pair in rows for row in pair])

    def held_out(self, model: nn.Module, batch: Batch) -> Logs:
        pixels = batch["pixels"]
        return {"psnr": psnr(_round_trip(model, pixels).float().flatten(0, 1), pixels.flatten(0, 1))}

    def _features(self) -> Features | None:
        """What the discriminator looks at besides pixels."""
        return self.frozen["perceptual"].features if self.config.discriminator.kind == "features" else None  # type: ignore[return-value]

    def _fake(self, pixels: Tensor) -> Tensor:
        found = next((fake for real, fake in self._fakes if real is pixels), None)
        if found is None:
            raise RuntimeError("the discriminator's turn must follow the tokenizer's on the same batch")
        return found


class TokenizerNet(nn.Module):
    """The tokenizer with its losses."""

    def __init__(self, model: Tokenizer, losses: Losses) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def forward(
        self,
        pixels: Tensor,
        perceptual: Perceptual | None = None,
        critic: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, Logs]:
        """pixels [B, T, 3, H, W] -> (loss, logs); `logs["reconstruction"]` is [B, T, 3, H, W] float32.

        Args:
            perceptual: distance of pairs of images, with its own precision rules.
            critic: images [B T, 3, H, W] -> logits, without gradient to its parameters.
        """
        weights = self.losses
        made = self.model(pixels)
        image, real = made.pixels.float().flatten(0, 1), pixels.float().flatten(0, 1)
        parts = {**made.losses}
        squared = F.mse_loss(image, real)
        if weights.l2 > 0:
            parts["l2"] = weights.l2 * squared
        if weights.l1 > 0:
            parts["l1"] = weights.l1 * F.l1_loss(image, real)
        if perceptual is not None and weights.perceptual > 0:
            parts["perceptual"] = weights.perceptual * self._perceptual(perceptual, image, real)
        if critic is not None:
            parts["adversarial"] = weights.adversarial * hinge_generator(critic(image))
        loss = torch.stack([part.float() for part in parts.values()]).sum()
        logs = {"psnr": psnr(image, real), **parts, **made.metrics, "reconstruction": made.pixels.float()}
        return loss, {k: v.detach() for k, v in logs.items()}

    def _perceptual(self, network: Perceptual, image: Tensor, real: Tensor) -> Tensor:
        zoom = self.losses.perceptual_zoom
        if zoom > 1:
            image, real = (F.interpolate(x, scale_factor=float(zoom), mode="bilinear") for x in (image, real))
        return network(image, real).mean()


class DiscriminatorNet(nn.Module):
    """The discriminator with its losses; LeCAM's moving means are buffers and thus saved."""

    def __init__(self, config: discriminator.Config, lecam: float) -> None:
        super().__init__()
        self.model = build_discriminator(config)
        self.lecam, self.lecam_weight = LeCam(config.lecam_decay), lecam

    def forward(self, pixels: Tensor, fake: Tensor, features: Features | None = None) -> tuple[Tensor, Logs]:
        """Real and made images [B, T, 3, H, W] -> (loss, logs)."""
        images = torch.cat([pixels.float().flatten(0, 1), fake.flatten(0, 1)])
        real_logits, fake_logits = self.model(images, features).chunk(2)
        loss = hinge = hinge_discriminator(real_logits, fake_logits)
        logs = {"hinge": hinge, "logits_real": real_logits.mean(), "logits_fake": fake_logits.mean()}
        if self.lecam_weight > 0:
            logs["lecam"] = self.lecam(real_logits, fake_logits)
            loss = hinge + self.lecam_weight * logs["lecam"]
        return loss, {k: v.detach() for k, v in logs.items()}


def detached(module: nn.Module) -> Callable[..., Tensor]:
    """`module` as a function whose gradient reaches its input but none of its parameters."""
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    return lambda *args, **settings: functional_call(module, parameters, args, settings)


@torch.no_grad()
def _round_trip(model: Any, pixels: Tensor) -> Tensor:
    """pixels [B, T, 3, H, W] through the tokenizer and back."""
    return model.decode(model.encode(pixels), model.grid_of(pixels))


def psnr(image: Tensor, real: Tensor) -> Tensor:
    """Mean over images of the peak signal-to-noise ratio in dB, [B, 3, H, W] in [-1, 1] (peak to peak 2)."""
    error = (image.detach().clamp(-1, 1) - real).square().mean((1, 2, 3)).clamp(min=1e-10)
    return (10 * torch.log10(4 / error)).mean()
