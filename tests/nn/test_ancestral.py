"""The reverse chain of a model of noise: published numbers, the law it draws, and its terminal step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from visgen.config import UserError
from visgen.nn.ancestral import Walk, chain, divergence, kept_times, log_variance, walk
from visgen.nn.diffusion import Path, sinusoids

COSINE = Path("epsilon", "squaredcos_cap_v2")
STD = 0.5  # of the toy data, N(0, STD^2), whose best prediction of the noise is known


def best(x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    return sigma * x / (alpha**2 * STD**2 + sigma**2)


def drawn(made: Walk, n: int, error: float = 0.0, predict: Callable[..., Tensor] = best) -> Tensor:
    """`n` draws by the best prediction, which errs by Gaussian noise of std `error`."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=rng)
    before = torch.zeros(n)
    for j in range(made.steps):
        _, alpha, sigma, p, q, a, b, c, _, _ = made.rows[j]
        now = p * x + q * (predict(x, alpha, sigma) + error * torch.randn(n, generator=rng))
        x, before = a * x + b * now + c * before, now
        if made.noisy[j]:
            x = x + (made.low[j] / 2).exp() * torch.randn(n, generator=rng)
    return x


def test_the_published_chain() -> None:
    """MAR's 100 steps of iDDPM's cosine schedule."""
    times = kept_times(100)
    assert times[:12] == [0, 10, 20, 30, 40, 50, 61, 71, 81, 91, 101, 111] and times[-4:] == [969, 979, 989, 999]
    kept = COSINE.cumulative()[torch.tensor(times)]
    betas = 1 - kept / torch.cat([torch.ones(1), kept[:-1]])
    for found, wanted in (
        (betas[:4], [4.1284e-5, 6.7984e-4, 1.16552e-3, 1.65152e-3]),
        (betas[97:], [0.555376, 0.749939, 0.99999]),
        (kept[97:], [9.712e-4, 2.4286e-4, 2.429e-9]),
    ):
        assert torch.allclose(found, torch.tensor(wanted, dtype=torch.float64), rtol=2e-4)
    _, low, high = chain(COSINE, times)
    for i, wanted in ((0, [0.00624, 0.00643]), (1, [0.00624, 0.02607]), (50, [0.18176, 0.18486])):
        found = torch.stack([low[i], high[i]]).div(2).exp()
        assert torch.allclose(found, torch.tensor(wanted), atol=6e-6), i


@pytest.mark.parametrize("schedule", ["squaredcos_cap_v2", "linear"])
def test_the_chain_of_all_times_is_that_of_diffusers(schedule: Any) -> None:
    from diffusers import DDPMScheduler

    path = Path("epsilon", schedule)
    table, low, high = chain(path, list(range(1000)))
    scheduler: Any = DDPMScheduler(**path.settings(), clip_sample=False)
    x, out = torch.randn(8, 8), torch.randn(8, 8)
    for time in (1, 400, 999):
        _, _, _, p, q, a, b, *_ = table[time]
        mean = a * x + b * (p * x + q * out)
        noise = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
        wanted = scheduler.step(out, time, x, generator=torch.Generator().manual_seed(0)).prev_sample
        assert torch.allclose(mean + (low[time] / 2).exp() * noise, wanted, rtol=2e-3, atol=2e-3)
        assert torch.isclose(scheduler.betas[time].log(), high[time], rtol=1e-4)


@pytest.mark.parametrize(("steps", "within"), [(25, 0.15), (100, 0.05)])
def test_it_draws_the_data(steps: int, within: float) -> None:
    """The bounds of the variance are bounds: data of this width lie between what they draw."""
    made = walk(COSINE, "auto", steps)
    least, most = (float(drawn(m, 40_000).std()) / STD for m in (made, made._replace(low=made.high)))
    assert 1 - within < least < 1 < most < 1 + within


def test_a_deterministic_walk_skips_the_terminal_step() -> None:
    """At 999 an error of the noise counts as 20,000 of x0: ancestral noise washes it out, DDIM keeps it."""
    n, error = 40_000, 0.01
    assert abs(float(drawn(walk(COSINE, "euler", 100), n, error).std()) / STD - 1) < 0.02
    assert float(drawn(walk(COSINE, "euler", 100, last=999), n, error).std()) > 2 * STD
    clean, erring = (float(drawn(walk(COSINE, "ancestral", 100, last=999), n, e).std()) for e in (0.0, error))
    assert abs(erring / clean - 1) < 0.02
    assert walk(COSINE, "dpmpp_2m", 10).rows[0, 0] == 989 and walk(COSINE, "auto", 10, last=900).rows[0, 0] == 900
    assert walk(COSINE, "auto", 100).rows[0, 0] == 989 and walk(COSINE, "auto", 100, last=999).rows[0, 0] == 999


def test_a_crude_head_explodes_from_999_alone() -> None:
    """A head whose output is bounded, as a layer norm makes it, cannot take back a large error of the first step."""

    def crude(x: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
        return best(x, alpha, sigma).clamp(-3, 3)

    made = (walk(COSINE, "ancestral", 100, last=last) for last in (None, 999))
    default, published = (float(drawn(m, 5000, 0.05, crude).std()) for m in made)
    assert default < 1.5 * STD and published > 10 * STD


def test_the_last_step_draws_nothing_and_other_solvers_never_do() -> None:
    assert walk(COSINE, "auto", 4).noisy == (True, True, True, False)
    assert not any(walk(COSINE, "dpmpp_2m", 4).noisy) and not any(walk(Path("velocity"), "auto", 4).noisy)


def test_a_network_says_where_the_variance_lies() -> None:
    low, high, share = torch.tensor(-4.0), torch.tensor(-2.0), torch.tensor([-1.0, 1.0, 0.0, 2.0])
    assert log_variance(share, low, high, "learned_range").tolist() == [-4, -2, -3, -1]
    assert log_variance(None, low, high, "fixed_large") == -2 and log_variance(None, low, high, "fixed_small") == -4


def test_the_divergence_is_that_of_the_two_steps() -> None:
    low, high, share, scale = torch.tensor(-4.0), torch.tensor(-2.0), torch.tensor([-1.0, 0.3]), torch.tensor(0.2)
    error = torch.tensor([0.0, 1.5])
    mine = Normal(scale * error, (log_variance(share, low, high, "learned_range") / 2).exp())
    posterior = Normal(torch.zeros(2), (low / 2).exp())
    wanted = kl_divergence(posterior, mine) / torch.tensor(2.0).log()
    assert torch.allclose(divergence(error, share, scale, low, high), wanted, atol=1e-6) and wanted[0] == 0


def test_sinusoids_are_float32_whatever_the_times_are() -> None:
    found = sinusoids(torch.tensor([0, 999]), 8)
    assert found.dtype == torch.float32 and found[0].tolist() == [1, 1, 1, 1, 0, 0, 0, 0]
    assert torch.isclose(found[1, 5], torch.tensor(999 * 0.1).sin(), atol=1e-4)


def test_what_a_path_does_not_have_is_refused() -> None:
    with pytest.raises(UserError, match="solver ancestral is for a model of epsilon"):
        walk(Path("velocity"), "ancestral", 5)
    with pytest.raises(UserError, match="last 900 is for a model of epsilon"):
        walk(Path("velocity"), "auto", 5, last=900)
    with pytest.raises(UserError, match=r"shift 2\.0 is for a model of velocity"):
        walk(COSINE, "auto", 5, 2.0)
    with pytest.raises(UserError, match="steps 1001 are more than the 1000 times there are"):
        walk(COSINE, "auto", 1001, last=999)
