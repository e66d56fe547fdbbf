"""Times of calls, and ratios of samples: what studies share that time in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from moelab.evaluation import intervals
from moelab.evaluation.intervals import Interval

Samples = dict[str, list[float]]  # name → one sample a round, in seconds


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def gain(samples: Samples, name: str, base: str) -> Interval:
    """How many times faster `name` is than `base`: median over the rounds that both ran in, with a
    95 % interval."""
    return intervals.median([b / a for a, b in zip(samples[name], samples[base])])


def speed_up(samples: Samples, name: str, base: str) -> float:
    """`gain` without its interval."""
    return gain(samples, name, base)[0]


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """torch uses n threads within the block."""
    import torch

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n)
        yield
    finally:
        torch.set_num_threads(before)
