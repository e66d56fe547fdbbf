"""Times of calls, interleaved, and ratios of samples: what studies share that measure."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from moelab.base.progress import progress
from moelab.evaluation.intervals import Interval

from .ratios import median

#: folders of the code that benches of tokens measure: their results are older once it changes
ENGINE = tuple(
    f"moelab/{room}"
    for room in (
        "kernels",
        "fast",
        "store",
        "offloading",
        "experts",
        "models",
        "cache",
        "speculate",
    )
)
T = TypeVar("T")
Samples = dict[str, list[float]]  # name → one sample a round, in seconds


def seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Wall-clock seconds of one call."""
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def gain(samples: Samples, name: str, base: str) -> Interval:
    """How many times faster `name` is than `base`: median over the rounds that both ran in, with a
    95 % interval."""
    return median([b / a for a, b in zip(samples[name], samples[base])])


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


def turns(
    arms: Sequence[T], rounds: int, title: str, unit: str = "rounds"
) -> Iterator[tuple[int, T]]:
    """(round, arm): all arms in each round, in reverse order in every second one."""
    for i in progress(range(rounds), title, unit=unit):
        for arm in arms[::-1] if i % 2 else arms:
            yield i, arm


@contextmanager
def working(folder: str | Path | None) -> Iterator[Path]:
    """The folder that was given, absolute; a temporary one within the block where none was."""
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(folder or temporary).expanduser().resolve()
