"""What this machine delivers: memory, disk and arithmetic, measured in two seconds and kept. No
torch, which takes seconds to load.

Memory and arithmetic are bounds to compare with, the best of many tries, as others only disturb
them. Of the disk it is the middle, and what it delivers in its slowest tenth, when it is busy: it
is read as the engine reads, several experts at a time. The measurement of a quiet machine is kept,
so that the next advice has the same rates. One that others disturbed is made again when the machine
is quiet, and the less disturbed one is kept."""

from __future__ import annotations

import mmap
import os
import platform
import random
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

import numpy as np

from moelab.base.files import cache_folder, read_json, write_json
from moelab.base.records import Record
from moelab.base.schema import typed
from moelab.base.specs import DeviceSpec, Figure
from moelab.bench.results import watched, why_busy
from moelab.offloading.budget import available

FORMAT = "moelab.machine/2"
#: bytes of a read: about an expert, of which disks deliver several thousand a second; as many at a
#: time as the engine's (`moelab.offloading.loading.DEPTH`)
READ = 4 << 20
AT_ONCE = 3
#: bytes that are written where there is no file to read from
PROBE = 64 << 20
#: seconds of each measurement; rounds of it at least
SECONDS, ROUNDS = 0.5, 8
#: cores that others keep busy, above which what is measured meanwhile is measured again
DISTURBED = 0.25
#: the part of reads by which a busy disk is judged
SLOW = 0.1


def machine() -> str:
    """The key under which measurements of this machine are kept."""
    return f"{platform.node()}, {platform.machine()}, {os.cpu_count()} cores"


def told(others: float) -> list[str]:
    """What there is to say of a measurement during which others used so many cores."""
    if others <= DISTURBED:
        return []
    return [
        f"While this machine was measured, others kept {others:.1f} of its cores busy: times are too "
        "long. Ask again when it is quiet: it is measured anew, and that is kept."
    ]


def here(folder: str | Path | None = None) -> DeviceSpec:
    """A card of this machine, from a quiet time or measured now; the disk where `folder`, or a file,
    is, or else the system's temporary folder."""
    folder = disk_of(folder)
    disk = os.stat(folder or tempfile.gettempdir()).st_dev
    found = kept_card(f"disk {disk}, {FORMAT}", "machine", lambda: measured(folder))
    found.figures["memory_gb"] = free(available())
    return found


def disk_of(path: str | Path | None) -> str | Path | None:
    """A folder on the disk where a folder or a file is."""
    return Path(path).absolute().parent if path and os.path.isfile(path) else path


def kept_card(key: str, what: str, measure: Callable[[], DeviceSpec]) -> DeviceSpec:
    """A card of a part of this machine: one kept from a quiet time, or measured now."""
    kept = quietest(f"{machine()}, {key}", what, lambda: {"card": asdict(measure())})
    found = typed(kept["card"], DeviceSpec)
    found.figures["others_cores"] = figure(kept["others"], "cores", "what others used meanwhile")
    return found


def free(nbytes: int) -> Figure:
    """Of memory."""
    return figure(nbytes / 1e9, "GB", "available now")


def quietest(key: str, what: str, measure: Callable[[], Record]) -> Record:
    """What is kept under a key, or measured now; what `others` disturbed is measured again when
    this machine is quiet, and the less disturbed stays. "others" are the cores that they used.

    measure : returns plain values."""
    name = sha256(key.encode()).hexdigest()[:16]
    file = cache_folder("advice") / f"{name}.{what}.json"
    old = None
    with suppress(OSError, ValueError):  # of a damaged one: it is measured anew
        old = read_json(file, Record)
    if old is None or old["others"] > DISTURBED and why_busy() is None:
        new, others = watched(measure)
        new["others"] = others
        write_json(file, min(new, old or new, key=lambda one: one["others"]))
        old = read_json(file, Record)
    return old


def measured(folder: str | Path | None) -> DeviceSpec:
    """This machine as it is now."""
    disk, busy, how = disk_rates(folder)
    figures = {
        "memory_bandwidth_gbs": figure(memory_rate() / 1e9, "GB/s", "the best of all cores' reads"),
        "storage_read_gbs": figure(disk / 1e9, "GB/s", f"the median of {how}"),
        "storage_busy_gbs": figure(busy / 1e9, "GB/s", f"the slowest tenth of {how}"),
        "fp32_tflops": figure(flops() / 1e12, "TFLOPS", "the best of a product by numpy"),
    }
    when = time.strftime("%Y-%m-%d %H:%M")
    return DeviceSpec(f"this machine ({os.cpu_count()} cores, measured {when})", figures)


def figure(value: float, unit: str, how: str) -> Figure:
    """One that was measured."""
    return Figure(value, unit, "measured", how)


def seconds(act: Callable[[], object]) -> list[float]:
    """Seconds of repeated calls; a first one, which touches new memory, does not count."""
    found = []
    act()
    end = time.perf_counter() + SECONDS
    while len(found) < ROUNDS or time.perf_counter() < end:
        start = time.perf_counter()
        act()
        found.append(time.perf_counter() - start)
    return found


def memory_rate() -> float:
    """Bytes/s that all cores read together from 128 MB of memory, which no cache holds."""
    nbytes = 128 << 20
    cores = os.cpu_count() or 1
    parts = np.array_split(np.ones(nbytes // 8, np.int64), cores)
    with ThreadPoolExecutor(cores) as pool:
        return nbytes / min(seconds(lambda: list(pool.map(np.sum, parts))))


def flops() -> float:
    """FLOP/s of a square product in fp32, by numpy's library."""
    n = 768
    a = np.ones((n, n), np.float32)
    return 2 * n**3 / min(seconds(lambda: a @ a))


def disk_rates(folder: str | Path | None) -> tuple[float, float, str]:
    """(bytes/s of reads of `READ` bytes at random places past the page cache, `AT_ONCE` at a time:
    the median and the slowest tenth; what was read).

    folder : of the model, whose largest file is read; where it has none itself, a file is written
        and removed again.

    Raises OSError: nothing can be read or written there.
    """
    files = [path for path in Path(folder).iterdir() if path.is_file()] if folder else []
    file = max(files, key=lambda path: path.stat().st_size, default=None)
    how = f"reads of {READ >> 20} MB, {AT_ONCE} at a time, of"
    if file and file.stat().st_size >= PROBE:
        return *_read(file), f"{how} {file.name}"
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        file = Path(temporary) / "probe"
        file.write_bytes(os.urandom(PROBE))
        with open(file, "rb") as f:
            os.fsync(f.fileno())
        return *_read(file), f"{how} a new file in {Path(temporary).parent}"


def _read(file: Path) -> tuple[float, float]:
    buffers = [mmap.mmap(-1, READ) for _ in range(AT_ONCE)]  # aligned
    draw = random.Random(0)
    count = file.stat().st_size // READ

    def read() -> None:
        places = [READ * n for n in draw.sample(range(count), AT_ONCE)]
        list(pool.map(lambda buffer, place: os.preadv(fd, [buffer], place), buffers, places))

    for flags in (getattr(os, "O_DIRECT", 0), 0):
        with (
            suppress(OSError),
            open(os.open(file, os.O_RDONLY | flags), "rb") as f,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            fd = f.fileno()
            if not flags and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            took = seconds(read)
            return tuple(AT_ONCE * READ / np.quantile(took, (0.5, 1 - SLOW)))
    raise OSError(f"{file} cannot be read")
