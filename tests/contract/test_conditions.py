"""Every condition: prefix slots of a batch, and the null condition for dropped rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from visgen.conditions import Condition
from visgen.config import build, plugin_config

PACKAGE = "conditions"
B, WIDTH = 4, 16
BATCH = {
    "label": torch.tensor([0, 1, 2, 1]),
    "text": torch.randn(B, 5, 24, generator=torch.Generator().manual_seed(0)),
    "text_mask": torch.arange(5) >= torch.tensor([[0], [3], [4], [1]]),
    "map": torch.randn(B, 1, 3, 8, 12, generator=torch.Generator().manual_seed(1)),
}


def made(small: Callable[..., Any], kind: str) -> Condition:
    torch.manual_seed(0)
    return build(small(PACKAGE, kind, tokens=5, channels=24, grid=(1, 2, 3)), WIDTH).eval()


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)


def test_the_default_builds_on_the_meta_device(kind: str) -> None:
    with torch.device("meta"):
        assert build(plugin_config("visgen.conditions", kind), 768).prefix >= 1


def test_shape_and_gradient(kind: str, small: Callable[..., Any]) -> None:
    condition = made(small, kind)
    prefix = condition(BATCH)
    assert prefix.vectors.shape == (B, condition.prefix, WIDTH) and prefix.vectors.is_floating_point()
    assert prefix.visible is None or (prefix.visible.shape == (B, condition.prefix) and prefix.visible[:, -1].all())
    prefix.vectors.square().sum().backward()
    assert all(p.grad is not None for p in condition.parameters())


def test_dropped_rows_become_null_and_the_others_stay(kind: str, small: Callable[..., Any]) -> None:
    condition = made(small, kind)
    given, null = condition(BATCH), condition.null(condition(BATCH))
    drop = torch.tensor([True, False, False, True])
    mixed = condition(BATCH, drop)
    assert torch.equal(mixed.vectors[drop], null.vectors[drop])
    assert torch.equal(mixed.vectors[~drop], given.vectors[~drop])
    for other in (null, mixed):
        assert (other.visible is None) == (given.visible is None), "null rows keep their padding"
        assert given.visible is None or torch.equal(other.visible, given.visible)
    assert torch.equal(condition(BATCH, torch.zeros(B, dtype=torch.bool)).vectors, given.vectors)


def test_a_row_does_not_depend_on_its_company(kind: str, small: Callable[..., Any]) -> None:
    condition = made(small, kind)
    alone = condition({k: v[2:3] for k, v in BATCH.items()})
    assert torch.allclose(alone.vectors, condition(BATCH).vectors[2:3], atol=1e-6)
