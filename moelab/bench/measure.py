"""Interleaved timing, ratios of samples, and shares of measured limits.

A limit is measured like what it bounds (same threads, rounds and caches), but its best sample
counts instead of the median. A share above 1 + `TOLERANCE` means that the limit was measured
wrongly; words then stand for the number."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from moelab.base.progress import progress
from moelab.bench.memory_limit import memory_limit
from moelab.evaluation import intervals
from moelab.evaluation.intervals import Interval

TOLERANCE = 0.05
Samples = dict[str, list[float]]  # name → one sample a round, in seconds
T = TypeVar("T")


def turns(
    arms: Sequence[T], rounds: int, title: str, unit: str = "rounds"
) -> Iterator[tuple[int, T]]:
    """(round, arm): all arms in each round, in reverse order in every second one."""
    for i in progress(range(rounds), title, unit=unit):
        for arm in arms[::-1] if i % 2 else arms:
            yield i, arm


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
def working(folder: str | Path | None) -> Iterator[Path]:
    """The folder that was given, absolute; a temporary one within the block where none was."""
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(folder or temporary).expanduser().resolve()


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


def in_process(
    words: Sequence[str], limit: int | None = None, python: str | None = None, timeout: float = 1800
) -> dict[str, Any]:
    """The JSON object that a Python process prints as its last line, and "limit": whether the
    process and its page cache had so many bytes of memory, in words. RuntimeError with its last
    words if it fails or takes more than `timeout` seconds."""
    here = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    with memory_limit(limit) as group:
        join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group.procs)]
        try:
            done = subprocess.run(
                [*(join if group.procs else []), python or sys.executable, *words],
                capture_output=True,
                text=True,
                timeout=timeout,
                env=os.environ | {"PYTHONPATH": path},
            )
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"gave up after {timeout / 60:.0f} minutes") from None
    if done.returncode:
        last = (done.stderr.strip() or "it died without a word").splitlines()[-1]
        killed = "killed; it took more than its memory?"
        raise RuntimeError(killed if done.returncode == -signal.SIGKILL else last)
    return json.loads(done.stdout.strip().splitlines()[-1]) | {"limit": group.reason}


def share(reached: float) -> float | str:
    """The share of a limit that is reached, or, above 1 + `TOLERANCE`, words that say that the
    limit is invalid."""
    return reached if reached <= 1 + TOLERANCE else f"limit invalid: beaten, {reached:.2f} of it"


def multiple(taken: float, least: float) -> float | str:
    """How many times the least time possible something takes; words where it takes less."""
    found = share(least / taken)
    return found if isinstance(found, str) else taken / least
