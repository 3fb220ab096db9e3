"""Every tokenizer: pixels to tokens and back, the same every time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visgen.config import build, plugin_config
from visgen.tokenizers import Tokenizer

PACKAGE = "tokenizers"
B = 3


def made(small: Callable[..., Any], kind: str) -> tuple[Tokenizer, Tensor]:
    torch.manual_seed(0)
    tokenizer = build(small(PACKAGE, kind)).eval()
    return tokenizer, torch.rand(B, 1, 3, *tokenizer.image_size) * 2 - 1


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)


def test_the_default_builds_on_the_meta_device(kind: str) -> None:
    config = plugin_config("visgen.tokenizers", kind)
    with torch.device("meta"):
        tokenizer = build(config)
    assert tokenizer.config == config and len(tokenizer.grid) == 3 and len(tokenizer.image_size) == 2


def test_encode_and_decode(kind: str, small: Callable[..., Any]) -> None:
    tokenizer, pixels = made(small, kind)
    count = tokenizer.grid[0] * tokenizer.grid[1] * tokenizer.grid[2]
    with torch.no_grad():
        tokens = tokenizer.encode(pixels)
        decoded = tokenizer.decode(tokens)
    if tokenizer.vocab is None:
        assert tokens.shape == (B, count, tokenizer.channels) and tokens.is_floating_point()
    else:
        assert tokens.shape == (B, count) and tokens.dtype == torch.int64
        assert tokens.min() >= 0 and tokens.max() < tokenizer.vocab
        assert tokenizer.embed(tokens).shape == (B, count, tokenizer.channels)
    assert decoded.shape == pixels.shape and decoded.abs().max() <= 1


def test_the_range_of_decoded_pixels_is_clamped(kind: str, small: Callable[..., Any]) -> None:
    tokenizer, pixels = made(small, kind)
    with torch.no_grad():
        for parameter in tokenizer.parameters():
            parameter.mul_(5)
        decoded = tokenizer.decode(tokenizer.encode(pixels))
    assert decoded.abs().max() == 1


def test_eval_mode_is_deterministic_and_rows_are_independent(kind: str, small: Callable[..., Any]) -> None:
    tokenizer, pixels = made(small, kind)
    with torch.no_grad():
        tokens = tokenizer.encode(pixels)
        decoded = tokenizer.decode(tokens)
        assert torch.equal(tokenizer.encode(pixels), tokens) and torch.equal(tokenizer.decode(tokens), decoded)
        assert torch.allclose(tokenizer.encode(pixels[1:2]), tokens[1:2], atol=0 if tokenizer.vocab else 1e-4)
        assert torch.allclose(tokenizer.decode(tokens[1:2]), decoded[1:2], atol=1e-5)


def test_the_training_pass(kind: str, small: Callable[..., Any]) -> None:
    tokenizer, pixels = made(small, kind)
    result = tokenizer.train()(pixels)
    assert result.pixels.shape == pixels.shape
    assert (result.ids is None) == (tokenizer.vocab is None)
    losses = torch.stack([result.pixels.square().mean(), *result.losses.values()])
    assert losses.isfinite().all()
    losses.sum().backward()
    trained = [p for p in tokenizer.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None and p.grad.isfinite().all() for p in trained)
    assert all(v.ndim == 0 and not v.requires_grad for v in result.metrics.values())
