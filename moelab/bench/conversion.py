"""Peak memory and rate of a conversion, beside the rates of its parts on the same machine.

A synthetic checkpoint is converted and verified in a process of its own. The parts, each alone: reading the checkpoint
past the system's cache; compressing experts in one thread; writing. A conversion overlaps the last two.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from moelab.bench.measure import in_process, seconds
from moelab.files import folder_bytes
from moelab.models.synthesize import draw, synthesize
from moelab.offloading.control_group import drop_cached
from moelab.store.codecs import DEFAULT, compress_tensor
from moelab.store.layout import ExpertStore

MB = 1e6
_CONVERT = """
import json, sys, time
import torch, transformers
import moelab.models.convert as converting
from moelab.offloading.metrics import process
verify, marks, base = converting.verify, [time.perf_counter()], process()["peak_rss_bytes"]
def timed(folder):
    marks.append(time.perf_counter())
    found = verify(folder)
    marks.append(time.perf_counter())
    return found
converting.verify = timed
converting.convert(sys.argv[1], sys.argv[2])
print(json.dumps({"imports alone bytes": base, "peak bytes": process()["peak_rss_bytes"],
                  "conversion seconds": marks[1] - marks[0], "verification seconds": marks[2] - marks[1]}))
"""


def run(model: str = "Qwen3-30B-A3B", scale: float = 0.083, folder: str | Path | None = None
        ) -> dict[str, dict[str, float]]:
    """Convert a synthetic checkpoint of `scale` of a card's layers (6 GB by default, 10 GB of disk needed)."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        source = Path(temporary) / "model"
        synthesis = seconds(synthesize, source, model, scale)
        size = folder_bytes(source)
        drop_cached(source)
        reading = _read_rate(max(source.glob("*.safetensors"), key=lambda path: path.stat().st_size))
        drop_cached(source)
        found = in_process(_CONVERT, source, Path(temporary) / "store")
        store = ExpertStore(Path(temporary) / "store")
        everything, stored = store.table()[-1], folder_bytes(store.folder)
        weights = draw(1 << 22)
        compress_tensor(weights, DEFAULT)                       # the first call compiles
        compressing = weights.nbytes / (sum(seconds(compress_tensor, weights, DEFAULT) for _ in range(32)) / 32)
        writing = _write_rate(Path(temporary) / "x")
    rate = size / found["conversion seconds"]
    slowest = min(reading, compressing)
    return {"memory": {"checkpoint bytes": size, "expert bytes": store.spec.expert_bytes,
                       **{key: value for key, value in found.items() if key.endswith("bytes")},
                       "above imports and one expert bytes": found["peak bytes"] - found["imports alone bytes"]
                       - store.spec.expert_bytes},
            "rates, MB/s": {"synthesis": size / synthesis / MB, "conversion": rate / MB,
                            "verification": stored / found["verification seconds"] / MB, "reading": reading / MB,
                            "compressing, one thread": compressing / MB, "writing": writing / MB},
            "result": {"stored fraction": everything["fraction"],
                       "conversion ÷ slower of reading and compressing": rate / slowest,
                       "conversion ÷ slowest, writing included": rate / min(slowest, writing * size / stored)}}


def _read_rate(file: Path) -> float:
    """Bytes a second of reading (at most 2 GB of) a file."""
    buffer, n, start = bytearray(8 << 20), 0, time.perf_counter()
    with open(file, "rb", buffering=0) as f:
        while n < 2e9 and (got := f.readinto(buffer)):
            n += got
    return n / (time.perf_counter() - start)


def _write_rate(file: Path) -> float:
    """Bytes a second of writing 1 GB with a sync every 64 MB."""
    data, start = os.urandom(64 << 20), time.perf_counter()
    with open(file, "wb", buffering=0) as f:
        for _ in range(16):
            f.write(data)
            os.fsync(f.fileno())
    return 16 * len(data) / (time.perf_counter() - start)
