"""Intervals against scipy's, and by drawing: how often they hold the truth."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.evaluation.intervals import interval, standard_error, t95
from notebooks.studies.ratios import median, ratio

scipy_stats = pytest.importorskip("scipy.stats")


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30))
def test_the_interval_is_scipys(values):
    mean, low, high = interval(values)
    expected = scipy_stats.t.interval(
        0.95, len(values) - 1, np.mean(values), scipy_stats.sem(values)
    )
    assert mean == pytest.approx(np.mean(values)) and standard_error(values) == pytest.approx(
        scipy_stats.sem(values)
    )
    if scipy_stats.sem(values) > 0:  # scipy has no interval of equal values; theirs is a point
        assert (low, high) == pytest.approx(expected, abs=1e-6)


def test_one_value_has_no_spread():
    mean, low, high = interval([0.3])
    assert mean == 0.3 and math.isnan(low) and math.isnan(high) and math.isnan(t95(0))


@pytest.mark.parametrize("n", [2, 9])
def test_the_ratios_interval_is_that_of_the_mean_residual(n):
    """Cochran, Sampling Techniques §6.4: (above − ratio · below) ÷ mean of below, a sample of n."""
    above, below = np.random.default_rng(n).uniform(1, 3, (2, n))
    value, low, high = ratio(above, below)
    _, first, last = interval((above - value * below) / below.mean())
    assert value == pytest.approx(above.sum() / below.sum())
    assert (low - value, high - value) == pytest.approx((first, last))


@pytest.mark.parametrize("n", [1, 5, 6, 7, 12, 59])
def test_the_median_lies_where_the_sign_test_does_not_refuse_it(n):
    values = np.random.default_rng(n).normal(size=n)
    found, low, high = median(values)
    kept = [
        below for below in range(n + 1) if scipy_stats.binomtest(below, n).pvalue > 0.05
    ]  # the median's place
    assert found == np.median(values)
    if 0 in kept:
        assert n < 6 and math.isnan(low) and math.isnan(high)
    else:
        assert (low, high) == (sorted(values)[kept[0] - 1], sorted(values)[kept[-1]])
