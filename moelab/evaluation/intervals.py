"""95 % confidence intervals of means (Student's t) and medians (sign test).

With few samples Student's t matters: with six, ± 1.96 standard errors contain the true mean in only
89 % of cases; 95 % need ± 2.57. Samples are assumed to be independent, and their mean normally
distributed; the interval of a median assumes no distribution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import fmean

import numpy as np

#: (value, low, high): the ends of its 95 % interval
Interval = tuple[float, float, float]


@lru_cache(maxsize=1024)
def t95(freedom: int) -> float:
    """Half the width of a 95 % interval in standard errors; nan without a degree of freedom."""
    from scipy.special import stdtrit  # takes a moment to import

    return float(stdtrit(freedom, 0.975)) if freedom > 0 else math.nan


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Standard error of the mean of at least two values: s/√n."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    """(mean, low, high) of values [n]; the ends are nan for a single value."""
    mean = float(np.mean(values))
    half = t95(len(values) - 1) * standard_error(values) if len(values) > 1 else math.nan
    return mean, mean - half, mean + half


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


def typical(seconds: Iterable[float]) -> float:
    """Typical seconds of a token: the mean of the middle half. Unlike the mean, it ignores
    disturbances of the machine; unlike the median, it does not depend on whether the middle token
    happens to wait for a read."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return fmean(ordered[quarter : len(ordered) - quarter])
