"""On a Mac: latency and energy of prefills through converted models.

    moelab bench ane_mac --folders chunk256,chunk512 --prompts 1024,4096

Times are of repeats after a warm-up; energy (NPUMoE §5.1) is of the whole machine over all repeats,
by Zeus, so a window should be longer than a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moelab.ane.backends import Backend
from moelab.ane.coreml.converted import ConvertedModel
from moelab.ane.device.mac import Meter, require_mac
from moelab.ane.doctor import coreml_backend, diagnose
from moelab.ane.opening import open_beside
from moelab.ane.runtime import prefill_through
from moelab.base.arguments import folder, several, whole
from moelab.base.progress import progress
from moelab.base.records import Numbers, Record, Rows
from moelab.offloading.offload import Offloading


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


def time_prefill(
    model: Any, backend: Backend, prompts: Sequence[int], repeats: int, meter: Meter
) -> Rows:
    """Prefills of random tokens, one row a prompt length: TTFT, ms a chunk, mJ a token by part,
    drops and launches."""
    rows = []
    for length in progress(list(prompts), "measuring", unit="prompt"):
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size, (1, length), generator=rng)
        with torch.no_grad(), prefill_through(model, backend) as ane:
            seconds, mj = measure(
                lambda: model(ids, use_cache=False, logits_to_keep=1), repeats, meter
            )
        total, chunks = ane.total, -(-length // backend.plan.chunk)
        rows.append(
            {
                "chunk": backend.plan.chunk,
                "prompt": length,
                "TTFT, s": median(seconds),
                "fastest, s": min(seconds),
                "slowest, s": max(seconds),
                "ms a chunk": 1e3 * median(seconds) / chunks,
                **{f"{part}, mJ a token": value / length for part, value in mj.items()},
                "dropped": total.drop_rate,
                "padded": total.padded_fraction,
                "launches a chunk": total.launches / (repeats + 1) / chunks,
            }
        )
    return rows


def run(
    folders: Sequence[Path],
    prompts: Sequence[int] = (1024,),
    repeats: int = 5,
    checkpoint: Path | None = None,
) -> Record:
    require_mac("this bench")
    meter = Meter()
    found: Record = {}
    for path in folders:
        converted = ConvertedModel(path)
        backend = coreml_backend(converted, diagnose(converted))
        model = open_beside(converted, converted.checkpoint(checkpoint), None, Offloading())
        for row in time_prefill(model, backend, prompts, repeats, meter):
            name = f"{Path(path).name}, a prompt of {row['prompt']}"
            found.setdefault(f"prefills, {backend.name}", {})[name] = row
    return found | {"conditions": {"energy": meter.why or "by Zeus"}}


MEASURES = ("moelab/ane",)


OPTIONS = {
    "folders": (
        several(folder),
        "converted models, e.g. one a chunk size",
    ),
    "prompts": (several(whole(1)), "their lengths in tokens, as 256,1024"),
    "repeats": (whole(1), "of each"),
    "checkpoint": (Path, "its folder, if it is not where it was converted"),
}
