"""95 % intervals of ratios and medians, and intervals as metrics and as Markdown, beside the notebooks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from moelab.evaluation.intervals import Interval, t95


def ratio(above: Sequence[float] | np.ndarray, below: Sequence[float] | np.ndarray) -> Interval:
    """Σ above ÷ Σ below of paired samples [n], with the 95 % interval of the ratio estimator
    (Cochran, Sampling Techniques §6.4); the ends are nan for a single pair."""
    above, below, n = np.asarray(above, float), np.asarray(below, float), len(above)
    value = float(above.sum() / below.sum())
    if n == 1:
        return value, math.nan, math.nan
    rest = np.square(above - value * below).sum()
    half = t95(n - 1) * math.sqrt(rest * n / (n - 1)) / abs(float(below.sum()))
    return value, value - half, value + half


def median(values: Sequence[float] | np.ndarray) -> Interval:
    """(median, low, high) of values [n], by the sign test: low and high are the values of rank k and
    n − k + 1, with the largest k for which both tails together have at most 5 % probability. The
    ends are nan for fewer than six values."""
    from scipy.stats import binom  # takes a moment to import

    ordered = sorted(map(float, values))
    n = len(values)
    k = int(binom.ppf(0.025, n, 0.5))  # values that may lie beyond an end
    ends = (ordered[k - 1], ordered[n - k]) if k else (math.nan, math.nan)
    return float(np.median(ordered)), *ends


def named(name: str, of: Interval) -> dict[str, float]:
    """An interval as three metrics: `name`, `name`_from and `name`_to."""
    return dict(zip((name, f"{name}_from", f"{name}_to"), of))


def format_interval(of: Interval) -> str:
    """As Markdown: **0.97** [0.93, 1.01]; without an interval, if too few samples have none."""
    return ("**{:.2f}**" if math.isnan(of[1]) else "**{:.2f}** [{:.2f}, {:.2f}]").format(*of)
