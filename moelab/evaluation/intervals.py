"""95 % confidence intervals of means (Student's t).

With few samples Student's t matters: with six, ± 1.96 standard errors contain the true mean in only
89 % of cases; 95 % need ± 2.57. Samples are assumed to be independent, and their mean normally
distributed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np

#: (value, low, high): the ends of its 95 % interval
Interval = tuple[float, float, float]


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


def typical(seconds: Iterable[float]) -> float:
    """Typical seconds of a token: the mean of the middle half. Unlike the mean, it ignores
    disturbances of the machine; unlike the median, it does not depend on whether the middle token
    happens to wait for a read."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return fmean(ordered[quarter : len(ordered) - quarter])
