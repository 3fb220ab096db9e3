"""RMSNorm against its formula."""

from __future__ import annotations

import reference
import torch

from visgen.nn.norm import RMSNorm


def test_agrees_with_the_formula() -> None:
    torch.manual_seed(0)
    for eps in (1e-5, 1.0):
        norm = RMSNorm(24, eps=eps)
        torch.nn.init.normal_(norm.weight)
        x = 3 * torch.randn(2, 5, 24)
        assert torch.allclose(norm(x), reference.rms_norm(x, norm.weight, eps), atol=1e-6)


def test_half_precision_keeps_float32_statistics() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(512, eps=1e-5)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    x = (300 * torch.randn(4, 512)).half()  # the squares overflow float16
    assert (x * x).isinf().any()
    exact = reference.rms_norm(x.float(), norm.weight)
    assert torch.allclose(norm(x).float(), exact, atol=2e-3, rtol=4e-3)
    assert norm(x).dtype == torch.float16


def test_the_weight_starts_at_one_and_scale_does_not_matter() -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(16, eps=1e-12), torch.randn(3, 16)
    assert torch.allclose(norm(x), norm(100 * x), atol=1e-5)
    assert torch.allclose(norm(x).pow(2).mean(-1), torch.ones(3), atol=1e-5)


def test_autocast_rounds_the_result_alone() -> None:
    torch.manual_seed(0)
    norm, x = RMSNorm(32, eps=1e-5), torch.randn(4, 32).bfloat16()
    torch.nn.init.normal_(norm.weight, mean=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        found = norm(x)
    assert torch.equal(found, reference.rms_norm(x.float(), norm.weight.detach(), 1e-5).bfloat16())
    assert not torch.equal(found, norm(x)), "without it the weight has the input's type"
