import math

import numpy as np
import pytest
import torch
from scipy import stats

from visgen.metrics.intervals import normal_p
from visgen.metrics.neighbours import closer, histograms, nearest, share_below, suspects


def _draw(n, *shape, seed=0):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def test_nearest_equals_the_double_loop():
    x, views = _draw(600, 5, seed=1), torch.stack([_draw(9, 5, seed=2), _draw(9, 5, seed=3)])  # more rows than a block
    distance, index = nearest(x, views, 3)
    for i in (0, 511, 512, 599):
        cosine = [[float(torch.cosine_similarity(x[i], v, dim=0)) for v in view] for view in views]
        truth = [1 - max(pair) for pair in zip(*cosine, strict=True)]
        assert index[i].tolist() == np.argsort(truth)[:3].tolist()
        assert distance[i].tolist() == pytest.approx(sorted(truth)[:3], abs=1e-6)
    assert distance.shape == (600, 3) and distance.dtype == torch.float64


def test_copies_and_mirrored_copies_have_distance_zero():
    views = torch.stack([_draw(20, 5, seed=1), _draw(20, 5, seed=2)])
    for x in (views[0], views[1], 3 * views[0]):
        distance, index = nearest(x, views)
        assert index[:, 0].tolist() == list(range(20)) and distance.max() < 1e-7 and distance.min() >= 0
    assert nearest(views[1], views[:1])[0].min() > 1e-3, "one view alone does not know the other"


def test_closer_is_mann_whitneys_statistic():
    x, y = _draw(40, seed=1).round(decimals=1), _draw(25, seed=2).round(decimals=1) + 0.3
    wins = stats.mannwhitneyu(y.numpy(), x.numpy()).statistic / (40 * 25)  # ties count half
    assert len(set(x.tolist()) & set(y.tolist())) > 3
    assert closer(x, y).value == pytest.approx(wins, abs=1e-12)
    assert closer(y, x).value == pytest.approx(1 - wins, abs=1e-12)


@pytest.mark.parametrize(("shift", "truth"), [(0.0, 0.5), (1.0, stats.norm.cdf(1 / math.sqrt(2)))])
def test_closer_has_the_right_error_and_p(shift, truth):
    scores = [closer(_draw(60, seed=2 * s), _draw(30, seed=2 * s + 1) + shift) for s in range(200)]
    values = np.array([s.value for s in scores])
    assert abs(values.mean() - truth) < 4 * values.std() / math.sqrt(200)
    assert 0.85 < np.mean([s.se for s in scores]) / values.std(ddof=1) < 1.15
    small = np.mean([s.terms["p"] < 0.05 for s in scores])
    assert 0.01 < small < 0.12 if shift == 0 else small > 0.9


def test_closer_of_copies():
    score = closer(torch.zeros(10), torch.arange(1, 6).float())
    assert (score.value, score.se, score.terms["p"]) == (1.0, 0.0, 0.0)
    assert closer(torch.zeros(4), torch.zeros(3)).terms["p"] == 1.0


def test_share_below_counts_and_errs():
    y = torch.linspace(0, 1, 101)
    score = share_below(torch.tensor([0.01, 0.049, 0.05, 0.3]), y, 0.05)
    assert score.value == 0.5 and score.terms["quantile"] == pytest.approx(0.05)
    scores = [share_below(_draw(300, seed=2 * s), _draw(100, seed=2 * s + 1), 0.05) for s in range(300)]
    values = np.array([s.value for s in scores])
    assert values.mean() == pytest.approx(0.05, abs=0.01)
    assert 0.75 < np.mean([s.se for s in scores]) / values.std(ddof=1) < 1.25


def test_suspects_are_the_nearest_and_the_typical():
    distance = torch.tensor([0.5, 0.1, 0.9, 0.3, 0.7, 0.2, 0.8, 0.4, 0.6])
    first, typical = suspects(distance, 6)
    assert distance[first].tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert distance[typical].tolist() == pytest.approx([0.4, 0.6, 0.9]), "from the nearest to the farthest of the rest"
    first, typical = suspects(distance, 50)
    assert sorted([*first.tolist(), *typical.tolist()]) == list(range(9))
    assert [len(part) for part in suspects(distance, 1)] == [1, 0]


def test_histograms_stand_on_one_axis():
    sets = {"near": torch.full((5,), 0.1), "far": torch.full((9,), 1.0)}
    picture = np.array(histograms(sets, [0.5], bins=10).convert("RGB")).astype(int)
    blue = (picture[..., 2] - picture[..., 0]) > 50
    columns = [np.flatnonzero(half.any(0)) for half in (blue[:110], blue[110:220])]
    assert picture.shape == (244, 100, 3)
    assert columns[0].min() == 10 + 8 and columns[0].max() < 10 + 16, "0.1 of 1.0: the second of ten bins"
    assert columns[1].min() == 10 + 72, "the last bin"
    assert (picture[60, 50] == 128).all() and (picture[60, 40] == 255).all(), "the mark at 0.5 alone"


def test_normal_p_equals_scipy():
    for z in (0.0, 0.3, -1.96, 4.0):
        assert normal_p(2 * z, 2.0) == pytest.approx(2 * stats.norm.sf(abs(z)), rel=1e-12)
    assert normal_p(0.0, 0.0) == 1.0 and normal_p(0.1, 0.0) == 0.0
