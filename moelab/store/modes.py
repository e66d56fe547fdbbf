"""The ways of reading a file that this system has, and which of them is fastest on this disk.

O_DIRECT (Linux) and F_NOCACHE (macOS) go past the system's page cache, which would hold what a cache of our own
keeps anyway. Whether that is faster depends on the disk and the file system, so it is measured, once a store and
machine.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from moelab.store.layout import ExpertStore

try:
    import fcntl
except ImportError:
    fcntl = None

MEASURED = "read_mode.json"


def modes() -> list[str]:
    """The ways of reading that this system has: "direct", "uncached", "buffered"."""
    return (["direct"] if hasattr(os, "O_DIRECT") else []) + (
        ["uncached"] if hasattr(fcntl, "F_NOCACHE") else []) + ["buffered"]


def measure_modes(store: ExpertStore, reads: int = 8, seed: int = 0) -> dict[str, float]:
    """Median bytes a second of reading `reads` random experts in every mode, interleaved, what is cached dropped."""
    from moelab.store.reader import Reader
    everyone = [(i, e) for i, layer in enumerate(store.layers) for e in range(len(layer.experts))]
    chosen = np.random.default_rng(seed).permutation(len(everyone))[:reads]
    rates: dict[str, list[float]] = {mode: [] for mode in modes()}
    buffer = Reader(store, "buffered").buffer()
    buffer[:] = 0                                               # so that no page is touched for the first time below
    for layer, expert in (everyone[index] for index in chosen):
        for mode in rates:
            with Reader(store, mode, verify=False) as reader:
                reader.drop_cache(layer)
                reader.read(layer, expert, "both", buffer)
                rates[mode].append(reader.counters.bytes / max(reader.counters.seconds, 1e-9))
    return {mode: statistics.median(found) for mode, found in rates.items() if found}


def fastest_mode(store: ExpertStore) -> str:
    """The mode that `measure_modes` finds fastest, remembered in a file beside the index for this machine."""
    file, machine = store.folder / MEASURED, f"{platform.node()} {os.stat(store.folder).st_dev}"
    try:
        known = json.loads("" if file.is_symlink() else file.read_text())
        if known["machine"] == machine and known["mode"] in modes():
            return known["mode"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass                                                    # never measured, or not readable: measure
    rates = measure_modes(store)
    mode = max(rates, key=rates.get, default="buffered")
    try:
        descriptor, temporary = tempfile.mkstemp(dir=store.folder, prefix=MEASURED + ".")   # new: it follows no link
        with open(descriptor, "w") as f:
            json.dump({"machine": machine, "mode": mode, "bytes a second": rates}, f)
        os.replace(temporary, file)
    except OSError:
        pass                                                    # a read-only store is measured each time
    return mode
