"""On a Mac: prefills through converted models, single graphs by unit, and a device card of it.

    moelab bench ane_mac --folders chunk256,chunk512 --prompts 1024,4096 --card my-mac.toml
    moelab ane plan MODEL --device my-mac.toml

Sections are NPUMoE's Figures 7, 8, 14 and 15 and Tables 4, 5, 8 and 9. Every prefill runs on the
Neural Engine, on the GPU and, the baseline, on the CPU alone by the same packages; its time is split
as Table 4 splits it. Times are of repeats after a warm-up; energy (NPUMoE §5.1) is of the whole machine over all repeats,
by Zeus, so a window should be longer than a second."""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from moelab.ane.backends import TorchBackend
from moelab.ane.coreml.converted import ConvertedModel, checksum
from moelab.ane.device.mac import CoreMLRunner, Meter, require_mac
from moelab.ane.doctor import coreml_backend, diagnose
from moelab.ane.opening import open_beside
from moelab.ane.runtime import prefill_through
from moelab.base.arguments import folder, output, several, whole
from moelab.base.progress import progress
from moelab.base.records import Numbers, Record, Rows
from moelab.offloading.offload import Offloading

from .ane_micro import SIZES, UNITS, attention_and_moe, measure, refit, sections
from .ane_published import ATTENTION_CPU


def time_prefill(
    model: Any, backend: TorchBackend, prompts: Sequence[int], repeats: int, meter: Meter
) -> Rows:
    """Prefills of random tokens, one row a prompt length: TTFT, its parts (Table 4: they overlap
    where device and CPU work at once), CPU seconds, mJ a token by part, drops and launches."""
    rows = []
    for length in progress(list(prompts), "measuring", unit="prompt"):
        rng = torch.Generator().manual_seed(0)
        ids = torch.randint(0, model.config.vocab_size, (1, length), generator=rng)
        with torch.no_grad(), prefill_through(model, backend) as ane:
            ane.timeline.clear()
            seconds, mj, busy = measure(
                lambda: model(ids, use_cache=False, logits_to_keep=1), repeats, meter
            )
            parts: Numbers = {}
            for event in ane.timeline:
                part = f"{event.kind} on {event.resource}, ms"
                parts[part] = parts.get(part, 0.0) + 1e3 * (event.end - event.start) / (repeats + 1)
        total, chunks = ane.total, -(-length // backend.plan.chunk)
        rows.append(
            {
                "chunk": backend.plan.chunk,
                "prompt": length,
                "TTFT, s": median(seconds),
                "fastest, s": min(seconds),
                "slowest, s": max(seconds),
                "ms a chunk": 1e3 * median(seconds) / chunks,
                "CPU, s": busy,
                **parts,
                **{f"{part}, mJ a token": value / length for part, value in mj.items()},
                "dropped": total.drop_rate,
                "padded": total.padded_fraction,
                "launches a chunk": total.launches / (repeats + 1) / chunks,
            }
        )
    return rows


def run(
    folders: Sequence[Path] = (),
    prompts: Sequence[int] = (1024,),
    repeats: int = 5,
    checkpoint: Path | None = None,
    card: Path | None = None,
    sizes: Sequence[int] = SIZES,
) -> Record:
    require_mac("this bench")
    meter = Meter()
    found: Record = {}
    attention = ATTENTION_CPU  # the paper's, where no folder has an attention to time
    for path in folders:
        converted = ConvertedModel(path)
        checkups = diagnose(converted)
        model = open_beside(converted, converted.checkpoint(checkpoint), None, Offloading())
        sums = {converted.folder / entry["file"]: entry["checksum"] for entry in converted.packages}

        def load(package: Path, units: str, sums: Any = sums) -> Any:
            return CoreMLRunner(package, sums[package], units)

        for unit, units in UNITS.items():
            backend = coreml_backend(converted, checkups, units)
            for row in time_prefill(model, backend, prompts, repeats, meter):
                name = f"{Path(path).name}, a prompt of {row['prompt']}"
                found.setdefault(f"prefills, {unit}", {})[name] = row
        for section, rows in attention_and_moe(converted, load, repeats, meter).items():
            found[f"{Path(path).name}: {section}"] = rows
            if "Table 8" in section:
                attention = rows["CPU"]["ms"] / rows["ANE"]["ms"]
    with tempfile.TemporaryDirectory() as folder:
        found |= sections(Path(folder), _load, repeats, meter, sizes)
    if card is not None:
        refit(card, platform.node(), found, attention, sizes)
    return found | {"conditions": {"energy": meter.why or "by Zeus"}}


def _load(package: Path, units: str) -> CoreMLRunner:
    return CoreMLRunner(package, checksum(package), units)


MEASURES = ("moelab/ane",)


OPTIONS = {
    "folders": (
        several(folder),
        "converted models, e.g. one a chunk size; without, single graphs only",
    ),
    "prompts": (several(whole(1)), "their lengths in tokens, as 256,1024"),
    "repeats": (whole(1), "of each"),
    "checkpoint": (Path, "its folder, if it is not where it was converted"),
    "sizes": (several(whole(16)), "H and I of the experts of single graphs"),
    "card": (output, "a .toml to write, for `moelab ane plan --device`"),
}
