"""Every backbone: one forward that trains and decodes, over the layout it was given.

Those of continuous tokens, whose windows are noised blocks, meet the same promises in `tests/backbones`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from visgen.backbones import Backbone
from visgen.conditions import Prefix
from visgen.config import UserError, build, implementation, plugin_config
from visgen.layout import Layout

PACKAGE = "backbones"
B, P, VOCAB = 2, 2, 12
LAYOUT = Layout.raster((1, 2, 3)).with_prefix(P)
TOKENS = torch.randint(VOCAB, (B, 6), generator=torch.Generator().manual_seed(0))


def made(small: Callable[..., Any], kind: str, std: float = 0.3) -> Backbone:
    torch.manual_seed(0)
    if implementation(plugin_config("visgen.backbones", kind)).continuous:  # type: ignore[attr-defined]
        pytest.skip("its tokens are vectors: see tests/backbones")
    backbone = build(small(PACKAGE, kind), LAYOUT, VOCAB).eval()
    for parameter in backbone.parameters():
        torch.nn.init.normal_(parameter, float(parameter.ndim == 1), std)
    return backbone


def prefix(backbone: Backbone, visible: Tensor | None = None) -> Prefix:
    vectors = torch.randn(B, P, backbone.width, generator=torch.Generator().manual_seed(1))
    return Prefix(vectors, visible)


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)


def test_the_default_size_builds_on_the_meta_device(kind: str) -> None:
    config = plugin_config("visgen.backbones", kind)
    with torch.device("meta"):
        layout = implementation(config).arrange(config, (1, 16, 16), 1)  # type: ignore[attr-defined]
        backbone = build(config, layout, 16384)
    assert backbone.width == config.width and all(p.is_meta for p in backbone.parameters())


def test_the_training_pass(kind: str, small: Callable[..., Any]) -> None:
    backbone = made(small, kind)
    assert backbone.layout is LAYOUT
    h = backbone(TOKENS, None, cond=prefix(backbone))
    assert h.shape == (B, P + 6, backbone.width) and h.isfinite().all() and h.std() > 0.1
    h.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())


def test_windows_with_a_cache_equal_the_training_pass(kind: str, small: Callable[..., Any]) -> None:
    backbone = made(small, kind)
    visible = torch.tensor([[True, True], [False, True]])
    for cond in (prefix(backbone), prefix(backbone, visible)):
        with torch.no_grad():
            whole = backbone(TOKENS, None, cond=cond)
            cache = backbone.make_cache(B, torch.device("cpu"), torch.float32)
            before = torch.cat([torch.full((B, P), 7), TOKENS], 1)  # 7: ignored at prefix slots
            parts = []
            for start, end in ((0, 2), (2, 3), (3, 7), (7, 8)):
                pos = torch.arange(start, end).expand(B, -1)
                parts.append(backbone(before[:, start:end], pos, cond=cond, cache=cache))
        assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-5)


def test_the_fused_form_equals_windows_with_a_cache(kind: str, small: Callable[..., Any]) -> None:
    """Images at places of their own, two branches, in ring order, over stale slots."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone = made(small, kind).to(device).requires_grad_(False)
    fused = backbone.fused()
    if fused is None:
        pytest.skip("it has no fused form")
    visible = torch.tensor([[True, True], [False, True]]).repeat(2, 1)
    tokens = TOKENS.to(device)
    for window in ([[0], [3]], [[2, 0, 1], [4, 5, 3]]):
        index = torch.tensor(window, device=device)
        previous, pos = tokens.gather(1, (index - 1).clamp(min=0)), (index + P - 1).repeat(2, 1)
        for given in (None, visible.to(device)):
            vectors = torch.randn(2 * B, P, backbone.width, generator=torch.Generator().manual_seed(2))
            cond, caches = Prefix(vectors.to(device), given), []
            for _ in range(2):
                cache = backbone.make_cache(2 * B, device, torch.float32)
                cache.keys.copy_(torch.linspace(-1, 1, cache.keys.numel()).view_as(cache.keys))
                cache.values.copy_(cache.keys.flip(-1))
                caches.append(cache)
            with torch.no_grad():
                wanted = backbone(previous.repeat(2, 1), pos, cond=cond, cache=caches[0])
            assert torch.allclose(fused(tokens, index, cond, caches[1]), wanted, atol=1e-4)
            assert torch.allclose(caches[1].keys, caches[0].keys, atol=1e-4)


def test_no_slot_sees_a_later_one(kind: str, small: Callable[..., Any]) -> None:
    backbone = made(small, kind)
    with torch.no_grad():
        plain = backbone(TOKENS, None, cond=prefix(backbone))
        for k in range(6):
            changed = TOKENS.clone()
            changed[:, k] = (changed[:, k] + 1) % VOCAB
            after = backbone(changed, None, cond=prefix(backbone))
            assert torch.equal(after[:, : P + k], plain[:, : P + k])
            assert not torch.equal(after[:, P + k], plain[:, P + k])


def test_rows_are_independent(kind: str, small: Callable[..., Any]) -> None:
    backbone = made(small, kind)
    cond = prefix(backbone)
    with torch.no_grad():
        both = backbone(TOKENS, None, cond=cond)
        alone = backbone(TOKENS[1:], None, cond=Prefix(cond.vectors[1:]))
    assert torch.allclose(both[1:], alone, atol=1e-5)


def test_control_is_added_to_the_slot_that_predicts(kind: str, small: Callable[..., Any]) -> None:
    backbone = made(small, kind)
    cond, control = prefix(backbone), torch.randn(3, B, 6, backbone.width)
    with torch.no_grad():
        plain = backbone(TOKENS, None, cond=cond)
        assert torch.equal(backbone(TOKENS, None, cond=cond, control=torch.zeros_like(control)), plain)
        whole = backbone(TOKENS, None, cond=cond, control=control)
        if torch.equal(whole, plain):
            pytest.skip("it takes no control")
        for k in range(6):
            one = torch.zeros_like(control)
            one[:, :, k] = control[:, :, k]
            after = backbone(TOKENS, None, cond=cond, control=one)
            slot = P - backbone.shift + k
            assert torch.equal(after[:, :slot], plain[:, :slot])
            assert not torch.allclose(after[:, slot], plain[:, slot], atol=1e-3)
        cache = backbone.make_cache(B, torch.device("cpu"), torch.float32)
        before = torch.cat([torch.full((B, P), 7), TOKENS], 1)
        parts = []
        for start, end in ((0, 1), (1, 3), (3, 8)):
            pos = torch.arange(start, end).expand(B, -1)
            parts.append(backbone(before[:, start:end], pos, cond=cond, control=control, cache=cache))
    assert torch.allclose(torch.cat(parts, 1), whole, atol=2e-5)


def test_another_grid_shares_the_weights_or_is_refused(kind: str, small: Callable[..., Any]) -> None:
    backbone, layout = made(small, kind), Layout.raster((1, 3, 2)).with_prefix(P)
    try:
        other = backbone.at(layout)
    except UserError as error:
        assert "leave size out" in str(error)
        return
    assert all(a is b for a, b in zip(other.parameters(), backbone.parameters(), strict=True))
    built = build(small(PACKAGE, kind), layout, VOCAB).eval()
    built.load_state_dict(backbone.state_dict())
    with torch.no_grad():
        found, own = (b(TOKENS, None, cond=prefix(backbone)) for b in (other, backbone))
        assert torch.equal(found, built(TOKENS, None, cond=prefix(backbone))) and not torch.allclose(
            found, own, atol=1e-3
        )
    assert backbone.layout is LAYOUT
