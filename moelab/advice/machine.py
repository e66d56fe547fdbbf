"""What this machine delivers, measured in a moment: memory, disk and arithmetic. No torch, which
takes seconds to load.

Rates are bounds to compare with, the best of a few tries; `moelab.profile` measures what an engine
meets."""

from __future__ import annotations

import mmap
import os
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from moelab.base.specs import DeviceSpec, Figure
from moelab.offloading.budget import available

#: bytes of a read: about an expert, of which disks deliver several thousand a second
READ = 4 << 20
#: bytes that are written where there is no file to read from
PROBE = 64 << 20
TOTAL = 48 << 20  # bytes that are read


def here(folder: str | Path | None = None) -> DeviceSpec:
    """A card of this machine, measured; the disk where `folder` is, or else the system's temporary
    folder."""
    disk, how = disk_rate(folder)
    found = {
        "memory_bandwidth_gbs": (memory_rate() / 1e9, "GB/s", "the best of reading by all cores"),
        "storage_read_gbs": (disk / 1e9, "GB/s", how),
        "fp32_tflops": (flops() / 1e12, "TFLOPS", "the best of a product by numpy"),
        "memory_gb": (available() / 1e9, "GB", "available now"),
    }
    figures = {name: Figure(of, unit, "measured", how) for name, (of, unit, how) in found.items()}
    return DeviceSpec(f"this machine ({os.cpu_count()} cores)", figures)


def _best(act: Callable[[], object]) -> float:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        act()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def memory_rate() -> float:
    """Bytes/s that all cores read together from 128 MB of memory, which no cache holds."""
    nbytes = 128 << 20
    cores = os.cpu_count() or 1
    parts = np.array_split(np.ones(nbytes // 8, np.int64), cores)
    with ThreadPoolExecutor(cores) as pool:
        return nbytes / _best(lambda: list(pool.map(np.sum, parts)))


def flops() -> float:
    """FLOP/s of a square product in fp32, by numpy's library."""
    n = 768
    a = np.ones((n, n), np.float32)
    return 2 * n**3 / _best(lambda: a @ a)


def disk_rate(folder: str | Path | None = None) -> tuple[float, str]:
    """(bytes/s of reads of `READ` bytes at random places past the page cache, one at a time; what
    was read).

    folder : of the model, whose largest file is read; where it has none itself, a file is written
        and removed again.

    Raises OSError: nothing can be read or written there.
    """
    files = [path for path in Path(folder).iterdir() if path.is_file()] if folder else []
    file = max(files, key=lambda path: path.stat().st_size, default=None)
    if file and file.stat().st_size >= PROBE:
        return _read(file), f"reads of {READ >> 20} MB of {file.name}"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        (file := Path(temporary) / "probe").write_bytes(os.urandom(1 << 20) * (PROBE >> 20))
        with open(file, "rb") as f:
            os.fsync(f.fileno())
        where = Path(temporary).parent
        return _read(file), f"reads of {READ >> 20} MB of a new file in {where}"


def _read(file: Path) -> float:
    buffer = mmap.mmap(-1, READ)  # aligned
    places = list(range(0, file.stat().st_size - READ + 1, READ))
    random.Random(0).shuffle(places)
    places = places[: TOTAL // READ]

    def read() -> None:
        for place in places:
            os.preadv(fd, [buffer], place)

    for flags in (getattr(os, "O_DIRECT", 0), 0):
        with suppress(OSError), open(os.open(file, os.O_RDONLY | flags), "rb") as f:
            fd = f.fileno()
            if not flags and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            return len(places) * READ / _best(read)
    raise OSError(f"{file} cannot be read")
