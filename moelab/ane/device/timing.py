"""Latency and energy on a Mac: any work, and the grid of static graphs behind NPUMoE Table 5.

`time_grid` measures what the device model is fitted to: a layer's E experts in E/G graphs of G
experts of capacity C, run one after the other ("serial") or each by a Python thread ("parallel");
ms and mJ of one slot. Every graph is a package of its own, because bringing weights is a part of
what is measured. A time is the median of repeats after a warm-up; energy (§5.1) is of the whole
machine over all repeats, by Zeus, so a window should be longer than a second."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

import numpy as np
import torch

from moelab.ane.coreml.ffn_graph import Expert, pack, save_ffn
from moelab.ane.device.mac import CoreMLRunner
from moelab.ane.device.published import REFERENCE_H, REFERENCE_I, TABLE_5, Sample
from moelab.ane.device.rates import MODES
from moelab.files import load_json, write_json
from moelab.progress import progress
from moelab.records import Numbers

FORMAT = "moelab.ane.samples/1"
#: what `moelab ane calibrate` says beside its samples
PARALLEL = (
    "parallel: one Python thread a graph. Where these times are no better than serial ones, "
    "coremltools may have held Python's lock while it predicted; they then say nothing about "
    "submitting at once"
)
#: (G, C) of Table 5
GRID = tuple(dict.fromkeys((s.G, s.C) for s in TABLE_5))
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


class Timing(NamedTuple):
    """Seconds of each repeat, and mJ of one repeat by part of the chip (empty where they cannot be
    read)."""

    seconds: tuple[float, ...]
    mj: Numbers

    @property
    def median(self) -> float:
        """Median seconds of the repeats."""
        return statistics.median(self.seconds)


def measure(
    work: Callable[[], Any],
    repeats: int = 5,
    meter: Meter | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Timing:
    """Do `work` once as a warm-up and then `repeats` times."""
    work()
    seconds = []
    meter = meter or Meter()
    with meter.window() as mj:
        for _ in range(repeats):
            start = clock()
            work()
            seconds.append(clock() - start)
    return Timing(tuple(seconds), {part: value / repeats for part, value in mj.items()})


def time_grid(
    grid: Sequence[tuple[int, int]] = GRID,
    *,
    experts: int = 16,
    hidden: int = REFERENCE_H,
    intermediate: int = REFERENCE_I,
    repeats: int = 5,
    meter: Meter | None = None,
    runner: Callable[[Path, str | None], Any] = CoreMLRunner,
) -> list[Sample]:
    """Time each (G, C) of a grid in each mode, by default for PhiMoE's experts, which need 2.5 GB
    of disk."""
    if bad := [G for G, C in grid if experts % G]:
        raise ValueError(f"groups of {bad[0]} do not divide {experts} experts")
    meter = meter or Meter()
    samples = []
    rng = np.random.default_rng(0)
    matrices = [
        (rng.standard_normal(shape, dtype=np.float32) / shape[1] ** 0.5).astype(np.float16)
        for shape in ((intermediate, hidden), (hidden, intermediate), (intermediate, hidden))
    ]
    for G, C in progress(list(grid), "timing graphs", unit="configuration"):
        with tempfile.TemporaryDirectory() as folder:
            group = [
                Expert(*(np.roll(matrix, g) for matrix in matrices)) for g in range(G)
            ]  # no two are equal
            runs = [
                runner(save_ffn(Path(folder) / f"{n}.mlpackage", group, C), None)
                for n in range(experts // G)
            ]
            x = {"x": pack(torch.randn(G * C, hidden, generator=torch.Generator().manual_seed(C)))}
            with ThreadPoolExecutor(len(runs)) as pool:
                work = {
                    "serial": lambda: [run(x) for run in runs],
                    "parallel": lambda: list(pool.map(lambda run: run(x), runs)),
                }
                for mode in MODES:
                    timing = measure(work[mode], repeats, meter)
                    slots = experts * C
                    mj = sum(timing.mj.values()) / slots if timing.mj else None
                    samples.append(Sample(G, C, mode, 1e3 * timing.median / slots, mj))
    return samples


def save_samples(path: str | Path, samples: Sequence[Sample], device: str) -> Path:
    """Write samples as JSON, atomically."""
    return write_json(
        path,
        {
            "format": FORMAT,
            "kind": "measured",
            "device": device,
            "samples": [sample._asdict() for sample in samples],
        },
    )


def load_samples(path: str | Path) -> tuple[list[Sample], str]:
    """(samples, device) of `save_samples`; ValueError for another file."""
    found = load_json(path, FORMAT, "file of samples", "`moelab ane calibrate`", _Samples)
    return found["samples"], found["device"]


class _Samples(TypedDict):
    device: str
    samples: list[Sample]
