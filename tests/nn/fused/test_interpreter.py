"""The quick interpreter of these tests gives the bits of Triton's own, with less work."""

from __future__ import annotations

import interpreter
import pytest
import torch
from torch import Tensor

from visgen.decode.noise import Noise, Stream
from visgen.decode.warp import Warp
from visgen.nn.guided import Guided

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("kernels are compiled here", allow_module_level=True)
from triton.runtime import interpreter as tritons

from visgen.nn.fused.linear import Workspace, linear


def found() -> list[Tensor]:
    """A draw with every filter and shared noise, and products of few and more rows with a norm and a gate."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 2, 3, 37, generator=rng)
    law = Guided(logits, torch.full((2, 2, 3), 0.5), Warp(1.3, 9, 0.9), None, True)
    index = torch.arange(6).view(2, 3)
    made = [law.draw(Noise(torch.tensor([3, 2**62])), index, Stream.TOKEN)]
    weight, gain = torch.randn(20, 33, generator=rng), torch.rand(33, generator=rng)
    for dtype in (torch.float32, torch.float16):
        for rows in (1, 5, 40):
            x = torch.randn(rows, 33, generator=rng).to(dtype)
            given = {"gain": gain.to(dtype), "up": weight.flip(0).to(dtype)}
            made.append(linear(x, weight.to(dtype), Workspace(torch.device("cpu")), **given))
    return made


def test_the_bits_of_tritons_own() -> None:
    quick = found(), tritons.InterpretedFunction.__call__
    with interpreter.plain():
        plain = found(), tritons.InterpretedFunction.__call__
    if quick[1] is plain[1]:
        pytest.skip("another Triton: its interpreter is left as it is")
    assert tritons.InterpretedFunction.__call__ is not plain[1]
    assert all(torch.equal(a, b) for a, b in zip(quick[0], plain[0], strict=True))
    assert all(len(value.unique()) > 1 for value in quick[0])
