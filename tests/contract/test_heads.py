"""Every head: a loss per token, and what it says of a token under guidance; laws of codes are filtered and drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from visgen.config import build, implementation, kinds, plugin_config
from visgen.decode.noise import Noise, Stream
from visgen.decode.warp import Warp
from visgen.heads import Head

PACKAGE = "heads"
K, B, W, WIDTH, VOCAB = 2, 3, 4, 16, 8  # VOCAB: channels where tokens are vectors
H = torch.randn(K, B, W, WIDTH, generator=torch.Generator().manual_seed(0))
CODES = torch.randint(VOCAB, (B, W), generator=torch.Generator().manual_seed(1))
VECTORS = torch.randn(B, W, VOCAB, generator=torch.Generator().manual_seed(2))
ONE = torch.ones(1, B, W)
Small = Callable[..., Any]


def made(small: Small, kind: str, vocab: int = VOCAB, std: float = 0.5) -> Any:
    torch.manual_seed(0)
    head = build(small(PACKAGE, kind), WIDTH, vocab).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=std)
    return head


def targets(head: Head) -> Tensor:
    return VECTORS if head.continuous else CODES


def said(head: Any, law: Any) -> Tensor:
    """What a law says of its tokens in numbers that guidance adds up, [B, W, V or C] float32: logits, or a prediction;
    of a law that is walked, the prediction for one noised value."""
    if isinstance(law, Tensor):
        return law
    if hasattr(law, "logits"):
        return law.logits
    return law.predict(VECTORS[: law.given.shape[1], : law.given.shape[2]], head.about(torch.tensor(500.0)))[0]


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)


def test_the_default_builds_on_the_meta_device(kind: str) -> None:
    with torch.device("meta"):
        assert isinstance(build(plugin_config("visgen.heads", kind), 768, 16384), Head)


def test_the_loss_is_per_token_in_float32_and_trains_every_parameter(kind: str, small: Small) -> None:
    head = made(small, kind)
    loss = head.loss(H[0], targets(head))
    assert loss.shape == (B, W) and loss.dtype == torch.float32 and loss.isfinite().all()
    loss.mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert made(small, kind).bfloat16().loss(H[0].bfloat16(), targets(head)).dtype == torch.float32


def test_the_loss_of_a_token_is_its_own(kind: str, small: Small) -> None:
    """A head whose loss draws times and noise is given them: those of a row go with the row."""
    head, changed = made(small, kind), H[0].clone()
    target = targets(head)
    draws = [head.draws(target.shape, torch.Generator().manual_seed(0), H.device)] if hasattr(head, "draws") else []
    with torch.no_grad():
        plain = head.loss(H[0], target, *draws)
        alone = head.loss(H[0, 1:2], target[1:2], *(type(d)(*(part[:, 1:2] for part in d)) for d in draws))
        assert torch.allclose(alone, plain[1:2], rtol=1e-4)
        changed[1, 2] += 1
        moved = (head.loss(changed, target, *draws) - plain).abs() > 1e-4
    assert moved.nonzero().tolist() == [[1, 2]]


def test_loss_and_law_in_eval_mode_draw_nothing(kind: str, small: Small) -> None:
    head, before, found = made(small, kind), torch.get_rng_state(), []
    for seed in range(2):
        with torch.no_grad():
            found.append((head.loss(H[0], targets(head)), said(head, head.dist(H[:1], ONE))))
        assert seed or torch.equal(torch.get_rng_state(), before)
        torch.manual_seed(seed)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_guidance_adds_up_the_branches(kind: str, small: Small) -> None:
    head = made(small, kind)
    with torch.no_grad():
        null, given = (said(head, head.dist(h.unsqueeze(0), ONE)) for h in H)
        assert null.shape == (B, W, VOCAB) and not torch.allclose(null, given, atol=1e-2)
        assert torch.allclose(said(head, head.law(H[1])), given, atol=1e-4)
        scale = torch.linspace(0, 3, B * W).view(B, W)  # each token has its own
        found = said(head, head.dist(H, torch.stack([1 - scale, scale])))
    assert torch.allclose(found, null + scale.unsqueeze(-1) * (given - null), atol=1e-3)


def test_a_law_depends_on_neither_batch_nor_window(kind: str, small: Small) -> None:
    head = made(small, kind)
    with torch.no_grad():
        whole = said(head, head.dist(H, torch.full((K, B, W), 0.5)))
        part = said(head, head.dist(H[:, :2, :1], torch.full((K, 2, 1), 0.5)))
    assert torch.allclose(part, whole[:2, :1], atol=1e-4)


def test_bf16_weights_say_float32_that_is_near(kind: str, small: Small) -> None:
    head = made(small, kind, std=0.1)
    with torch.no_grad():
        wanted = said(head, head.dist(H[:1], ONE))
        found = said(head.bfloat16(), head.dist(H[:1].bfloat16(), ONE))
    assert found.dtype == torch.float32 and 0 < (found - wanted).abs().max() < 0.1 * wanted.abs().max()


@pytest.mark.parametrize(("rows", "width", "vocab"), [(1, 1, 1), (2, 1, 3), (1, 7, 5)])
def test_odd_sizes(kind: str, rows: int, width: int, vocab: int, small: Small) -> None:
    head = made(small, kind, vocab)
    h = torch.randn(rows, width, WIDTH, generator=torch.Generator().manual_seed(3))
    target = torch.zeros((rows, width, vocab) if head.continuous else (rows, width), dtype=targets(head).dtype)
    with torch.no_grad():
        loss = head.loss(h, target)
        assert loss.shape == (rows, width) and loss.isfinite().all()
        law = head.dist(h.unsqueeze(0), torch.ones(1, rows, width))
        if not isinstance(law, Tensor) and head.continuous:
            law = law.predict(target, head.about(torch.tensor(500.0)))[0]
    found = said(head, law)
    assert found.shape == (rows, width, vocab) and found.isfinite().all()


def test_saved_weights_give_the_same_loss(kind: str, small: Small, tmp_path: Path) -> None:
    head = made(small, kind)
    save_file(head.state_dict(), tmp_path / "head.safetensors")
    other = build(small(PACKAGE, kind), WIDTH, VOCAB).eval()
    other.load_state_dict(load_file(tmp_path / "head.safetensors"))
    with torch.no_grad():
        assert torch.equal(*(one.loss(H[0], targets(head)) for one in (head, other)))


def test_the_fused_law_is_the_law(kind: str, small: Small) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    head = made(small, kind).to(device).requires_grad_(False)
    fused = head.fused()
    if fused is None:
        assert kind not in {"diffusion"}
        return
    weights = torch.full((K, B, W), 0.5, device=device)
    about, x = head.about(torch.tensor([500.0], device=device)), VECTORS.to(device)
    wanted, found = (
        head.dist(H.to(device), weights).predict(x, about[0]),
        fused(H.to(device), weights).along(about)(x, 0),
    )
    assert all(torch.allclose(a, b, atol=1e-3) for a, b in zip(wanted, found, strict=True))


# ------------------------------------------------------------------------------------------------------- laws of codes

OF_CODES = [
    name
    for name in kinds("visgen.heads")
    if not implementation(plugin_config("visgen.heads", name)).continuous  # type: ignore[attr-defined]
]


def gumbel(law: Any) -> Tensor:
    return Noise(torch.arange(B)).gumbel(torch.arange(W).expand(B, -1), law.vocab, Stream.TOKEN)


@pytest.mark.parametrize("coded", OF_CODES)
def test_the_loss_is_the_laws_surprise(coded: str, small: Small) -> None:
    head = made(small, coded)
    assert torch.allclose(head.loss(H[0], CODES), -head.dist(H[:1], ONE).log_prob(CODES), atol=1e-5)


@pytest.mark.parametrize("coded", OF_CODES)
def test_weights_choose_among_the_branches(coded: str, small: Small) -> None:
    head = made(small, coded)
    noise = gumbel(head.dist(H[:1], ONE))
    for chosen in range(K):
        weights = torch.zeros(K, B, W)
        weights[chosen] = 1
        alone = head.dist(H[chosen : chosen + 1], ONE).sample(noise)
        assert torch.equal(head.dist(H, weights).sample(noise), alone)
    assert not torch.equal(head.dist(H[:1], ONE).sample(noise), head.dist(H[1:], ONE).sample(noise))


@pytest.mark.parametrize("coded", OF_CODES)
def test_a_law_keeps_its_own_drafts_and_replaces_foreign_ones(coded: str, small: Small) -> None:
    head = made(small, coded)
    law, other = head.dist(H[:1], ONE), head.dist(H[1:], ONE)
    noise, index = Noise(torch.arange(B)), torch.arange(W).expand(B, -1)
    draft = law.draw(noise, index, Stream.DRAFT, 1)
    assert law.accept(draft, law, noise, index, Stream.ACCEPT, 1).all()
    certain = law.pin(draft, torch.ones(B, W, dtype=torch.bool))
    assert not (law.residual(certain, noise, index, Stream.RESIDUAL, 1) == draft).any(), "no mass where q has all"
    assert torch.equal(certain.residual(other, noise, index, Stream.RESIDUAL, 1), draft)
    assert torch.equal(law.like(other.logits).sample(gumbel(law)), other.sample(gumbel(law)))


@pytest.mark.parametrize("coded", OF_CODES)
def test_a_law_is_drawn_from_filtered_and_pinned(coded: str, small: Small) -> None:
    law = made(small, coded).dist(H[:1], ONE)
    noise = gumbel(law)
    drawn = law.sample(noise)
    assert drawn.shape == (B, W) and drawn.dtype == torch.int64 and drawn.min() >= 0 and drawn.max() < VOCAB
    greedy = law.warped(Warp(0.0))
    assert torch.equal(greedy.sample(noise), greedy.sample(torch.zeros_like(noise)))
    mask = torch.arange(W).expand(B, -1) % 2 == 0
    pinned = law.pin(CODES, mask).sample(noise)
    assert torch.equal(pinned[mask], CODES[mask]) and torch.equal(pinned[~mask], drawn[~mask])


def test_there_are_heads_of_codes() -> None:
    assert "categorical" in OF_CODES
