"""Convolutional networks: sizes, shapes, and attention against a naive twin."""

from dataclasses import replace

import pytest
import torch

from visgen.nn.conv import AttnBlock, Decoder, Down, Encoder, Shape, group_norm


def count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize(
    ("multipliers", "encoder", "decoder"),
    [((1, 1, 2, 2, 4), 29_298_176, 42_449_795), ((1, 2, 2, 4), 28_559_232, 41_415_171)],
)
def test_parameters_of_llamagen(multipliers, encoder, decoder):
    with torch.device("meta"):
        shape = Shape(multipliers=multipliers)
        assert count(Encoder(shape, 256)) == encoder
        assert count(Decoder(shape, 256)) == decoder


@pytest.mark.parametrize("attention", [True, False])
def test_any_multiple_of_the_stride(attention):
    shape = Shape(width=6, multipliers=(1, 2, 3), res_blocks=1, attention=attention)
    features = Encoder(shape, 5)(torch.randn(2, 3, 12, 20))
    assert shape.stride == 4
    assert features.shape == (2, 5, 3, 5)
    assert Decoder(shape, 5)(features).shape == (2, 3, 12, 20)


def test_attention_flag_only_removes_attention():
    with torch.device("meta"):
        with_it, without = (Encoder(Shape(width=8, attention=a), 4) for a in (True, False))
    blocks = sum(count(m) for m in with_it.modules() if isinstance(m, AttnBlock))
    assert blocks > 0
    assert count(with_it) - count(without) == blocks


def test_a_local_encoder_sees_its_neighbourhood_alone():
    torch.manual_seed(0)
    shape = Shape(width=8, multipliers=(1, 2, 2), res_blocks=1, attention=False, norm_groups=4)
    x = torch.randn(1, 3, 32, 32, requires_grad=True)
    for local, reach in ((True, 9), (False, 32)):
        features = Encoder(replace(shape, local=local), 5)(x)
        (seen,) = torch.autograd.grad(features[0, :, 3, 4].sum(), x)  # the patch of rows 12..15, columns 16..19
        rows, columns = seen[0].abs().sum(0).nonzero().unbind(1)
        assert max(int(rows.max() - rows.min()), int(columns.max() - columns.min())) + 1 == reach
        if local:
            assert rows.min() == 11 and columns.min() == 15


def test_attention_equals_the_formula():
    torch.manual_seed(0)
    block, x = AttnBlock(Shape(norm_groups=4), 8), torch.randn(2, 8, 3, 5)
    h = block.norm(x)
    q, k, v = (conv(h).flatten(2) for conv in (block.q, block.k, block.v))  # [B, C, HW]
    weights = torch.softmax(torch.einsum("bci,bcj->bij", q, k) / 8**0.5, -1)
    wanted = x + block.out(torch.einsum("bij,bcj->bci", weights, v).view(x.shape))
    torch.testing.assert_close(block(x), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("channels", "groups", "found"), [(128, 32, 32), (48, 32, 16), (20, 8, 4), (7, 32, 1)])
def test_groups_divide_the_width(channels, groups, found):
    norm = group_norm(channels, groups)
    assert (norm.num_groups, norm.eps) == (found, 1e-6)


def test_down_pads_right_and_below():
    down = Down(1)
    torch.nn.init.zeros_(down.conv.bias)
    down.conv.weight.data = torch.eye(3).flip(0)[None, None]  # picks the anti-diagonal
    x = torch.arange(16.0).view(1, 1, 4, 4)
    assert down(x)[0, 0, 1, 1] == x[0, 0, 3, 2] * 0 + x[0, 0, 2, 2] * 0 + x[0, 0, 3, 3]
    assert down(x)[0, 0, 0, 0] == x[0, 0, 0, 2] + x[0, 0, 1, 1] + x[0, 0, 2, 0]
