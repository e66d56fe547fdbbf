"""Latency and energy on a Mac: whole prefills of a converted model, and the grid of static graphs behind Table 5.

`time_prefill` measures what a user waits for, by prompt length. `time_grid` measures what the device model is fitted
to (NPUMoE Table 5): a layer's E experts in E/G graphs of G experts of capacity C, run one after the other ("serial")
or submitted at once ("parallel"); ms and mJ of one slot. Every graph is a package of its own, as in a model, because
bringing weights is a part of what is measured.

A time is the median of repeats after one that does not count; energy is of all repeats together. "Parallel" submits
from one Python thread a graph, and coremltools need not let go of Python's lock while it predicts: if it does not,
graphs run one after the other, and parallel times come out as serial ones do.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab.ane.backends import Backend
from moelab.ane.device.energy import Meter
from moelab.ane.coreml.ffn_graph import Expert, pack, save_ffn
from moelab.ane.device.mac import CoreMLRunner
from moelab.ane.device.published import TABLE_5, Sample
from moelab.ane.device.rates import MODES
from moelab.ane.runtime import prefill_through
from moelab.progress import progress

FORMAT = "moelab.ane.samples/1"
#: what `moelab ane calibrate` says beside its samples
PARALLEL = ("parallel: one Python thread a graph. Where these times are no better than serial ones, coremltools may "
            "have held Python's lock while it predicted; they then say nothing about submitting at once")
#: (G, C) of Table 5
GRID = tuple(dict.fromkeys((s.G, s.C) for s in TABLE_5))
#: the expert that the device model's parameters are of: PhiMoE's H and I (157 MB in fp16), and its E
H, I, E = 4096, 6400, 16


@dataclass(frozen=True)
class Timing:
    """seconds of each repeat, and mJ of one repeat by part of the chip (empty where they cannot be read)."""

    seconds: tuple[float, ...]
    mj: dict[str, float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure(work: Callable[[], Any], repeats: int = 5, meter: Meter | None = None,
            clock: Callable[[], float] = time.perf_counter) -> Timing:
    """Do `work` once for nothing and then `repeats` times."""
    work()
    seconds, meter = [], meter or Meter()
    with meter.window() as mj:
        for _ in range(repeats):
            start = clock()
            work()
            seconds.append(clock() - start)
    return Timing(tuple(seconds), {part: value / repeats for part, value in mj.items()})


def time_prefill(model: Any, backend: Backend, prompts: Sequence[int], repeats: int = 5, meter: Meter | None = None,
                 seed: int = 0) -> list[dict[str, Any]]:
    """Prefills of random tokens, one row a prompt length: TTFT, ms a chunk, mJ a token by part, drops and launches."""
    meter, rows = meter or Meter(), []
    for length in progress(list(prompts), "measuring", unit="prompt"):
        ids = torch.randint(0, model.config.vocab_size, (1, length), generator=torch.Generator().manual_seed(seed))
        with torch.no_grad(), prefill_through(model, backend=backend) as ane:
            timing = measure(lambda: model(ids, use_cache=False, logits_to_keep=1), repeats, meter)
        total, chunks = ane.total, -(-length // backend.plan.chunk)
        rows.append({"chunk": backend.plan.chunk, "prompt": length, "TTFT, s": timing.median,
                     "fastest, s": min(timing.seconds), "slowest, s": max(timing.seconds),
                     "ms a chunk": 1e3 * timing.median / chunks,
                     **{f"{part}, mJ a token": value / length for part, value in timing.mj.items()},
                     "dropped": total.drop_rate, "padded": total.padded_fraction,
                     "launches a chunk": total.launches / (repeats + 1) / chunks})
    return rows


# ------------------------------------------------------------------------------------------------------- calibration

def time_grid(grid: Sequence[tuple[int, int]] = GRID, modes: Sequence[str] = MODES, *, experts: int = E,
              hidden: int = H, intermediate: int = I, repeats: int = 5, meter: Meter | None = None,
              runner: Callable[[Path, str | None], Any] = CoreMLRunner) -> list[Sample]:
    """Time each (G, C) of a grid in each mode; one sample each, in ms and mJ a slot.

    Needs room on the disk for one layer's experts (2.5 GB), in a temporary folder; one group size is there at a time.

    Raises
    ------
    ValueError : a group that does not divide the experts.
    """
    if bad := [G for G, C in grid if experts % G]:
        raise ValueError(f"groups of {bad[0]} do not divide {experts} experts")
    meter, samples = meter or Meter(), []
    rng = np.random.default_rng(0)
    matrices = [(rng.standard_normal(shape, dtype=np.float32) / shape[1] ** 0.5).astype(np.float16)
                for shape in ((intermediate, hidden), (hidden, intermediate), (intermediate, hidden))]
    for G, C in progress(list(grid), "timing graphs", unit="configuration"):
        with tempfile.TemporaryDirectory() as folder:
            group = [Expert(*(np.roll(matrix, g) for matrix in matrices)) for g in range(G)]      # no two are equal
            runs = [runner(save_ffn(Path(folder) / f"{n}.mlpackage", group, C), None) for n in range(experts // G)]
            x = {"x": pack(torch.randn(G * C, hidden, generator=torch.Generator().manual_seed(C)))}
            with ThreadPoolExecutor(len(runs)) as pool:
                work = {"serial": lambda: [run(x) for run in runs],
                        "parallel": lambda: list(pool.map(lambda run: run(x), runs))}
                for mode in modes:
                    timing, slots = measure(work[mode], repeats, meter), experts * C
                    mj = sum(timing.mj.values()) / slots if timing.mj else None
                    samples.append(Sample(G, C, mode, 1e3 * timing.median / slots, mj))
    return samples


def save_samples(path: str | Path, samples: Sequence[Sample], device: str) -> Path:
    """Write samples as JSON, whole or not at all."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps({"format": FORMAT, "kind": "measured", "device": device,
                                "samples": [sample._asdict() for sample in samples]}, indent=1), encoding="utf-8")
    os.replace(part, path)
    return path


def load_samples(path: str | Path) -> tuple[list[Sample], str]:
    """(samples, device) of `save_samples`; FileNotFoundError, or ValueError for another file."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ValueError(f"{path} has no samples of format {FORMAT}; `moelab ane calibrate` writes them")
    try:
        samples = [Sample(**entry) for entry in found["samples"]]
        if not all(s.G >= 1 and s.C >= 1 and s.mode in MODES and s.ms > 0 and (s.mj is None or s.mj > 0)
                   for s in samples):
            raise ValueError("a size, a mode or a time that is none")
        return samples, str(found["device"])
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"the samples of {path} are damaged ({error}); `moelab ane calibrate` writes them") from error
