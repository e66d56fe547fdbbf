"""Decompression behind reading: experts from a store on disk, read only, read then decoded, and
overlapped; section 5 of notebook 02.

Source: ZipMoE §2.3 and Fig. 4. The store's reader reads whole experts; a pool of threads decodes
them into bf16 weights while the next is read. Reading a store of uncompressed chunks is the rate
that compression has to beat."""

from __future__ import annotations

import queue
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from moelab.base.progress import progress
from moelab.base.specs import MoESpec
from moelab.bench.memory_limit import drop_cached
from moelab.bench.synthesize import COLUMNS, draw
from moelab.evaluation.intervals import Interval
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader, decode, empty_tensors, modes
from moelab.store.writer import StoreWriter

from .timing import Samples, gain

#: row of a timeline → (kind, begin, end) in seconds from the start
Timeline = dict[str, list[tuple[str, float, float]]]
BASE = "uncompressed, read only"
COMPRESSED = "compressed, read only"
IN_TURN = "read, then decoded"


def synthetic_expert(nbytes: int, seed: int = 0) -> torch.Tensor:
    """A matrix of about so many bytes of weights as `draw` makes them, bf16 [rows, 2048]."""
    rows = max(1, nbytes // (2 * COLUMNS))
    return draw(rows * COLUMNS, seed).view(rows, COLUMNS)


def write_store(folder: str | Path, experts: Sequence[torch.Tensor], codec: str) -> ExpertStore:
    """A store of one layer whose experts are one matrix [rows, columns] each, and of nothing
    else."""
    rows, columns = experts[0].shape
    spec = MoESpec("synthetic", "synthetic", 1, (0,), len(experts), 1, columns, rows)
    writer = StoreWriter(folder, spec, "0" * 16, [("experts", len(experts), False)], codec)
    for layer, expert in writer.missing():
        writer.add(layer, expert, {"weight": experts[expert]})
    writer.finish({}, [])
    return ExpertStore(writer.publish())


def timeline(
    store: ExpertStore, mode: str, threads: int | None, bandwidth: float | None = None
) -> Timeline:
    """Load every expert once, from a dropped cache; `threads` decode while the next expert is read,
    0 decodes in the reading thread, None reads only; bandwidth : bytes a second of an emulated,
    slower disk."""
    reads: list[tuple[str, float, float]] = []
    rows = {"one thread" if threads == 0 else "disk": reads}
    buffers, decoders = queue.Queue(), queue.Queue()

    def span(spans: list, kind: str, action: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = action()
        spans.append((kind, begin - start, time.perf_counter() - start))
        return result

    def decoded(chunks: Any, buffer: Any) -> None:
        out, spans = decoders.get()
        try:
            span(spans, "decode", lambda: decode(chunks, chunks, out))
        finally:
            decoders.put((out, spans))
            buffers.put(buffer)

    def empty() -> dict[str, torch.Tensor]:  # allocated and pre-faulted once
        entries = store.entries(0, 0)
        return {name: tensor.zero_() for name, tensor in empty_tensors(entries).items()}

    with Reader(store, mode, bandwidth) as reader, ThreadPoolExecutor(threads or 1) as pool:
        drop_cached(store.folder)
        if threads == 0:
            decoders.put((empty(), reads))
        for i in range(threads or 0):
            decoders.put((empty(), rows.setdefault(f"thread {i + 1}", [])))
        for _ in range((threads or 0) + 1):
            buffer = reader.buffer()
            buffer[:] = 0  # pre-faulted pages
            buffers.put(buffer)
        start = time.perf_counter()
        tasks = []
        for expert in range(len(store.layers[0].experts)):
            buffer = buffers.get()
            chunks = span(reads, "read", lambda: reader.read(0, expert, "both", buffer))
            if threads:
                tasks.append(pool.submit(decoded, chunks, buffer))
            elif threads == 0:
                decoded(chunks, buffer)
            else:
                buffers.put(buffer)
        for task in tasks:
            task.result()
    return rows


class Study(NamedTuple):
    """Loading from this machine's disk, and from slower ones that a bandwidth limit emulates.

    nbytes : of the weights that are loaded. samples : of `compare`, by the disk's limit in bytes a
        second, 0 for none.
    rows : `compare`'s last timelines.
    """

    mode: str
    nbytes: int
    samples: dict[float, Samples]
    rows: dict[str, Timeline]

    @classmethod
    def of(
        cls,
        nbytes: int,
        experts: int,
        threads: Sequence[int],
        repeats: int,
        seed: int,
        limits: Sequence[float],
        codec: str,
    ) -> Study:
        """So many synthetic experts, in the system's temporary folder, raw and in a codec."""
        weights = [synthetic_expert(nbytes, seed + i) for i in range(experts)]
        mode = modes()[0]
        with tempfile.TemporaryDirectory(prefix="moelab-store-") as folder:
            stores = [write_store(f"{folder}/{name}", weights, name) for name in ("raw", codec)]
            ran = {
                limit: compare(*stores, mode, threads, repeats, limit or None)
                for limit in (0.0, *limits)
            }
        samples = {limit: of for limit, (of, _) in ran.items()}
        return cls(mode, sum(w.numel() * 2 for w in weights), samples, ran[0.0][1])

    def gain(self, way: str) -> Interval:
        """Times the rate of uncompressed reading."""
        return gain(self.samples[0.0], way, BASE)

    def rates(self, limit: float = 0.0) -> dict[str, float]:
        """GB of weights a second of each way."""
        return {
            name: self.nbytes / statistics.median(values) / 1e9
            for name, values in self.samples[limit].items()
        }


def compare(
    plain: ExpertStore,
    packed: ExpertStore,
    mode: str,
    threads: Sequence[int],
    repeats: int,
    bandwidth: float | None = None,
) -> tuple[Samples, dict[str, Timeline]]:
    """Seconds of loading the same experts, uncompressed and compressed, in each way and with each
    number of decoding threads, in `repeats` interleaved rounds after a first; and the last
    timelines."""
    arms = {BASE: (plain, None), COMPRESSED: (packed, None), IN_TURN: (packed, 0)}
    arms |= {f"overlapped, {n} decoding": (packed, n) for n in threads}
    samples = {name: [] for name in arms}
    last = {}
    for repeat in progress(range(repeats + 1), "reading", unit="rounds"):
        for name, (store, decoding) in arms.items():
            last[name] = timeline(store, mode, decoding, bandwidth)
            if repeat:
                ends = [end for spans in last[name].values() for _, _, end in spans]
                samples[name].append(max(ends))
    return samples, last
