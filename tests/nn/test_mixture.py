"""The mixture of codes: every identity by another road, and a map whose law is the one that it was given."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from scipy import stats
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from visgen.nn.mixture import (
    CHUNK,
    STEPS,
    denoise,
    fm_map,
    log_density,
    most_likely,
    posterior,
    scale_of,
    score,
    velocity,
)

TIMES = (0.95, 0.7, 0.5, 0.3, 0.15, 0.05)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def codebook(count: int, channels: int, unit: bool = True, seed: int = 0) -> Tensor:
    """Scaled codes [V, C] float64, of unit length before that or not."""
    codes = torch.randn(count, channels, generator=rng(seed), dtype=torch.float64)
    codes = (
        torch.nn.functional.normalize(codes, dim=1) if unit else codes * (0.5 + torch.rand(count, 1, generator=rng(9)))
    )
    return codes * scale_of(codes)


def laws(rows: int, count: int, seed: int = 1, peak: float = 1.5) -> Tensor:
    """log p [T, V], a few codes of each row excluded."""
    logits = peak * torch.randn(rows, count, generator=rng(seed), dtype=torch.float64)
    logits[:, :: max(count // 8, 2)] = -torch.inf
    return logits.log_softmax(1)


def noised(codes: Tensor, t: float, rows: int, seed: int = 2) -> Tensor:
    ids = torch.randint(len(codes), (rows,), generator=rng(seed))
    e = torch.randn(rows, codes.shape[1], generator=rng(seed + 1), dtype=codes.dtype)
    return (1 - t) * codes[ids] + t * e


def column(t: float, x: Tensor) -> Tensor:
    return torch.full((len(x), 1), t, dtype=x.dtype)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("t", TIMES)
def test_score_is_the_gradient_of_the_log_density(t: float, unit: bool) -> None:  # S1
    codes, logp = codebook(24, 4, unit), laws(5, 24)
    x, time = noised(codes, t, 5).requires_grad_(), column(t, logp)
    wanted = torch.stack([reference.mixture_log_density(x[i], t, logp[i].exp().tolist(), codes) for i in range(5)])
    slope = torch.autograd.grad(wanted.sum(), x)[0]
    found = posterior(x.detach(), time, logp, codes, chunk=7)
    own = score(x.detach(), time, found.mean)
    assert (own - slope).norm() < 1e-8 * slope.norm()
    assert torch.allclose(log_density(found, time, 4), wanted.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("t", TIMES)
def test_velocity_and_score_agree(t: float) -> None:  # S2, DD2 appendix E.1
    codes, logp = codebook(24, 4), laws(5, 24)
    x, time = noised(codes, t, 5), column(t, logp)
    mean = posterior(x, time, logp, codes).mean
    other = (-t * score(x, time, mean) - x) / (1 - t)
    v = velocity(x, time, mean)
    assert ((v - other).abs() / v.abs().clamp(min=1)).max() < 1e-12 / min(t, 1 - t)


@pytest.mark.parametrize("t", TIMES)
def test_the_closed_form_gradient_is_that_of_the_sum_over_codes(t: float) -> None:  # S3
    codes, logp = codebook(24, 4, unit=False), laws(5, 24)
    x, time = noised(codes, t, 5).requires_grad_(), column(t, logp)
    g = torch.randn(5, 4, generator=rng(4), dtype=torch.float64)
    z = logp - (x.unsqueeze(1) - (1 - t) * codes).square().sum(2) / (2 * t * t)
    plain = z.softmax(1) @ codes
    wanted = torch.autograd.grad((plain * g).sum(), x)[0]
    found = torch.autograd.grad((denoise(x, time, logp, codes, 7) * g).sum(), x)[0]
    assert torch.allclose(denoise(x, time, logp, codes, 7), plain, atol=1e-12)
    assert (found - wanted).norm() < 1e-10 * max(1.0, float(wanted.norm()))


def test_moments_are_those_of_bayes_rule() -> None:
    codes, logp, t = codebook(24, 4), laws(3, 24), 0.3
    x = noised(codes, t, 3)
    found = posterior(x, column(t, x), logp, codes)
    for i in range(3):
        w = torch.tensor(reference.mixture_posterior(x[i], t, logp[i].exp().tolist(), codes), dtype=torch.float64)
        mean = w @ codes
        assert torch.allclose(found.mean[i], mean, atol=1e-12)
        spread = (w[:, None] * codes).T @ codes - torch.outer(mean, mean)
        assert found.covariance is not None and torch.allclose(found.covariance[i], spread, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 7, 24, CHUNK])
def test_chunks_do_not_matter(chunk: int) -> None:  # S4, whole chunks of excluded codes too
    codes, logp = codebook(24, 4).float(), laws(6, 24).float()
    logp[:, :8] = -torch.inf
    for t in TIMES:
        x = noised(codes, t, 6)
        whole, parts = (posterior(x, column(t, x), logp, codes, chunk=c) for c in (24, chunk))
        for a, b in zip(whole, parts, strict=True):
            assert a.isfinite().all() and torch.allclose(a, b, atol=1e-5, rtol=1e-5)
        assert torch.equal(most_likely(x, t, logp, codes, chunk), most_likely(x, t, logp, codes, 24))
    noise = torch.randn(6, 4, generator=rng(5))
    assert torch.equal(fm_map(noise, logp, codes, chunk=chunk), fm_map(noise, logp, codes, chunk=24))


def test_all_is_computed_in_float32_at_least() -> None:
    codes, logp = codebook(24, 4).float(), laws(6, 24).float()
    x = noised(codes, 0.2, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = posterior(x, 0.2, logp, codes)
    plain = posterior(x, 0.2, logp, codes)
    assert found.mean.dtype == torch.float32 and torch.equal(found.mean, plain.mean)


def test_velocity_is_the_mean_of_noise_minus_code() -> None:  # S5, by simulation
    codes, t, radius, draws = codebook(5, 2), 0.4, 0.05, 400_000
    p = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15], dtype=torch.float64)
    ids = torch.multinomial(p, draws, True, generator=rng(3))
    e = torch.randn(draws, 2, generator=rng(4), dtype=torch.float64)
    x = (1 - t) * codes[ids] + t * e
    at = (1 - t) * codes[1] + 0.2
    hit = (x - at).norm(dim=1) < radius
    seen = (e - codes[ids])[hit]
    wanted = velocity(x[hit], column(t, seen), posterior(x[hit], t, p.log().expand(len(seen), -1), codes).mean)
    assert len(seen) > 500
    error = (seen - wanted).mean(0) / ((seen - wanted).std(0) / math.sqrt(len(seen)))
    assert error.abs().max() < 4


def test_the_map_is_the_naive_one() -> None:
    codes, logp = codebook(12, 3), laws(6, 12)
    noise = torch.randn(6, 3, generator=rng(6), dtype=torch.float64)
    for steps in (1, 2, 3, 8, STEPS):
        found = fm_map(noise, logp, codes, steps=steps)
        wanted = [reference.flow_multistep(noise[i], logp[i].exp().tolist(), codes, steps) for i in range(6)]
        assert found.tolist() == wanted, steps


def test_the_map_follows_the_flow() -> None:
    """Another solver with many small steps reaches the same tokens."""
    codes, logp = codebook(12, 3), laws(40, 12)
    noise = torch.randn(40, 3, generator=rng(7), dtype=torch.float64)
    found = fm_map(noise, logp, codes).tolist()
    p = logp.exp().tolist()
    wanted = [reference.flow_euler(noise[i], p[i], codes, 250, 0.02)[0] for i in range(40)]
    assert sum(a == b for a, b in zip(found, wanted, strict=True)) >= 39


def chi_square(count: int, channels: int, draws: int, rows: int) -> float:
    """z of the summed chi-square of mapped noises against their laws, over `rows` laws; small cells are pooled."""
    codes, total, cells = codebook(count, channels).float(), 0.0, 0
    for seed in range(rows):
        logp = laws(1, count, seed).float()
        noise = torch.randn(draws, channels, generator=rng(100 + seed))
        seen = torch.bincount(fm_map(noise, logp.expand(draws, -1), codes), minlength=count).double()
        expected = draws * logp[0].double().exp()
        small = expected < 5
        assert seen[expected == 0].sum() == 0, "an excluded code was drawn"
        for cell in (~small).nonzero().flatten():
            total += float((seen[cell] - expected[cell]) ** 2 / expected[cell])
        if float(expected[small].sum()) > 0:
            total += float((seen[small].sum() - expected[small].sum()) ** 2 / expected[small].sum())
        cells += int((~small).sum()) - (0 if float(expected[small].sum()) > 0 else 1)
    return (total - cells) / math.sqrt(2 * cells)


def test_the_law_of_the_map_is_the_given_one() -> None:  # S6, small
    assert abs(chi_square(48, 4, 2000, 20)) < 4


def test_the_chi_square_sees_another_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "fm_map", lambda noise, logp, codes: fm_map_of_a_flat_law(noise, logp, codes))
    assert abs(chi_square(48, 4, 2000, 2)) > 10


def fm_map_of_a_flat_law(noise: Tensor, logp: Tensor, codes: Tensor) -> Tensor:
    from visgen.nn import mixture

    return mixture.fm_map(noise, (0.7 * logp).log_softmax(1), codes)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "unit"), [(1024, True), (1024, False)])
def test_the_law_of_the_map_at_size(count: int, unit: bool) -> None:  # S6, >= 20 V noises, >= 20 laws, Holm at 1e-3
    codes, values = codebook(count, 8, unit).float(), []
    for seed in range(20):
        logp, draws = laws(1, count, seed).float(), 20 * count
        noise = torch.randn(draws, 8, generator=rng(1000 + seed))
        seen = torch.bincount(fm_map(noise, logp.expand(draws, -1), codes), minlength=count).double()
        expected = draws * logp[0].double().exp()
        large = expected >= 5
        pairs = torch.cat(
            [torch.stack([seen, expected], 1)[large], torch.stack([seen, expected], 1)[~large].sum(0)[None]]
        )
        value = float(((pairs[:, 0] - pairs[:, 1]) ** 2 / pairs[:, 1]).sum())
        assert abs(value - (len(pairs) - 1)) / math.sqrt(2 * (len(pairs) - 1)) < 4, seed
        values.append(float(stats.chi2.sf(value, len(pairs) - 1)))
        floor = 0.5 * float((2 * expected * (1 - expected / draws) / math.pi).sqrt().sum()) / draws
        assert abs(0.5 * float((seen - expected).abs().sum()) / draws / floor - 1) < 0.1, "TV of plain draws"
    assert all(value > 1e-3 / (20 - i) for i, value in enumerate(sorted(values)))


def test_a_finer_grid_gives_the_same_tokens() -> None:  # S7
    codes, logp = codebook(256, 8).float(), laws(1500, 256).float()
    noise = torch.randn(1500, 8, generator=rng(8))
    same = fm_map(noise, logp, codes) == fm_map(noise, logp, codes, steps=4 * STEPS)
    assert same.float().mean() >= 0.99


@pytest.mark.slow
def test_the_map_does_not_depend_on_the_scale_of_the_codes() -> None:  # S8
    codes, logp = codebook(256, 8), laws(1000, 256)
    noise = torch.randn(1000, 8, generator=rng(8), dtype=torch.float64)
    same = fm_map(noise, logp, codes, steps=600) == fm_map(noise, logp, codes / math.sqrt(8), steps=2400)
    assert same.float().mean() >= 0.999


def test_nothing_is_read_by_the_host() -> None:
    """Fake tensors have no values to be read, so an iteration that maps a token can be captured."""
    with FakeTensorMode():
        codes, logp, noise = torch.empty(64, 8), torch.empty(5, 64), torch.empty(5, 8)
        assert fm_map(noise, logp, codes, chunk=20).shape == (5,)
        assert posterior(noise, 0.5, logp, codes, chunk=20).log_mass.shape == (5,)


def test_a_token_does_not_depend_on_its_company() -> None:  # S10
    codes, logp = codebook(64, 8).float(), laws(64, 64).float()
    noise = torch.randn(64, 8, generator=rng(8))
    whole = fm_map(noise, logp, codes)
    for size in (1, 3, 16):
        parts = zip(noise.split(size), logp.split(size), strict=True)
        assert torch.equal(torch.cat([fm_map(n, p, codes) for n, p in parts]), whole)


def test_the_scale_of_unit_codes_is_the_root_of_their_width() -> None:
    unit = torch.nn.functional.normalize(torch.randn(50, 8, generator=rng()), dim=1)
    assert math.isclose(float(scale_of(unit)), math.sqrt(8), rel_tol=1e-6)
    assert math.isclose(float((5 * unit * scale_of(5 * unit)).square().mean()), 1, rel_tol=1e-5)
