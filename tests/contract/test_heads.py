"""Every head: a loss per token, and a law that is combined, filtered, pinned and drawn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen.config import build, plugin_config
from visgen.decode.noise import Noise, Stream
from visgen.decode.warp import Warp
from visgen.heads import Head

PACKAGE = "heads"
K, B, W, WIDTH, VOCAB = 2, 3, 4, 16, 8
H = torch.randn(K, B, W, WIDTH, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randint(VOCAB, (B, W), generator=torch.Generator().manual_seed(1))
ONE = torch.ones(1, B, W)


def made(small: Callable[..., Any], kind: str, **values: Any) -> Head:
    torch.manual_seed(0)
    head = build(small(PACKAGE, kind, **values), WIDTH, VOCAB).eval()
    if head.continuous:
        pytest.skip("its tokens are vectors: see tests/heads")
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return head


def gumbel(law: Any) -> Tensor:
    return Noise(torch.arange(B)).gumbel(torch.arange(W).expand(B, -1), law.vocab, Stream.TOKEN)


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)


def test_the_default_builds_on_the_meta_device(kind: str) -> None:
    with torch.device("meta"):
        assert isinstance(build(plugin_config("visgen.heads", kind), 768, 16384), Head)


def test_the_loss_is_per_token_in_float32_and_trains_every_parameter(kind: str, small: Callable[..., Any]) -> None:
    head = made(small, kind)
    loss = head.loss(H[0], TOKENS)
    assert loss.shape == (B, W) and loss.dtype == torch.float32 and loss.isfinite().all()
    loss.mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert made(small, kind).bfloat16().loss(H[0].bfloat16(), TOKENS).dtype == torch.float32


def test_the_loss_is_the_laws_surprise(kind: str, small: Callable[..., Any]) -> None:
    """In eval mode, whatever the training loss smooths."""
    head = made(small, kind, label_smoothing=0.3)
    law = head.dist(H[:1], ONE)
    if hasattr(law, "log_prob"):
        assert torch.allclose(head.loss(H[0], TOKENS), -law.log_prob(TOKENS), atol=1e-5)
    if hasattr(head.config, "label_smoothing"):
        assert not torch.allclose(head.train().loss(H[0], TOKENS), head.eval().loss(H[0], TOKENS), atol=1e-2)


def test_weights_choose_among_the_branches(kind: str, small: Callable[..., Any]) -> None:
    head = made(small, kind)
    noise = gumbel(head.dist(H[:1], ONE))
    for chosen in range(K):
        weights = torch.zeros(K, B, W)
        weights[chosen] = 1
        alone = head.dist(H[chosen : chosen + 1], ONE).sample(noise)
        assert torch.equal(head.dist(H, weights).sample(noise), alone)
    assert not torch.equal(head.dist(H[:1], ONE).sample(noise), head.dist(H[1:], ONE).sample(noise))


def test_a_law_keeps_its_own_drafts_and_replaces_foreign_ones(kind: str, small: Callable[..., Any]) -> None:
    head = made(small, kind)
    law, other = head.dist(H[:1], ONE), head.dist(H[1:], ONE)
    if not hasattr(law, "accept"):
        return
    noise, index = Noise(torch.arange(B)), torch.arange(W).expand(B, -1)
    draft = law.draw(noise, index, Stream.DRAFT, 1)
    assert law.accept(draft, law, noise, index, Stream.ACCEPT, 1).all()
    certain = law.pin(draft, torch.ones(B, W, dtype=torch.bool))
    assert not (law.residual(certain, noise, index, Stream.RESIDUAL, 1) == draft).any(), "no mass where q has all"
    assert torch.equal(certain.residual(other, noise, index, Stream.RESIDUAL, 1), draft)
    assert torch.equal(law.like(other.logits).sample(gumbel(law)), other.sample(gumbel(law)))


def test_a_law_is_drawn_from_filtered_and_pinned(kind: str, small: Callable[..., Any]) -> None:
    law = made(small, kind).dist(H[:1], ONE)
    noise = gumbel(law)
    drawn = law.sample(noise)
    assert drawn.shape == (B, W) and drawn.dtype == torch.int64 and drawn.min() >= 0 and drawn.max() < VOCAB
    greedy = law.warped(Warp(0.0))
    assert torch.equal(greedy.sample(noise), greedy.sample(torch.zeros_like(noise)))
    mask = torch.arange(W).expand(B, -1) % 2 == 0
    pinned = law.pin(TOKENS, mask).sample(noise)
    assert torch.equal(pinned[mask], TOKENS[mask]) and torch.equal(pinned[~mask], drawn[~mask])
