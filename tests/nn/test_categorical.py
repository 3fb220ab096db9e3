"""The categorical law."""

from __future__ import annotations

import math

import reference
import torch

from visgen.decode.warp import Warp
from visgen.nn.categorical import Categorical


def test_probabilities_and_likelihood() -> None:
    torch.manual_seed(0)
    law = Categorical(4 * torch.randn(2, 3, 5) + 7)
    tokens = torch.randint(5, (2, 3))
    for b in range(2):
        for w in range(3):
            twin = reference.softmax(law.logits[b, w].tolist())
            assert torch.allclose(law.probs()[b, w], torch.tensor(twin), atol=1e-6)
            assert math.isclose(float(law.log_prob(tokens)[b, w]), math.log(twin[int(tokens[b, w])]), rel_tol=1e-4)
    assert law.vocab == 5


def test_a_draw_is_the_largest_logit_plus_noise() -> None:
    law = Categorical(torch.tensor([[[0.0, 1.0, -torch.inf]]]))
    assert law.sample(torch.tensor([[[0.0, 0.0, 50.0]]])).tolist() == [[1]], "an excluded token is never drawn"
    assert law.sample(torch.tensor([[[2.0, 0.0, 0.0]]])).tolist() == [[0]]


def test_gumbel_max_follows_the_law() -> None:
    draws = 100_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0])
    uniform = torch.rand(draws, 1, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = Categorical(logits.expand(draws, 1, 4)).sample(-torch.log(-torch.log(uniform)))
    expected = torch.tensor(reference.softmax(logits.tolist())) * draws
    observed = torch.bincount(tokens.flatten(), minlength=4)
    z = (observed - expected) / (expected * (1 - expected / draws)).sqrt()
    assert z.abs().max() < 4


def test_pinned_tokens_are_certain_and_the_others_untouched() -> None:
    torch.manual_seed(0)
    law = Categorical(torch.randn(2, 2, 4))
    tokens, mask = torch.tensor([[3, 0], [1, 2]]), torch.tensor([[True, False], [False, True]])
    pinned = law.pin(tokens, mask)
    assert pinned.probs()[0, 0].tolist() == [0, 0, 0, 1] and pinned.probs()[1, 1].tolist() == [0, 0, 1, 0]
    assert torch.equal(pinned.logits[0, 1], law.logits[0, 1]) and torch.equal(pinned.logits[1, 0], law.logits[1, 0])
    filtered = law.warped(Warp(top_k=1)).pin(tokens, mask)
    assert filtered.probs()[0, 0].tolist() == [0, 0, 0, 1], "a known token may be one that the filter excludes"


def test_warped_applies_the_filter_to_the_logits() -> None:
    law = Categorical(torch.tensor([[[3.0, 1.0, 2.0]]]))
    assert law.warped(lambda logits: logits / 2).logits.tolist() == [[[1.5, 0.5, 1.0]]]
