"""Decompression behind reading: experts from a store on disk, read only, read then decoded, and
overlapped.

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

import numpy as np
import torch

from moelab.bench import measure
from moelab.bench.measure import Samples
from moelab.bench.memory_limit import drop_cached
from moelab.evaluation.intervals import Interval
from moelab.progress import progress
from moelab.records import Numbers
from moelab.specs import MoESpec
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader, decode, empty_tensors, modes
from moelab.store.writer import StoreWriter

#: row of a timeline → (kind, begin, end) in seconds from the start
Timeline = dict[str, list[tuple[str, float, float]]]
BASE = "uncompressed, read only"


def write_store(folder: str | Path, experts: Sequence[torch.Tensor], codec: str) -> ExpertStore:
    """A store of one layer whose experts are one matrix [rows, columns] each, and of nothing
    else."""
    rows, columns = experts[0].shape
    spec = MoESpec("synthetic", "synthetic", 1, (0,), len(experts), 1, columns, rows)
    writer = StoreWriter(folder, spec, "0" * 16, [("experts", len(experts), False)], codec, 4)
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
    rows = {"disk" if threads != 0 else "one thread": reads}
    buffers = queue.Queue()
    decoders = queue.Queue()
    with Reader(store, mode, bandwidth) as reader, ThreadPoolExecutor(threads or 1) as pool:
        drop_cached(store.folder)
        for i in range(threads or 0):
            decoders.put((_decoder(store), rows.setdefault(f"thread {i + 1}", [])))
        if threads == 0:
            decoders.put((_decoder(store), reads))
        for _ in range((threads or 0) + 1):
            buffer = reader.buffer()
            buffer[:] = 0  # pre-faulted pages
            buffers.put(buffer)
        start = time.perf_counter()

        def span(spans: list, kind: str, action: Callable[[], Any]) -> Any:
            begin = time.perf_counter()
            result = action()
            spans.append((kind, begin - start, time.perf_counter() - start))
            return result

        def decoded(chunks: Any, buffer: np.ndarray) -> None:
            decoder, spans = decoders.get()
            try:
                span(spans, "decode", lambda: decoder(chunks))
            finally:
                decoders.put((decoder, spans))
                buffers.put(buffer)

        tasks = []
        for layer, expert in (
            (l, e) for l, of in enumerate(store.layers) for e in range(len(of.experts))
        ):
            buffer = buffers.get()
            chunks = span(reads, "read", lambda: reader.read(layer, expert, "both", buffer))
            if threads:
                tasks.append(pool.submit(decoded, chunks, buffer))
            elif threads == 0:
                decoded(chunks, buffer)
            else:
                buffers.put(buffer)
        for task in tasks:
            task.result()
    return rows


def _decoder(store: ExpertStore) -> Callable[[Any], Any]:
    """Decodes the chunks of an expert into tensors that are allocated, and pre-faulted, once."""
    entries = store.entries(0, 0)
    out = {name: tensor.zero_() for name, tensor in empty_tensors(entries).items()}
    return lambda chunks: decode(chunks, chunks, out)


def duration(rows: Timeline) -> float:
    """Seconds from the start to the end of the last span."""
    return max(end for spans in rows.values() for _, _, end in spans)


def compare(
    plain: ExpertStore,
    packed: ExpertStore,
    mode: str,
    threads: Sequence[int] = (1, 2),
    repeats: int = 5,
    bandwidth: float | None = None,
) -> tuple[Samples, dict[str, Timeline]]:
    """Seconds of loading the same experts, uncompressed and compressed, in each way and with each
    number of decoding threads, in `repeats` interleaved rounds after a first; and the last
    timelines."""
    arms = {
        BASE: (plain, None),
        "compressed, read only": (packed, None),
        "read, then decoded": (packed, 0),
    } | {f"overlapped, {n} decoding": (packed, n) for n in threads}
    samples = {name: [] for name in arms}
    last = {}
    for repeat in progress(range(repeats + 1), "reading", unit="rounds"):
        for name, (store, decoding) in arms.items():
            last[name] = timeline(store, mode, decoding, bandwidth)
            if repeat:
                samples[name].append(duration(last[name]))
    return samples, last


class Study(NamedTuple):
    """Loading from this machine's disk, and from slower ones that a bandwidth limit emulates.

    nbytes : of the weights that are loaded. samples : of `compare`, by the disk's limit in bytes a
        second, 0 for none.
    rows : `compare`'s last timelines.
    """

    mode: str
    threads: Sequence[int]
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
        make: Callable[[int, int], torch.Tensor],
        codec: str,
    ) -> Study:
        """`experts` made by make(nbytes, seed), in the system's temporary folder, raw and in a
        codec."""
        weights = [make(nbytes, seed + i) for i in range(experts)]
        mode = modes()[0]
        with tempfile.TemporaryDirectory(prefix="moelab-store-") as folder:
            stores = [write_store(f"{folder}/{name}", weights, name) for name in ("raw", codec)]
            samples, rows = compare(*stores, mode, threads, repeats)
            every = {0.0: samples} | {
                limit: compare(*stores, mode, threads, repeats, limit)[0] for limit in limits
            }
        return cls(mode, threads, sum(w.numel() * 2 for w in weights), every, rows)

    def gain(self, way: str, limit: float = 0.0) -> Interval:
        """Times the rate of uncompressed reading."""
        return measure.gain(self.samples[limit], way, BASE)

    @property
    def here(self) -> dict[str, Numbers]:
        """`summary` of the disk as it is."""
        return summary(self.samples[0.0], self.nbytes)

    def rate(self, f: float) -> float:
        """GB a second that this disk reads of a compressed store, f of the weights' size."""
        return self.here["compressed, read only"]["GB/s"] * f

    def metrics(self) -> Numbers:
        """Name of a metric → GB/s of loading, of each form."""
        return {
            "load_" + name.replace(", ", "_").replace(" ", "_"): row["GB/s"]
            for name, row in self.here.items()
        }

    def spans(self) -> dict[str, list[tuple[str, float, float]]]:
        """Rows of a timeline in ms: read and decoded in turn, and at once with all threads."""
        names = {
            "read, then decoded": "in turn",
            f"overlapped, {self.threads[-1]} decoding": "at once",
        }
        return {
            f"{short}: {row}": [(kind, 1e3 * begin, 1e3 * end) for kind, begin, end in found]
            for name, short in names.items()
            for row, found in self.rows[name].items()
        }

    def curves(
        self, f: float, D: dict[int, float]
    ) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, list]]:
        """(read rates, GB/s; what is modelled to be delivered, by the way; what was measured,
        (rate, delivered))."""
        by_rate = {
            limit / 1e9 or self.rate(f): summary(of, self.nbytes)
            for limit, of in self.samples.items()
        }
        rates = np.geomspace(min(0.1, *by_rate), max(4.0, *by_rate), 60)
        modelled = {"uncompressed": rates, "in turn": 1 / (f / rates + 1 / D[1])}
        modelled |= {f"overlapped, {n} decoding": np.minimum(rates / f, D[n]) for n in self.threads}
        names = {"uncompressed": BASE, "in turn": "read, then decoded"}
        return (
            rates,
            modelled,
            {
                name: [
                    (rate, found[names.get(name, name)]["GB/s"]) for rate, found in by_rate.items()
                ]
                for name in modelled
            },
        )


def summary(samples: Samples, nbytes: float) -> dict[str, Numbers]:
    """GB of weights a second of each way, and how many times the uncompressed rate that is, round
    by round."""
    return {
        name: {
            "GB/s": nbytes / statistics.median(values) / 1e9,
            "÷ uncompressed": measure.speed_up(samples, name, BASE),
        }
        for name, values in samples.items()
    }
