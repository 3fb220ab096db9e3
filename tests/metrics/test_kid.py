import numpy as np
import pytest
import torch

from visgen.config import UserError
from visgen.metrics.kid import FeatureBank, kid


def _naive(x, y):
    """Double loop over pairs, straight from the definition."""
    k = lambda a, b: (float(a @ b) / len(a) + 1) ** 3  # noqa: E731
    n, m = len(x), len(y)
    xx = sum(k(x[i], x[j]) for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
    yy = sum(k(y[i], y[j]) for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
    return xx + yy - 2 * sum(k(a, b) for a in x for b in y) / (n * m)


def _features(n, dim=8, seed=0, shift=0.0):
    return torch.randn(n, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + shift


def test_equals_the_double_loop():
    x, y = _features(31, seed=1), _features(24, seed=2, shift=0.3)
    score = kid(x, y, method="jackknife", groups=6)
    assert score.value == pytest.approx(_naive(x, y), rel=1e-10)
    order = torch.randperm(31, generator=torch.Generator().manual_seed(0))
    other = torch.randperm(24, generator=torch.Generator().manual_seed(0))
    left_x = torch.cat([p for g, p in enumerate(x[order].tensor_split(6)) if g != 2])
    left_y = torch.cat([p for g, p in enumerate(y[other].tensor_split(6)) if g != 2])
    assert score.leave_out[2] == pytest.approx(_naive(left_x, left_y), rel=1e-10)


def test_blocks_are_the_mean_of_disjoint_blocks():
    x, y = _features(2400, seed=1), _features(2100, seed=2, shift=0.1)
    score = kid(x, y, method="blocks")
    order = lambda n: torch.randperm(n, generator=torch.Generator().manual_seed(0))  # noqa: E731
    parts = [(x[order(2400)][:1200], y[order(2100)][:1050]), (x[order(2400)][1200:], y[order(2100)][1050:])]
    values = [kid(a, b, method="jackknife", groups=2).value for a, b in parts]
    assert score.value == pytest.approx(np.mean(values), rel=1e-9)
    assert score.se == pytest.approx(np.std(values, ddof=1) / np.sqrt(2), rel=1e-9)
    assert score.terms == {"blocks": 2.0}


@pytest.mark.parametrize(("shift", "truth", "low", "high"), [(0.0, 0.0, 1.0, 1.7), (0.5, 1.328125, 0.75, 1.25)])
def test_unbiased_with_an_error_that_is_not_too_small(shift, truth, low, high):
    """Against the closed form for N(0, I) and N(0.5, I) in 4 dimensions (moments of x.y up to the third).

    Under the null the U-statistic is degenerate, where a jackknife errs on the wide side, by up to sqrt(2).
    """
    scores = [kid(_features(200, 4, 2 * s), _features(200, 4, 2 * s + 1, shift), groups=10) for s in range(60)]
    values, se = np.array([s.value for s in scores]), np.array([s.se for s in scores])
    assert abs(values.mean() - truth) < 4 * values.std() / np.sqrt(60)
    assert low < se.mean() / values.std(ddof=1) < high


def _naive_matched(x, y):
    """Double loop over pairs of rows, each row of x the mean over its R images."""
    k = lambda a, b: (float(a @ b) / len(a) + 1) ** 3  # noqa: E731
    mean = lambda a, b: sum(k(u, v) for u in a for v in b) / (len(a) * len(b))  # noqa: E731
    m, y = len(y), y[:, None]
    pairs = [(i, j) for i in range(m) for j in range(m) if i != j]
    return sum(mean(x[i], x[j]) + mean(y[i], y[j]) - 2 * mean(x[i], y[j]) for i, j in pairs) / len(pairs)


def test_images_that_belong_together_equal_the_double_loop():
    x, y = _features(39, seed=1, shift=0.3).view(13, 3, 8), _features(13, seed=2)
    score = kid(x, y, groups=4)
    assert score.value == pytest.approx(_naive_matched(x, y), rel=1e-10)
    assert (score.n, score.n_ref) == (39, 13)
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    left = torch.cat([p for g, p in enumerate(order.tensor_split(4)) if g != 2])
    assert score.leave_out[2] == pytest.approx(_naive_matched(x[left], y[left]), rel=1e-10)


def test_copies_score_zero_only_if_pairs_are_left_out():
    x = _features(40)
    copies = kid(x[:, None], x)
    assert copies.value == pytest.approx(0, abs=1e-12) and copies.se == pytest.approx(0, abs=1e-12)
    assert kid(x, x).value < -0.1


def test_a_shared_class_histogram_biases_the_plain_value_alone():
    """Two classes far apart, both sets of one law: 0 is right."""
    rows, plain, matched = 20, [], []
    centres = torch.tensor([[0.0] * 8, [1.5] * 8], dtype=torch.float64)[torch.arange(rows) % 2]  # [M, D]
    for seed in range(100):
        x = (_features(2 * rows, 8, 2 * seed).view(rows, 2, 8) + centres[:, None]) * 0.5
        y = (_features(rows, 8, 2 * seed + 1) + centres) * 0.5
        plain.append(kid(x.flatten(0, 1), y).value)
        matched.append(kid(x, y).value)
    for values, low, high in ((plain, -1e9, -4), (matched, -3, 3)):
        error = np.std(values, ddof=1) / np.sqrt(len(values))
        assert low < np.mean(values) / error < high


def test_the_error_of_rows_is_not_too_small():
    """Classes of different difficulty: what varies are rows, not images."""

    def draw(seed):
        scale = 0.3 + torch.arange(60).double().remainder(3)[:, None]
        y = _features(60, 4, 2 * seed) * scale
        return kid(_features(300, 4, 2 * seed + 1, 0.4).view(60, 5, 4) * scale[:, None], y, groups=12)

    scores = [draw(seed) for seed in range(60)]
    ratio = np.mean([s.se for s in scores]) / np.std([s.value for s in scores], ddof=1)
    assert 0.75 < ratio < 1.35


def test_auto_chooses_by_size_and_sees_a_shift():
    large = kid(_features(5000, 4, 1), _features(5000, 4, 2, 0.2))
    assert large.terms == {"blocks": 5.0} and large.ci95[0] > 0
    small = kid(_features(400, 4, 1), _features(400, 4, 2, 0.5))
    assert small.terms == {"groups": 25.0} and small.value > 3 * small.se
    half = kid(_features(400, 4, 1).float(), _features(400, 4, 2, 0.5).float())
    assert half.value == pytest.approx(small.value, rel=1e-4)


def test_bank_fills_rows_by_index_and_adds_up():
    x = _features(10, 3).float()
    shares = [FeatureBank(3, 10) for _ in range(2)]
    for rank, share in enumerate(shares):
        share.update(x[rank::2], torch.arange(rank, 10, 2))
    with pytest.raises(UserError, match="5 of 10 images did not come exactly once, the first is image 1"):
        shares[0].all()
    others = iter((shares[1].features, shares[1].seen))
    shares[0].reduce(lambda t: t + next(others))
    assert torch.equal(shares[0].all(), x)


def test_errors():
    x = _features(40)
    with pytest.raises(UserError, match="40 images make 0 blocks of 1000; use method='jackknife'"):
        kid(x, x, method="blocks")
    with pytest.raises(UserError, match=r"\(40, 8\) and \(40, 4\)"):
        kid(x, x[:, :4])
    with pytest.raises(UserError, match="method 'subsets' is unknown"):
        kid(x, x, method="subsets")
    with pytest.raises(UserError, match=r"\(39, 1, 8\) and \(40, 8\)"):
        kid(x[:39, None], x)
    with pytest.raises(UserError, match="belong together"):
        kid(x[:, None], x, method="blocks")
    with pytest.raises(UserError, match="too few"):
        kid(x[:3], x)
    x[7, 1] = float("inf")
    with pytest.raises(UserError, match="features in y of image 7 are not finite"):
        kid(_features(40), x)
