"""The fused draw against guidance, filters, known tokens and noise one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from visgen.checks import UserError
from visgen.decode.noise import Noise, Stream
from visgen.decode.warp import Warp
from visgen.nn.guided import Guided

draw = pytest.importorskip("visgen.nn.fused.draw")  # needs Triton
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEEDS = torch.tensor([0, 1, 2**62, 5, 7, 2**63 - 1], device=DEVICE)
WARPS = [
    Warp(),
    Warp(temperature=0),
    Warp(0.7, top_k=20),
    Warp(top_p=0.8),
    Warp(1.3, 3, 0.9),
    Warp(top_k=1),
    Warp(top_p=1e-6),
    Warp(top_k=10**6),
]


def law(vocab: int, dtype: torch.dtype, warp: Warp, known: bool, branches: int = 2) -> tuple[Guided, Tensor]:
    """A law of 6 images x 3 tokens and their positions. Logits of few different values: many ties."""
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(branches, 6, 3, vocab, generator=generator) * 3
    index = torch.randint(0, 16, (6, 3), generator=generator).to(DEVICE)
    scale = torch.rand(6, 3, generator=generator) * 3
    weights = torch.stack([1 - scale, scale]) if branches == 2 else torch.ones(1, 6, 3)
    found = Guided(logits.to(dtype).to(DEVICE), weights.to(DEVICE)).warped(warp)
    if known:
        tokens, mask = (torch.randint(0, n, (6, 3), generator=generator).to(DEVICE) for n in (vocab, 2))
        found = found.pin(tokens, mask.bool())
    assert isinstance(found, Guided)
    return found, index


@pytest.mark.parametrize("warp", WARPS, ids=str)
@pytest.mark.parametrize("vocab", [300, 5])
def test_the_same_tokens_as_step_by_step(vocab: int, warp: Warp) -> None:
    noise = Noise(SEEDS)
    for dtype, known, branches in ((torch.float32, True, 1), (torch.bfloat16, False, 2)):
        found, index = law(vocab, dtype, warp, known, branches)
        slow = found.draw(noise, index, Stream.TOKEN)
        found.fused = True
        assert torch.equal(found.draw(noise, index, Stream.TOKEN), slow), (dtype, known, branches)


def test_another_stream_is_other_noise() -> None:
    found, index = law(300, torch.float32, Warp(), False)
    found.fused = True
    one, other = (found.draw(Noise(SEEDS), index, s) for s in (Stream.TOKEN, Stream.RESIDUAL))
    assert not torch.equal(one, other)
    found.fused = False
    assert torch.equal(found.draw(Noise(SEEDS), index, Stream.RESIDUAL), other)


def test_a_vocabulary_beyond_a_program() -> None:
    with pytest.raises(UserError, match=r"65536 is beyond.*--engine.kind eager"):
        draw.check_vocab(65536)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_logit_that_is_not_finite_raises_the_flag(value: float) -> None:
    for fused in (True, False):
        found, index = law(5, torch.float32, Warp(), False)
        found.fused, found.unsound = fused, torch.zeros(1, dtype=torch.int32, device=DEVICE)
        found.draw(Noise(SEEDS), index, Stream.TOKEN)
        assert int(found.unsound) == 0
        found, index = law(5, torch.float32, Warp(), False)
        found.fused, found.unsound = fused, torch.zeros(1, dtype=torch.int32, device=DEVICE)
        found.branches[0, 2, 1] = value
        tokens = found.draw(Noise(SEEDS), index, Stream.TOKEN)
        assert int(found.unsound) == 1 and int(tokens.min()) >= 0 and int(tokens.max()) < 5
