"""Every quantizer: vectors to codes and back, with a gradient through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from visgen.config import build, plugin_config
from visgen.quantizers import Quantizer

PACKAGE = "quantizers"
B, N = 3, 10


def made(small: Callable[..., Any], kind: str) -> tuple[Quantizer, Tensor]:
    torch.manual_seed(0)
    quantizer = build(small(PACKAGE, kind)).eval()
    return quantizer, torch.randn(B, N, quantizer.channels)


def test_form(kind: str, check_form: Callable[[str, str], None]) -> None:
    check_form(PACKAGE, kind)


def test_the_default_builds_on_the_meta_device(kind: str) -> None:
    with torch.device("meta"):
        quantizer = build(plugin_config("visgen.quantizers", kind))
    assert quantizer.vocab > 1 and quantizer.channels >= 1


def test_ids_and_vectors_agree(kind: str, small: Callable[..., Any]) -> None:
    quantizer, x = made(small, kind)
    ids, result = quantizer.encode(x), quantizer(x)
    assert ids.shape == (B, N) and ids.dtype == torch.int64
    assert ids.min() >= 0 and ids.max() < quantizer.vocab and ids.unique().numel() > 1
    assert torch.equal(result.ids, ids)
    embedded = quantizer.embed(ids)
    assert embedded.shape == x.shape and torch.allclose(result.vectors, embedded, atol=1e-5)
    assert torch.equal(quantizer.encode(x), ids), "eval mode changes nothing"


def test_every_code_can_be_embedded(kind: str, small: Callable[..., Any]) -> None:
    quantizer, _ = made(small, kind)
    everything = torch.arange(quantizer.vocab).unsqueeze(0)
    table = quantizer.embed(everything)[0]
    assert table.isfinite().all() and len(table.unique(dim=0)) == quantizer.vocab


def test_the_gradient_passes_straight_through(kind: str, small: Callable[..., Any]) -> None:
    quantizer, x = made(small, kind)
    x.requires_grad_()
    quantizer.train()(x).vectors.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all() and x.grad.abs().sum() > 0


def test_losses_are_scalars_and_metrics_are_detached(kind: str, small: Callable[..., Any]) -> None:
    quantizer, x = made(small, kind)
    result = quantizer.train()(x.requires_grad_())
    assert all(v.ndim == 0 and v.isfinite() for v in (*result.losses.values(), *result.metrics.values()))
    assert not any(v.requires_grad for v in result.metrics.values())


def test_a_vector_does_not_depend_on_its_company(kind: str, small: Callable[..., Any]) -> None:
    quantizer, x = made(small, kind)
    assert torch.equal(quantizer.encode(x[1:2, 3:5]), quantizer.encode(x)[1:2, 3:5])


def test_computes_in_float32_under_autocast(kind: str, small: Callable[..., Any]) -> None:
    quantizer, x = made(small, kind)
    exact = quantizer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = quantizer(x)
        assert torch.equal(quantizer.encode(x), exact.ids)
    assert found.vectors.dtype == torch.float32 and torch.equal(found.vectors, exact.vectors)
