import numpy as np
import pytest
from scipy import stats

from visgen.metrics.intervals import interval, jackknife, t_central, t_quantile


@pytest.mark.parametrize("df", [1, 2, 3, 4, 9, 10, 24, 49, 200, 9999])
def test_student_t_equals_scipy(df):
    for t in (0.0, 0.3, 1.0, 2.5, 8.0):
        assert t_central(t, df) == pytest.approx(1 - 2 * stats.t.sf(t, df), abs=1e-12)
        assert t_central(-t, df) == t_central(t, df)
    assert t_quantile(df) == pytest.approx(stats.t.ppf(0.975, df), rel=1e-9)
    assert interval(1.0, 2.0, df)[0] == pytest.approx(1 - 2 * stats.t.ppf(0.975, df), rel=1e-9)


def test_jackknife_of_a_mean_is_its_standard_error_without_bias():
    x = np.random.default_rng(0).normal(size=20)
    se, corrected = jackknife(x.mean(), [np.delete(x, i).mean() for i in range(20)])
    assert se == pytest.approx(x.std(ddof=1) / np.sqrt(20), rel=1e-12)
    assert corrected == pytest.approx(x.mean(), rel=1e-12)


def test_jackknife_removes_the_bias_of_the_plug_in_variance():
    x = np.random.default_rng(1).normal(size=15)
    _, corrected = jackknife(x.var(), [np.delete(x, i).var() for i in range(15)])
    assert corrected == pytest.approx(x.var(ddof=1), rel=1e-12)
