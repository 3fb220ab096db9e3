"""Dropout: its compiled mask is as random as PyTorch's, and keyed by the global generator."""

from __future__ import annotations

import pytest
import torch

from visgen.nn.dropout import Dropout, hashed


def compiled(rate: float) -> Dropout:
    layer = Dropout(rate).train()
    layer.forward = torch.compile(layer.forward, backend="eager")  # type: ignore[method-assign]
    return layer


def test_every_bit_of_a_lane_turns_about_half_of_the_upper_bits() -> None:
    x = torch.randint(
        -(1 << 31), (1 << 31) - 1, (20000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    for bit in range(13):
        turned = hashed(x) ^ hashed(x ^ (1 << bit))
        shares = [float((turned >> place & 1).double().mean()) for place in range(28, 32)]
        assert all(0.4 < share < 0.6 for share in shares), (bit, shares)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_a_compiled_mask_is_independent_bits(rate: float) -> None:
    """The share that is dropped, by row, by column and by pair of neighbours, lies within 5 standard deviations."""
    torch.manual_seed(0)
    layer, x = compiled(rate), torch.ones(8, 256, 512)
    out = layer(x)
    assert ((out == 0) | torch.isclose(out, torch.tensor(1 / (1 - rate)))).all()
    zero = (out == 0).double().flatten(0, 1)  # [2048, 512]
    pairs = torch.stack([(zero[1:] * zero[:-1]).mean(), (zero[:, 1:] * zero[:, :-1]).mean()])
    again = (zero * (layer(x) == 0).flatten(0, 1)).mean()
    n, both = zero.numel(), rate**2

    def near(found: torch.Tensor, wanted: float, count: float) -> bool:
        return bool(((found - wanted).abs() <= 5 * (wanted * (1 - wanted) / count) ** 0.5).all())

    assert near(zero.mean(), rate, n) and near(zero.mean(0), rate, 2048) and near(zero.mean(1), rate, 512)
    assert near(pairs, both, n) and near(again, both, n)


def test_a_compiled_mask_repeats_with_the_seed_and_its_gradient_is_the_mask() -> None:
    layer, x = compiled(0.3), torch.randn(3, 5, 64, requires_grad=True)
    torch.manual_seed(1)
    first = layer(x)
    torch.manual_seed(1)
    again = layer(x)
    other = layer(x)
    assert torch.equal(first, again) and not torch.equal(first, other)
    (pulled,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(pulled, (first != 0).float() / 0.7)


def test_eagerly_it_is_pytorchs() -> None:
    ours, theirs, x = Dropout(0.2), torch.nn.Dropout(0.2), torch.randn(4, 32)
    torch.manual_seed(2)
    found = ours(x)
    torch.manual_seed(2)
    assert torch.equal(found, theirs(x))
    assert torch.equal(compiled(0.2).eval()(x), x) and compiled(0.0)(x) is x
