"""Latency and energy of any work on a Mac.

Times are of repeats after a warm-up; energy (NPUMoE §5.1) is of the whole machine over all repeats,
by Zeus, so a window should be longer than a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

from moelab.base.records import Numbers

#: part of the chip → field of zeus' AppleSiliconMeasurement, in mJ
FIELDS = {"ane": "ane_mj", "cpu": "cpu_total_mj", "gpu": "gpu_mj", "dram": "dram_mj"}


class Meter:
    """Reads energy counters; `why` is "", or says why it cannot and windows stay empty."""

    def __init__(self) -> None:
        self._monitor, self.why, self._keys = None, "", count()
        try:
            from zeus.monitor import ZeusMonitor
        except ImportError:
            self.why = "no energy: pip install 'zeus[apple]'"
            return
        self._monitor = ZeusMonitor(gpu_indices=[], cpu_indices=[])
        if not self._monitor.soc_is_present:
            self._monitor = None
            self.why = "no energy: zeus finds no Apple chip that it can read here"

    @contextmanager
    def window(self) -> Iterator[Numbers]:
        """Yields a dictionary that holds mJ by part after the block; parts that the chip does not
        report are absent."""
        found: Numbers = {}
        if self._monitor is None:
            yield found
            return
        key = f"moelab {next(self._keys)}"
        self._monitor.begin_window(key, sync_execution=False)
        try:
            yield found
        finally:
            soc = self._monitor.end_window(key, sync_execution=False).soc_energy
            found |= {
                part: float(value)
                for part, field in FIELDS.items()
                if (value := getattr(soc, field, None)) is not None
            }


def measure(
    work: Callable[[], Any],
    repeats: int,
    meter: Meter,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[float], Numbers]:
    """(seconds of each of `repeats`, after one that does not count; mJ of one repeat by part of the
    chip, empty where they cannot be read)."""
    work()
    seconds = []
    with meter.window() as mj:
        for _ in range(repeats):
            start = clock()
            work()
            seconds.append(clock() - start)
    return seconds, {part: value / repeats for part, value in mj.items()}
