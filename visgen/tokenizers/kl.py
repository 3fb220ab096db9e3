"""The KL autoencoder of `diffusers` (AutoencoderKL): the tokenizer of Stable Diffusion and of ACDiT.

Source: Rombach et al. 2022, arXiv 2112.10752. `read` takes it from a local folder or a Hub id, with the scale and shift
of its own config; `python -m visgen.convert kl` writes it as a tokenizer of ours.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from torch import Tensor, nn

from visgen.checks import Depth, Positive, Range, Scale, Weight
from visgen.config import UserError
from visgen.tokenizers._continuous import ContinuousTokenizer


@dataclass(frozen=True)
class Config:
    """Sizes of an AutoencoderKL; the defaults are Stable Diffusion's.

    Attributes:
        image_size: side in pixels.
        channels: of a latent.
        patch: latent positions along each side of a token; ACDiT takes 1 for images, 2 for video.
        width, multipliers: channels of every resolution; the stride is 2 ** (their number - 1).
        res_blocks: per resolution in the encoder; the decoder has one more.
        norm_groups: of GroupNorm.
        attention: in the middle.
        quant_conv, post_quant_conv: the 1x1 convolutions around the bottleneck.
        scale, shift: tokens are (latent - shift) * scale.
        kl: weight of the KL divergence where it is trained further, nats a latent value.
    """

    image_size: Positive = 256
    channels: Positive = 4
    patch: Positive = 1
    width: Positive = 128
    multipliers: Annotated[tuple[Positive, ...], Range(1)] = (1, 2, 4, 4)
    res_blocks: Depth = 2
    norm_groups: Positive = 32
    attention: bool = True
    quant_conv: bool = True
    post_quant_conv: bool = True
    scale: Scale = 0.18215
    shift: float = 0.0
    kl: Weight = 1e-6


class KL(ContinuousTokenizer):
    """AutoencoderKL, its latents scaled and shifted."""

    code_parts = ("encoder", "to_code")

    def __init__(self, config: Config) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        self.config = config
        levels = len(config.multipliers)
        self._describe(config.image_size, 2 ** (levels - 1), config.channels, config.patch, config.kl)
        network: Any = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            block_out_channels=tuple(config.width * m for m in config.multipliers),
            layers_per_block=config.res_blocks,
            latent_channels=config.channels,
            norm_num_groups=config.norm_groups,
            sample_size=config.image_size,
            use_quant_conv=config.quant_conv,
            use_post_quant_conv=config.post_quant_conv,
            mid_block_add_attention=config.attention,
        )
        self.encoder, self.decoder = network.encoder, network.decoder
        self.to_code = network.quant_conv or nn.Identity()
        self.from_code = network.post_quant_conv or nn.Identity()

    def _posterior(self, images: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.to_code(self.encoder(images)).chunk(2, 1)
        return mean, log_variance.clamp(-30, 20)

    def _normalised(self, latents: Tensor) -> Tensor:
        return (latents - self.config.shift) * self.config.scale

    def _images(self, latents: Tensor, normalised: bool) -> Tensor:
        latents = latents / self.config.scale + self.config.shift if normalised else latents
        return self.decoder(self.from_code(latents.to(self.decoder.conv_in.weight.dtype)))


def read(source: str, image_size: int, patch: int = 1, channels: int | None = None, subfolder: str = "") -> KL:
    """The tokenizer of an AutoencoderKL, in eval mode on the CPU.

    Args:
        source: a local folder with config.json and weights, or a Hub id, of the autoencoder or of a whole pipeline.
        channels: that its latents must have; None takes any.
        subfolder: where the autoencoder lies in it, often `vae`.

    Raises:
        UserError: nothing there, another kind of network, or latents of other channels.
    """
    from diffusers import AutoencoderKL

    inside = {"subfolder": subfolder} if subfolder else {}
    try:
        settings = AutoencoderKL.load_config(source, **inside)
        config = _config(settings, source, image_size, patch, channels)
        network = AutoencoderKL.from_pretrained(source, **inside)
    except UserError:
        raise
    except (OSError, ValueError, json.JSONDecodeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{source or 'IN'} gives no AutoencoderKL ({reason}); pass a local folder with its config.json and "
            "weights, or a Hub id, and --subfolder where it lies in one"
        ) from None
    tokenizer = KL(config)
    parts = {"encoder": "encoder", "decoder": "decoder", "quant_conv": "to_code", "post_quant_conv": "from_code"}
    state = {}
    for name, tensor in network.state_dict().items():
        part, _, rest = name.partition(".")
        state[f"{parts.get(part, part)}.{rest}"] = tensor
    tokenizer.load_state_dict(state)
    return tokenizer.eval()


def _config(settings: dict[str, Any], source: str, image_size: int, patch: int, channels: int | None) -> Config:
    """What the config of an AutoencoderKL says."""
    kind = settings.get("_class_name", "AutoencoderKL")
    if kind != "AutoencoderKL":
        raise UserError(f"{source} is a {kind}; an AutoencoderKL is needed, often in --subfolder vae")
    found = settings.get("latent_channels", 4)
    if channels is not None and found != channels:
        raise UserError(f"{source}: its latents have {found} channels, {channels} are needed; pass another autoencoder")
    widths = settings.get("block_out_channels", (64,))
    usual = {
        "in_channels": 3,
        "out_channels": 3,
        "act_fn": "silu",
        "latents_mean": None,
        "latents_std": None,
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
    }
    for key, value in usual.items():
        given = settings.get(key, value)
        given = list(given) if isinstance(given, tuple) else given
        if given != value:
            raise UserError(f"{source}: its {key} is {given}, only {value} is supported; pass another autoencoder")
    if any(w % widths[0] for w in widths):
        raise UserError(f"{source}: its widths {list(widths)} are no multiples of the first; pass another autoencoder")
    return Config(
        image_size=image_size,
        channels=found,
        patch=patch,
        width=widths[0],
        multipliers=tuple(w // widths[0] for w in widths),
        res_blocks=settings.get("layers_per_block", 1),
        norm_groups=settings.get("norm_num_groups", 32),
        attention=settings.get("mid_block_add_attention", True),
        quant_conv=settings.get("use_quant_conv", True),
        post_quant_conv=settings.get("use_post_quant_conv", True),
        scale=settings.get("scaling_factor") or 0.18215,
        shift=settings.get("shift_factor") or 0.0,
    )
