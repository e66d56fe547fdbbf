"""95 % intervals of means of few samples, by Student's t, whose tails n − 1 degrees of freedom
decide, and of medians.

With six windows an interval of ± 1.96 standard errors holds the truth in 89 % of cases; 95 % take ±
2.57. Samples are taken as independent and their mean as normal; of a median nothing is assumed
about how they are distributed. At the end, means without intervals of what comes one by one and is
disturbed now and then."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import fmean

import numpy as np

MEMORY = 20  # values that a `Mean` remembers
LONG = 3  # means: what takes longer than so many was disturbed, and counts as so long
#: mean and the ends of its 95 % interval
Interval = tuple[float, float, float]


@lru_cache(maxsize=1024)
def t95(freedom: int) -> float:
    """How many standard errors a 95 % interval reaches to either side; nan without a degree of
    freedom."""
    from scipy.special import stdtrit  # takes a moment to import

    return float(stdtrit(freedom, 0.975)) if freedom > 0 else math.nan


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    """Of the mean of at least two values: s/√n."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))


def interval(values: Sequence[float] | np.ndarray) -> Interval:
    """(mean, low, high) of values [n]; of one value alone the ends are nan, as nothing is known of
    its spread."""
    mean = float(np.mean(values))
    half = t95(len(values) - 1) * standard_error(values) if len(values) > 1 else math.nan
    return mean, mean - half, mean + half


def ratio(above: Sequence[float] | np.ndarray, below: Sequence[float] | np.ndarray) -> Interval:
    """Σ above ÷ Σ below of paired samples [n], with the 95 % interval of the ratio estimator; nan
    ends if n is 1."""
    above, below, n = np.asarray(above, float), np.asarray(below, float), len(above)
    value = float(above.sum() / below.sum())
    if n == 1:
        return value, math.nan, math.nan
    rest = np.square(above - value * below).sum()
    half = t95(n - 1) * math.sqrt(rest * n / (n - 1)) / abs(float(below.sum()))
    return value, value - half, value + half


def median(values: Sequence[float] | np.ndarray) -> Interval:
    """(median, low, high) of values [n]: as many values lie below as above both ends, the most that
    a fair coin leaves outside with a probability of 5 % (sign test); nan ends of fewer than six."""
    from scipy.stats import binom  # takes a moment to import

    ordered, n = sorted(map(float, values)), len(values)
    k = int(binom.ppf(0.025, n, 0.5))  # values that may lie beyond an end
    ends = (ordered[k - 1], ordered[n - k]) if k else (math.nan, math.nan)
    return float(np.median(ordered)), *ends


def named(name: str, of: Interval) -> dict[str, float]:
    """A value and its ends as metrics: `name`, `name`_from and `name`_to."""
    return dict(zip((name, f"{name}_from", f"{name}_to"), of))


def typical(seconds: Iterable[float]) -> float:
    """What a token takes, simulated or measured: the mean of the middle half of them. A mean would
    count what disturbed the machine; a median falls by chance on a token that waits for a read or
    on one that waits for none."""
    ordered = sorted(seconds)
    quarter = len(ordered) // 4
    return fmean(ordered[quarter : len(ordered) - quarter])


class Mean:
    """A running mean: plain of the first values, exponential from `MEMORY` on."""

    def __init__(self, value: float = 0.0, count: int = 0) -> None:
        self.value, self.count = value, count

    def add(self, value: float) -> None:
        """Count one more value."""
        self.count = min(self.count + 1, MEMORY)
        self.value += (value - self.value) / self.count

    def took(self, seconds: float) -> None:
        """Count a duration; one that was disturbed counts as `LONG` means."""
        self.add(min(seconds, LONG * self.value) if self.value else seconds)
