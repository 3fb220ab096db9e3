"""The diffusion head: what its loss averages, its variance, its guidance and its precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from visgen.heads.diffusion import Config, DiffusionHead, Draws
from visgen.nn.ancestral import chain, divergence

H = torch.randn(2, 3, 4, 16, generator=torch.Generator().manual_seed(0))  # [K, B, W, D]
TARGET = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))


def made(std: float = 0.3, **values: Any) -> DiffusionHead:
    torch.manual_seed(0)
    head = DiffusionHead(Config(layers=2, width=24, **values), 16, 5)
    for parameter in head.parameters():
        if std:
            torch.nn.init.normal_(parameter, std=std)
    return head


def draws(head: DiffusionHead, seed: int = 0) -> Draws:
    return head.draws(TARGET.shape, torch.Generator().manual_seed(seed), torch.device("cpu"))


def test_it_starts_at_zero_so_the_first_error_is_the_targets_power() -> None:
    for predicts in ("epsilon", "velocity"):
        head = made(0, predicts=predicts)
        given = draws(head)
        wanted = given.noise if predicts == "epsilon" else given.noise - TARGET
        assert torch.allclose(head.errors(H[0], TARGET, given).mse, wanted.square().mean(-1), atol=1e-6)


def test_the_loss_is_the_mean_over_draws_of_error_and_divergence() -> None:
    head = made(repeats=3)
    given = draws(head)
    assert given.time.shape == (3, 3, 4) and given.noise.shape == (3, 3, 4, 5)
    assert given.time.unique().numel() > 20 and (given.time == given.time.round()).all()
    table, low, high = chain(head.path, list(range(1000)))
    total = torch.zeros(3, 4)
    for r in range(3):
        for b in range(3):
            for w in range(4):
                time, noise = given.time[r, b, w], given.noise[r, b, w]
                noised = head.path.noised(TARGET[b, w], noise, time)
                found, share = head.predict(noised, head.about(time), head.condition(H[0, b, w]))
                t = int(time)
                vb = divergence(found - noise, share, table[t, 4] * table[t, 6], low[t], high[t])  # type: ignore[arg-type]
                total[b, w] += ((found - noise).square() + vb).mean() / 3
    loss = head.loss(H[0], TARGET, given)
    assert loss.shape == (3, 4) and torch.allclose(loss, total, rtol=1e-4)
    assert torch.equal(head.loss(H[0], TARGET), head.loss(H[0], TARGET)), "the same draws at every call"


def test_the_divergence_trains_the_variance_alone() -> None:
    head = made()
    head.errors(H[0], TARGET, draws(head)).vb.mean().backward()
    assert head.output.weight.grad is not None
    prediction, variance = head.output.weight.grad.chunk(2)
    assert prediction.abs().max() == 0 and variance.abs().max() > 0


@pytest.mark.parametrize("values", [{"variance": "fixed_large"}, {"predicts": "velocity"}])
def test_without_a_learned_variance_there_is_one_output(values: dict[str, Any]) -> None:
    head = made(**values)
    assert head.output.out_features == 5 and head.errors(H[0], TARGET, draws(head)).vb.abs().max() == 0
    assert head.predict(TARGET, head.about(torch.tensor(3.0)), head.condition(H[0]))[1] is None


def test_guidance_extrapolates_the_prediction_and_leaves_the_variance() -> None:
    head = made()
    weights = torch.stack([torch.full((3, 4), -1.5), torch.full((3, 4), 2.5)])
    time = head.about(torch.tensor(500.0))
    (null, _), (given, share) = (head.predict(TARGET, time, head.condition(h)) for h in H)
    found, guided_share = head.dist(H, weights).predict(TARGET, time)
    assert guided_share is not None and share is not None
    assert torch.allclose(found, null + 2.5 * (given - null), atol=1e-5) and torch.allclose(guided_share, share)


def test_every_parameter_is_trained_and_none_is_decayed() -> None:
    from visgen.train.optim import split_decay

    head = made()
    head.loss(H[0], TARGET).mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())
    assert not split_decay(head)[0]


def test_a_body_in_bfloat16_gives_float32_that_is_near() -> None:
    head = made(0.15)
    time = torch.tensor(500.0)
    wanted, _ = head.predict(TARGET, head.about(time), head.condition(H[0]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, _ = head.predict(TARGET, head.about(time), head.condition(H[0]))
    half = head.bfloat16()
    found, share = half.predict(TARGET, half.about(time), half.condition(H[0].bfloat16()))
    assert found.dtype == cast.dtype == torch.float32 and share is not None and share.dtype == torch.float32
    for other in (found, cast):
        assert 0 < (other - wanted).abs().max() < 0.05 * wanted.abs().max()
