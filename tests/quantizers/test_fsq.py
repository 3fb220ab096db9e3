"""Finite scalar quantisation: a bijection, the digit order, gradients."""

import pytest
import torch

from visgen.config import UserError, build
from visgen.quantizers.fsq import Config

LEVELS = [(8, 5, 5, 5), (8, 6, 5), (3,), (2, 4), (7, 5, 5)]


@pytest.mark.parametrize("levels", LEVELS)
def test_every_index_survives_the_round_trip(levels):
    quantizer = build(Config(levels))
    ids = torch.arange(quantizer.vocab)[None]
    codes = quantizer.embed(ids)
    assert codes.shape == (1, quantizer.vocab, len(levels))
    assert codes.abs().max() <= 1
    assert codes[0].unique(dim=0).shape[0] == quantizer.vocab
    half, shift = torch.tensor(levels) // 2, (torch.tensor(levels) % 2 == 0) * 0.5
    reach = (torch.tensor(levels) - 1) * 1.001 / 2  # of the bound; its inverse:
    z = torch.atanh((codes * half + shift) / reach) - torch.atanh(shift / reach)
    assert torch.equal(quantizer.encode(z), ids)
    out = quantizer(z)
    assert torch.equal(out.ids, ids) and out.losses == {}
    torch.testing.assert_close(out.vectors, codes)
    assert out.metrics["usage"] == 1
    assert out.metrics["perplexity"] == pytest.approx(quantizer.vocab, rel=1e-3)


def test_least_significant_channel_first():
    quantizer = build(Config((8, 5, 5)))
    low = quantizer.embed(torch.tensor([[0, 1, 8, 40]]))[0]
    assert low.tolist() == [[-1, -1, -1], [-0.75, -1, -1], [-1, -0.5, -1], [-1, -1, -0.5]]


def test_large_inputs_reach_every_outer_level_and_no_further():
    quantizer = build(Config((8, 5, 2)))
    ends = quantizer.embed(quantizer.encode(torch.tensor([[[-99.0] * 3, [99.0] * 3]])))[0]
    assert ends.tolist() == [[-1, -1, -1], [0.75, 1, 0]]


def test_straight_through_and_float32():
    quantizer, z = build(Config((8, 5))), torch.randn(2, 3, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = quantizer(z)
    assert out.vectors.dtype == torch.float32
    out.vectors.sum().backward()
    bound = quantizer._bound(z) / (quantizer.levels // 2)
    torch.testing.assert_close(z.grad, torch.autograd.grad(bound.sum(), z)[0])
    assert (z.grad > 0).all()


def test_levels_below_two_are_refused():
    with pytest.raises(UserError, match="at least 2"):
        build(Config((8, 1)))


@pytest.mark.parametrize("levels", [(10_000, 10_000), (100_000,) * 5])
def test_more_codes_than_can_be_counted_are_refused(levels):
    with pytest.raises(UserError, match=rf"make 10{{8,25}} codes, {2**24} are the most"):
        build(Config(levels))
