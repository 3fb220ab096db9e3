"""An AutoencoderKL of `diffusers` -> a tokenizer of ours, with the scale and shift of its own config.

`python -m visgen.convert kl stabilityai/sd-vae-ft-ema runs/sd_vae --image-size 256`, a local folder likewise. The
tokenizer then stands wherever one is asked for: `objective.tokenizer: runs/sd_vae`, `visgen.encode --tokenizer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from visgen.checks import Positive
from visgen.config import UserError
from visgen.convert import Precision
from visgen.convert._files import check_finite, require_new, write_run
from visgen.tokenizers.kl import read


@dataclass(frozen=True)
class Config:
    source: str = ""  # a local folder with config.json and weights, or a Hub id
    out: str = ""  # run directory to write: new or empty
    image_size: Positive = 256  # side in pixels of the images that it will tokenize
    patch: Positive = 1  # latent positions along each side of a token; ACDiT takes 2 for video
    channels: Positive | None = None  # that its latents must have
    subfolder: str = ""  # where the autoencoder lies in the source, often vae
    dtype: Precision = "fp32"  # of the converted weights


def convert(config: Config) -> str:
    """Reads, checks and writes the weights; `out` is untouched unless they fit."""
    out = Path(config.out)
    require_new(out)
    if not config.source:
        raise UserError("IN is empty; pass a local folder with config.json and weights, or a Hub id")
    tokenizer = read(config.source, config.image_size, config.patch, config.channels, config.subfolder)
    check_finite(tokenizer, config.dtype)
    write_run(out, tokenizer, {"step": 0, "origin": "kl", "source": config.source}, config.dtype, None)
    count = sum(p.numel() for p in tokenizer.parameters())
    settings = tokenizer.config
    return (
        f"{out}: tokenizer of {settings.channels} channels, stride {tokenizer.stride}, patch {settings.patch}, scale "
        f"{settings.scale:g}, shift {settings.shift:g}, {settings.image_size} px, {count:,} parameters, {config.dtype}"
    )
