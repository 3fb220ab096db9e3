import random

import numpy as np
import pytest
import torch
from scipy import linalg

from visgen.config import UserError
from visgen.metrics.frechet import (
    Moments,
    Stats,
    compare,
    frechet_distance,
    frechet_from_features,
    frechet_terms,
    noise_floor,
    require_enough,
)


def _features(n, dim, seed=0, shift=0.0, scale=1.0):
    """Correlated features with a spread of 100 between the largest and smallest deviation."""
    g = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=torch.Generator().manual_seed(99), dtype=torch.float64))[0]
    x = torch.randn(n, dim, generator=g, dtype=torch.float64) * torch.logspace(0, -2, dim, dtype=torch.float64)
    return scale * x @ basis + shift


def _moments(x, groups=25, batch=64, centre=None):
    m = Moments(x.shape[1], len(x), groups, centre)
    for start in range(0, len(x), batch):
        rows = torch.arange(start, min(start + batch, len(x)))
        m.update(x[rows], rows)
    return m


def _naive(x, y, root="eigvals"):
    """The distance straight from its definition, with numpy (non-symmetric eigenvalues) or scipy's matrix root."""
    x, y = x.numpy(), y.numpy()
    s, t = np.cov(x, rowvar=False), np.cov(y, rowvar=False)
    if root == "eigvals":
        cross = np.sqrt(np.linalg.eigvals(s @ t).astype(complex)).real.sum()
    else:
        cross = np.trace(linalg.sqrtm(s @ t)).real
    return ((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(s) + np.trace(t) - 2 * cross


def test_moments_equal_numpy():
    x = _features(500, 16, shift=100.0)
    stats = _moments(x, centre=x[:10].mean(0)).stats()
    assert np.allclose(stats.mean, x.numpy().mean(0), rtol=1e-13)
    assert np.allclose(stats.cov, np.cov(x.numpy(), rowvar=False), rtol=1e-10, atol=1e-14)
    assert stats.n == 500


def test_distance_to_itself_is_zero():
    m = _moments(_features(2000, 64))
    score = frechet_distance(m, m)
    assert abs(score.value) < 1e-8 * score.terms["tr_ref"]


def test_closed_form_of_diagonal_gaussians():
    a, b = torch.rand(2, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    shift = torch.linspace(-1, 1, 32, dtype=torch.float64)
    terms = frechet_terms(Stats(shift, torch.diag(a)), Stats(torch.zeros_like(shift), torch.diag(b)))
    expected = float(shift.square().sum() + (a.sqrt() - b.sqrt()).square().sum())
    assert terms["distance"] == pytest.approx(expected, rel=1e-12)
    assert terms["mean"] == pytest.approx(float(shift.square().sum()), rel=1e-12)


@pytest.mark.parametrize("root", ["eigvals", "sqrtm"])
def test_agrees_with_the_definition(root):
    x, y = _features(1000, 64, 1, 0.1), _features(1200, 64, 2, scale=1.2)
    value = frechet_distance(_moments(x), _moments(y, 1)).value
    assert value == pytest.approx(_naive(x, y, root), rel=1e-9)
    assert frechet_from_features(x, y)["distance"] == pytest.approx(value, rel=1e-9)


def test_any_split_merges_to_the_same_sums():
    x = _features(1001, 24)
    whole = _moments(x)
    for world in (2, 3, 7):
        shares = []
        for rank in range(world):
            rows = torch.arange(rank, 1001, world)
            share = Moments(24, 1001)
            share.update(x[rows], rows)
            shares.append(share)
        merged = shares[0]
        for share in shares[1:]:
            merged.merge(share)
        for name, value in merged.state_dict().items():
            assert torch.allclose(value, whole.state_dict()[name], rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(merged.leave_one_out(), whole.leave_one_out(), strict=True):
            assert torch.allclose(ours.cov, theirs.cov, rtol=1e-12, atol=1e-13)


def test_reduce_adds_the_shares_of_all_processes():
    x = _features(300, 8)
    half = torch.arange(0, 300, 2)
    mine, theirs = Moments(8, 300, 5), Moments(8, 300, 5)
    mine.update(x[half], half)
    theirs.update(x[half + 1], half + 1)
    seen = []
    theirs.reduce(lambda t: seen.append(t) or t)
    mine.reduce(lambda t: t + seen.pop())
    assert not seen, "one reduction"
    assert torch.allclose(mine.stats().cov, _moments(x, 5).stats().cov, rtol=1e-12)


def test_state_dict_restores_an_interrupted_run():
    x = _features(200, 8)
    first = Moments(8, 200, 4)
    first.update(x[:120], torch.arange(120))
    second = Moments(8, 200, 4)
    second.load_state_dict({k: v.clone() for k, v in first.state_dict().items()})
    second.update(x[120:], torch.arange(120, 200))
    assert torch.allclose(second.stats().cov, _moments(x, 4).stats().cov, rtol=1e-12)


def test_leave_one_out_equals_recomputing():
    x = _features(400, 12)
    group = torch.arange(400) * 8 // 400
    for g, stats in enumerate(_moments(x, 8).leave_one_out()):
        rest = x[group != g].numpy()
        assert stats.n == len(rest) and np.allclose(stats.cov, np.cov(rest, rowvar=False), rtol=1e-10, atol=1e-14)


def test_rank_deficient_sets_are_finite_and_agree_with_the_small_product():
    x, y = _features(40, 64, 1), _features(50, 64, 2)
    small = frechet_from_features(x, y)
    score = frechet_distance(_moments(x, 5), _moments(y, 1), allow_small=True)
    assert score.value == pytest.approx(small["distance"], rel=1e-6) and np.isfinite(score.se)
    assert small["rank_ok"] == 0 == score.terms["rank_ok"]
    singular = linalg.sqrtm(np.cov(x.numpy(), rowvar=False) @ np.cov(y.numpy(), rowvar=False))
    assert small["tr_sqrt"] == pytest.approx(np.trace(singular).real, rel=1e-4)


def test_constant_features_do_not_break_the_root():
    x = _features(500, 16)
    x[:, 3:7] = 2.0
    m = _moments(x)
    assert abs(frechet_distance(m, m).value) < 1e-8 * float(x.var(0).sum())
    assert m.stats().root.shape == (16, 12)


def test_bias_correction_is_refused_below_two_dimensions():
    score = frechet_distance(_moments(_features(100, 64)), _moments(_features(1000, 64, 1), 1))
    assert score.bias_corrected is None and "below 2 D = 128" in score.note and score.se > 0


def test_scores_carry_terms_and_intervals():
    score = frechet_distance(_moments(_features(1000, 16, 1)), _moments(_features(2000, 16, 2), 1))
    assert set(score.terms) == {"mean", "tr_ref", "tr_gen", "tr_sqrt", "min_eig", "rank_ok"}
    t = score.terms
    assert score.value == pytest.approx(t["mean"] + t["tr_ref"] + t["tr_gen"] - 2 * t["tr_sqrt"])
    assert score.ci95[0] < score.value < score.ci95[1] and len(score.leave_out) == 25
    assert (score.n, score.n_ref) == (1000, 2000) and score.bias_corrected < score.value
    plain = frechet_distance(_moments(_features(1000, 16, 1), 1), _moments(_features(2000, 16, 2), 1))
    assert plain.value == pytest.approx(score.value, rel=1e-10) and plain.se is None and plain.note


def test_paired_comparison_removes_shared_noise():
    x, ref = _features(2000, 16, 1), _moments(_features(2000, 16, 2), 1).stats()
    a, b = (frechet_distance(_moments(scale * x), ref) for scale in (1.0, 1.02))
    got = compare(b, a)
    assert got.difference == pytest.approx(b.value - a.value)
    assert got.se < 0.5 * np.hypot(a.se, b.se) and got.p < 0.01 and got.ci95[0] > 0
    same = compare(a, a)
    assert (same.difference, same.t, same.p) == (0, 0, 1)


def test_errors_name_the_thing_and_the_remedy():
    with pytest.raises(UserError, match=r"n = 500 images .* 1280 feature dimensions of fd_efflite0.*use n >= 2560"):
        require_enough(500, 1280, "fd_efflite0")
    require_enough(500, 1280, allow_small=True)
    require_enough(0, 1280)
    small, good = _moments(_features(50, 64), 5), _moments(_features(200, 64), 5)
    with pytest.raises(UserError, match="n = 50 images is not above the 64"):
        frechet_distance(small, good)
    with pytest.raises(UserError, match="n = 50 reference images"):
        frechet_distance(good, small)
    with pytest.raises(UserError, match="have 64 dimensions, the reference 8"):
        frechet_distance(good, _moments(_features(200, 8)))
    x = _features(20, 4)
    x[13, 2] = float("nan")
    with pytest.raises(UserError, match="features of image 113 are not finite"):
        Moments(4, 200).update(x, torch.arange(100, 120))
    with pytest.raises(UserError, match=r"index 200 is outside 0..199"):
        Moments(4, 200).update(_features(2, 4), torch.tensor([199, 200]))
    with pytest.raises(UserError, match=r"outside 0..199; mask the filling rows"):
        Moments(4, 200).update(_features(2, 4), torch.tensor([5, -1]))
    part = Moments(4, 200)
    part.update(_features(20, 4), torch.arange(20))
    with pytest.raises(UserError, match="20 of 200 images were scored"):
        part.stats()
    with pytest.raises(UserError, match="differ in dim, n, groups or centre"):
        part.merge(Moments(4, 201))
    a = frechet_distance(good, good)
    b = frechet_distance(_moments(_features(200, 64), 10), good)
    with pytest.raises(UserError, match="groups = 5 and 10"):
        compare(a, b)


def test_statistics_files(tmp_path):
    stats = _moments(_features(300, 8)).stats()
    stats.save(tmp_path / "ref.safetensors", extractor="fd_debug")
    back, about = Stats.load(tmp_path / "ref.safetensors")
    assert torch.equal(back.cov, stats.cov) and back.n == 300
    assert about["extractor"] == "fd_debug" and len(about["sha256"]) == 64
    np.savez(tmp_path / "adm.npz", mu=stats.mean.numpy(), sigma=stats.cov.numpy())
    exact, _ = Stats.load(tmp_path / "adm.npz")
    assert exact.n == 0 and frechet_distance(stats, exact).n_ref is None
    with pytest.raises(UserError, match="holds mu, sigma; expected mu_s"):
        Stats.load(tmp_path / "adm.npz", keys=("mu_s", "sigma_s"))
    with pytest.raises(UserError, match=r"none\.npz do not exist"):
        Stats.load(tmp_path / "none.npz")


def test_no_flipped_bit_of_statistics_goes_unseen(tmp_path):
    """Of ours by the file's checksum; of an .npz by the archive's, which its time stamps are not part of."""
    stats, rng = _moments(_features(300, 8)).stats(), random.Random(0)
    stats.save(tmp_path / "a.safetensors")
    np.savez(tmp_path / "a.npz", mu=stats.mean.numpy(), sigma=stats.cov.numpy())
    for path in (tmp_path / "a.safetensors", tmp_path / "a.npz"):
        whole = path.read_bytes()
        for bit in rng.sample(range(8 * len(whole)), 300):
            data = bytearray(whole)
            data[bit // 8] ^= 1 << bit % 8
            path.write_bytes(data)
            try:
                found, _ = Stats.load(path)
            except UserError as error:
                assert "\n" not in str(error)
            else:
                assert (
                    path.suffix == ".npz" and torch.equal(found.cov, stats.cov) and torch.equal(found.mean, stats.mean)
                )


@pytest.mark.parametrize(
    ("mu", "sigma", "said"),
    [
        (np.ones(3), np.eye(4), "do not fit"),
        (np.ones(3), np.ones(9), "do not fit"),
        (np.ones((3, 1)), np.eye(3), "do not fit"),
        (np.ones(0), np.ones((0, 0)), "do not fit"),
        (np.array([1, np.nan, 1]), np.eye(3), "tensor mean holds a value that is not finite"),
        (np.ones(3), np.diag([1, np.inf, 1]), "tensor covariance holds a value that is not finite"),
        (np.ones(3), np.eye(3) + np.triu(np.full((3, 3), 0.1), 1), "is not symmetric"),
        (np.ones(3), np.diag([1, -1, 1]), "has a negative variance"),
        (np.ones(3), np.zeros((3, 3)), "has no spread"),
        (np.zeros(3), np.zeros((3, 3)), "has no spread"),
        (np.array(["a"] * 3), np.eye(3), "'mu' cannot be read"),
        (np.array([None] * 3), np.eye(3), "'mu' cannot be read"),
    ],
)
def test_files_that_hold_no_statistics_are_one_line(tmp_path, mu, sigma, said):
    np.savez(tmp_path / "a.npz", mu=mu, sigma=sigma)
    with pytest.raises(UserError, match=said) as found:
        Stats.load(tmp_path / "a.npz")
    assert "\n" not in str(found.value) and str(tmp_path / "a.npz") in str(found.value)


@pytest.mark.parametrize("value", [0.0, 0.1, 7.0])
def test_a_reference_without_spread_is_one_line(value):
    same = torch.full((300, 8), value)
    with pytest.raises(UserError, match="the reference: all its images have equal features, so it has no spread"):
        frechet_distance(_moments(_features(300, 8)), _moments(same))
    with pytest.raises(UserError, match="has no spread"):
        frechet_distance(_moments(_features(300, 8)), Stats(same[0].double(), torch.zeros(8, 8, dtype=torch.float64)))
    assert frechet_distance(_moments(same), _moments(_features(300, 8))).value > 0, "the generated set may have none"


def test_noise_floor_of_a_sampled_reference_adds_up():
    ref = _moments(_features(1000, 16)).stats()
    exact = Stats(ref.mean, ref.cov)
    assert noise_floor(ref, 500) == pytest.approx(noise_floor(exact, 500) + noise_floor(exact, 1000), rel=1e-12)
    one = Stats(torch.zeros(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64))
    assert noise_floor(one, 101) == pytest.approx(1 / 101 + (0.5 + 0.5) / 200, rel=1e-12)


def test_noise_floor_is_what_a_perfect_model_scores():
    dim, n = 16, 500
    exact = Stats(torch.zeros(dim, dtype=torch.float64), _moments(_features(100_000, dim, 7)).stats().cov)
    draw = torch.linalg.cholesky(exact.cov)
    g = torch.Generator().manual_seed(0)
    values = [
        frechet_distance(_moments(torch.randn(n, dim, generator=g, dtype=torch.float64) @ draw.T, 1), exact).value
        for _ in range(100)
    ]
    assert np.mean(values) / noise_floor(exact, n) == pytest.approx(1, abs=0.05)


def test_paired_error_is_the_true_spread_of_the_difference():
    ref, found = _moments(_features(20_000, 16, 2), 1).stats(), []
    for seed in range(40):
        x = _features(1000, 16, 100 + seed)
        a, b = (frechet_distance(_moments(y, 20), ref) for y in (x, x * 1.05 + 0.02))
        found.append((compare(b, a), a, b))
    differences, se = np.array([c.difference for c, _, _ in found]), np.array([c.se for c, _, _ in found])
    unpaired = np.mean([np.hypot(a.se, b.se) for _, a, b in found])
    assert se.mean() == pytest.approx(differences.std(ddof=1), rel=0.3)
    assert unpaired > 1.3 * se.mean()


@pytest.mark.slow
def test_jackknife_error_and_correction_hold_in_simulation():
    """D = 128, N = 5000, G = 20, 60 draws: SE against the true spread, correction against the true distance."""
    dim, n, draws = 128, 5000, 60
    spectrum = torch.logspace(0, -2, dim, dtype=torch.float64)
    ref = Stats(torch.zeros(dim, dtype=torch.float64), torch.diag(spectrum))
    mine = spectrum * torch.linspace(0.9, 1.6, dim, dtype=torch.float64)
    truth = frechet_terms(Stats(ref.mean + 0.01, torch.diag(mine)), ref)["distance"]
    g = torch.Generator().manual_seed(0)
    scores = [
        frechet_distance(_moments(torch.randn(n, dim, generator=g, dtype=torch.float64) * mine.sqrt() + 0.01, 20), ref)
        for _ in range(draws)
    ]
    values, corrected = (np.array([getattr(s, k) for s in scores]) for k in ("value", "bias_corrected"))
    se = np.array([s.se for s in scores])
    assert 0.9 < se.mean() / values.std(ddof=1) < 1.45  # conservative near the floor (Efron and Stein 1981)
    assert abs(corrected.mean() - truth) < 4 * corrected.std(ddof=1) / np.sqrt(draws)
    assert values.mean() - truth == pytest.approx(noise_floor(ref, n), rel=0.25)
    assert values.mean() - truth > 5 * abs(corrected.mean() - truth)
    covered = np.mean([abs(c - truth) < 2.093 * s for c, s in zip(corrected, se, strict=True)])
    assert covered > 0.9
