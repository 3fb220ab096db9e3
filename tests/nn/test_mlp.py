"""SwiGLU's width rule and formula; stochastic depth."""

from __future__ import annotations

import pytest
import reference
import torch

from visgen.nn.mlp import DropPath, SwiGLU


@pytest.mark.parametrize("width", [64, 96, 100, 384, 768, 1024, 1280, 1536, 3200])
@pytest.mark.parametrize("multiple_of", [1, 32, 256])
def test_hidden_width_rule(width: int, multiple_of: int) -> None:
    with torch.device("meta"):
        layer = SwiGLU(width, multiple_of)
    assert layer.w1.out_features == reference.swiglu_hidden(width, multiple_of)


@pytest.mark.parametrize(
    ("width", "hidden"), [(768, 2048), (1024, 2816), (1280, 3584), (1536, 4096), (3200, 8704), (2560, 6912)]
)
def test_hidden_widths_of_llamagen(width: int, hidden: int) -> None:
    with torch.device("meta"):
        assert SwiGLU(width).w3.out_features == hidden


def test_agrees_with_the_formula() -> None:
    torch.manual_seed(0)
    layer, x = SwiGLU(24, 8).eval(), torch.randn(2, 3, 24)
    twin = reference.swiglu(x, layer.w1.weight, layer.w2.weight, layer.w3.weight)
    assert torch.allclose(layer(x), twin, atol=1e-6)
    assert {n for n, _ in layer.named_parameters()} == {"w1.weight", "w2.weight", "w3.weight"}


def test_drop_path_drops_whole_samples_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    layer, x = DropPath(0.25), torch.ones(4000, 2, 3)
    out = layer(x)
    assert ((out == 0) | torch.isclose(out, torch.tensor(1 / 0.75))).all()
    assert (out == out[:, :1, :1]).all(), "a sample is dropped as a whole"
    assert float((out[:, 0, 0] == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.equal(layer.eval()(x), x)
    assert DropPath(0.0)(x) is x
