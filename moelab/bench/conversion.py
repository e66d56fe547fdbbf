"""What a conversion costs: its peak memory and its rate, beside the rates of its parts on the same machine.

A synthetic checkpoint is converted in a process of its own, verification included. The parts, each alone: reading
the checkpoint from the disk, compressing experts in one thread, writing as many bytes as the store has. A
conversion overlaps the last two; the disk's cache is asked to forget the checkpoint first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from moelab.bench.foundation import MB
from moelab.store.codecs import DEFAULT, compress_tensor
from moelab.store.layout import ExpertStore

_CONVERT = """
import json, pathlib, re, resource, sys, time
import torch, transformers
import moelab.models.convert as converting
def peak():                     # Linux counts the parent's memory before exec into ru_maxrss, but not into VmHWM
    status = pathlib.Path("/proc/self/status")
    if status.exists():
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
verify, marks = converting.verify, [time.perf_counter()]
def timed(folder):
    marks.append(time.perf_counter())
    found = verify(folder)
    marks.append(time.perf_counter())
    return found
converting.verify, base = timed, peak()
converting.convert(sys.argv[1], sys.argv[2])
print(json.dumps({"imports alone bytes": base, "peak bytes": peak(), "conversion seconds": marks[1] - marks[0],
                  "verification seconds": marks[2] - marks[1]}))
"""


def run(model: str = "Qwen3-30B-A3B", scale: float = 0.083, folder: str | Path | None = None
        ) -> dict[str, dict[str, float]]:
    """Convert a synthetic checkpoint of `scale` of a card's layers (6 GB by default, 10 GB of disk needed)."""
    from moelab.models.synthesize import draw, synthesize
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        start = time.perf_counter()
        source = synthesize(Path(temporary) / "model", model, scale)
        synthesis, size = time.perf_counter() - start, sum(path.stat().st_size for path in source.iterdir())
        os.sync()
        reading = _read_rate(max(source.glob("*.safetensors"), key=lambda path: path.stat().st_size))
        _forget(source)
        done = subprocess.run([sys.executable, "-c", _CONVERT, str(source), str(Path(temporary) / "store")],
                              capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the conversion failed:\n{done.stderr}")
        said = json.loads(done.stdout.splitlines()[-1])
        store = ExpertStore(Path(temporary) / "store")
        everything, stored = store.table()[-1], sum(path.stat().st_size for path in store.folder.iterdir())
        weights = draw(1 << 22)
        compress_tensor(weights, DEFAULT)                       # the first call compiles
        start = time.perf_counter()
        for _ in range(32):
            compress_tensor(weights, DEFAULT)
        compressing = 32 * weights.nbytes / (time.perf_counter() - start)
        writing = _write_rate(Path(temporary) / "x")
    rate = size / said["conversion seconds"]
    return {"memory": {"checkpoint bytes": size, "expert bytes": store.spec.expert_bytes,
                       **{key: value for key, value in said.items() if key.endswith("bytes")},
                       "above imports and one expert bytes": said["peak bytes"] - said["imports alone bytes"]
                       - store.spec.expert_bytes},
            "rates, MB/s": {"synthesis": size / synthesis / MB, "conversion": rate / MB,
                            "verification": stored / said["verification seconds"] / MB, "reading": reading / MB,
                            "compressing, one thread": compressing / MB, "writing": writing / MB},
            "result": {"stored fraction": everything["fraction"],
                       "conversion ÷ slower of reading and compressing": rate / min(reading, compressing),
                       "conversion ÷ slowest, writing included": rate / min(reading, compressing,
                                                                            writing * size / stored)}}


def _forget(folder: Path) -> None:
    for path in folder.iterdir() if hasattr(os, "posix_fadvise") else ():
        with open(path, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read_rate(file: Path, piece: int = 8 << 20, limit: float = 2e9) -> float:
    """Bytes a second of reading (at most 2 GB of) a file that is not cached."""
    _forget(file.parent)
    buffer, n = bytearray(piece), 0
    with open(file, "rb", buffering=0) as f:
        start = time.perf_counter()
        while n < limit and (got := f.readinto(buffer)):
            n += got
    return n / (time.perf_counter() - start)


def _write_rate(file: Path, total: int = 1 << 30, piece: int = 64 << 20) -> float:
    """Bytes a second of writing 1 GB with a sync every 64 MB."""
    data = os.urandom(piece)
    start = time.perf_counter()
    with open(file, "wb", buffering=0) as f:
        for _ in range(total // piece):
            f.write(data)
            os.fsync(f.fileno())
    return total / (time.perf_counter() - start)
