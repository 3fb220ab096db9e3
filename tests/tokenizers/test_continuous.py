"""Continuous tokenizers: a small one that trains, and AutoencoderKL read from a folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL

from visgen.checkpoint import load_tokenizer, tokenizer_hash
from visgen.config import UserError, build, plugin_config
from visgen.convert.__main__ import main as convert
from visgen.tokenizers.kl import KL, read

PIXELS = torch.rand(2, 3, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny AutoencoderKL as diffusers saves it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 16),
            layers_per_block=1,
            latent_channels=3,
            norm_num_groups=4,
            scaling_factor=0.5,
            shift_factor=0.25,
        )
    path = tmp_path_factory.mktemp("vae")
    network.save_pretrained(path)
    return path


def test_the_autoencoder_of_a_folder_with_its_own_scale_and_shift(folder: Path) -> None:
    network = AutoencoderKL.from_pretrained(folder).eval()
    tokenizer = read(str(folder), 16)
    assert (tokenizer.grid, tokenizer.channels, tokenizer.vocab) == ((1, 8, 8), 3, None)
    with torch.no_grad():
        latents = (network.encode(PIXELS.flatten(0, 1)).latent_dist.mean - 0.25) * 0.5
        tokens = tokenizer.encode(PIXELS)
        assert torch.allclose(tokens, latents.unflatten(0, (2, 3)).permute(0, 1, 3, 4, 2).reshape(2, -1, 3), atol=1e-6)
        wanted = network.decode(latents / 0.5 + 0.25).sample.clamp(-1, 1)
        assert torch.allclose(tokenizer.decode(tokens), wanted.unflatten(0, (2, 3)), atol=1e-5)


def test_a_patch_puts_the_channel_fastest(folder: Path) -> None:
    plain, patched = read(str(folder), 16), read(str(folder), 16, patch=2)
    assert (patched.grid, patched.channels) == ((1, 4, 4), 12)
    with torch.no_grad():
        small, large = plain.encode(PIXELS), patched.encode(PIXELS)
        cells = small.unflatten(1, (3, 8, 8))
        token = large.unflatten(1, (3, 4, 4))[1, 2, 3, 1].unflatten(0, (2, 2, 3))
        assert torch.allclose(token, cells[1, 2, 6:8, 2:4], atol=1e-6)
        assert torch.allclose(patched.decode(large), plain.decode(small), atol=1e-5)


def test_convert_writes_a_tokenizer(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    convert(["kl", str(folder), str(tmp_path / "kl"), "--image-size", "16", "--channels", "3", "--patch", "2"])
    assert "3 channels, stride 2, patch 2, scale 0.5, shift 0.25, 16 px" in capsys.readouterr().out
    kept = load_tokenizer(tmp_path / "kl")
    assert isinstance(kept, KL) and torch.equal(kept.encode(PIXELS), read(str(folder), 16, 2).encode(PIXELS))


def test_what_is_no_such_autoencoder_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its latents have 3 channels, 4 are needed"):
        read(str(folder), 16, channels=4)
    with pytest.raises(UserError, match="gives no AutoencoderKL"):
        read(str(tmp_path), 16)
    with pytest.raises(UserError, match=r"image_size is 15 x 15 px; its sides must be multiples of 2"):
        read(str(folder), 15)
    settings = json.loads((folder / "config.json").read_text())
    for change, said in (({"_class_name": "VQModel"}, "is a VQModel"), ({"act_fn": "gelu"}, "its act_fn is gelu")):
        (tmp_path / "config.json").write_text(json.dumps(settings | change))
        with pytest.raises(UserError, match=said):
            read(str(tmp_path), 16)


def test_tokens_are_normalised_by_what_training_saw(small: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    tokenizer = build(small("tokenizers", "conv_kl", patch=1)).train()
    with torch.no_grad():
        tokenizer.encoder.conv_out.weight.mul_(5)
        tokenizer.encoder.conv_out.bias[:4] = torch.tensor([3.0, -2.0, 0.0, 1.0])
        tokenizer.encoder.conv_out.bias[4:] = -12.0  # a sharp posterior
        for _ in range(3):
            tokenizer(PIXELS)
    tokens = tokenizer.eval().encode(PIXELS)
    assert torch.allclose(tokens.mean((0, 1)), torch.zeros(4), atol=0.05)
    assert torch.allclose(tokens.std((0, 1)), torch.ones(4), atol=0.1)
    with torch.no_grad():
        wanted = tokenizer.decoder(tokenizer.encoder(PIXELS.flatten(0, 1))[:, :4]).clamp(-1, 1)
    assert torch.allclose(tokenizer.decode(tokens).flatten(0, 1), wanted, atol=1e-4)


def test_the_kl_divergence_is_that_of_torch(small: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    tokenizer = build(small("tokenizers", "conv_kl", kl=0.5)).eval()
    mean, log_variance = tokenizer._posterior(PIXELS.flatten(0, 1))
    law = torch.distributions.Normal(mean, (log_variance / 2).exp())
    wanted = torch.distributions.kl_divergence(law, torch.distributions.Normal(0.0, 1.0)).mean()
    assert torch.allclose(tokenizer(PIXELS).losses["kl"], 0.5 * wanted, atol=1e-6)


def test_training_samples_the_posterior_and_frozen_codes_do_not(small: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    tokenizer = build(small("tokenizers", "conv_kl", patch=1)).train()
    assert not torch.equal(tokenizer(PIXELS).pixels, tokenizer(PIXELS).pixels)
    before = tokenizer_hash(tokenizer)
    tokenizer.freeze_codes()
    with torch.no_grad():
        tokenizer.decoder.conv_in.weight.add_(1)
    assert torch.equal(tokenizer(PIXELS).pixels, tokenizer(PIXELS).pixels) and not tokenizer(PIXELS).losses
    assert tokenizer_hash(tokenizer) == before
    with torch.no_grad():
        tokenizer.normaliser.mean.add_(1)
    assert tokenizer_hash(tokenizer) != before


def test_stable_diffusion_is_the_default() -> None:
    with torch.device("meta"):
        tokenizer = build(plugin_config("visgen.tokenizers", "kl"))
    assert sum(p.numel() for p in tokenizer.parameters()) == 83_653_863
    assert (tokenizer.grid, tokenizer.channels) == ((1, 32, 32), 4)
