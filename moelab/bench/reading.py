"""Does decompression hide behind reading? Experts from a store on disk, read only, read then decoded, and overlapped.

Source: ZipMoE §2.3 and Fig. 4. The store's own reader reads whole experts, in direct mode where there is one; a
pool of threads decodes them into bf16 weights while the next is read. Buffers go round between the two, so memory
stays at one expert a thread and one more. A store of uncompressed chunks, read and nothing else, is what
compression has to beat. Left out: the order of experts and partial reads, which are the scheduler's business.
"""

from __future__ import annotations

import queue
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab.progress import progress
from moelab.specs import MoESpec
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader, decode, empty_tensors
from moelab.store.writer import StoreWriter

#: row of a timeline → (kind, begin, end) in seconds from the start
Timeline = dict[str, list[tuple[str, float, float]]]


def write_store(folder: str | Path, experts: Sequence[torch.Tensor], codec: str, shards: int = 4) -> ExpertStore:
    """A store of one layer whose experts are one matrix [rows, columns] each, and of nothing else."""
    rows, columns = experts[0].shape
    spec = MoESpec("synthetic", "synthetic", 1, (0,), len(experts), 1, columns, rows)
    writer = StoreWriter(folder, spec, "0" * 16, [("experts", len(experts), False)], codec, shards)
    for layer, expert in writer.missing():
        writer.add(layer, expert, {"weight": experts[expert]})
    writer.finish({}, [])
    return ExpertStore(writer.publish())


def read_only(store: ExpertStore, mode: str, bandwidth: float | None = None) -> Timeline:
    """Read every expert into one buffer and do nothing with it."""
    with Reader(store, mode, bandwidth) as reader:
        _forget(reader)
        buffer, clock, spans = _ready(reader.buffer()), _Clock(), []
        for layer, expert in _everyone(store):
            clock.span(spans, "read", lambda: reader.read(layer, expert, "both", buffer))
    return {"disk": spans}


def one_after_the_other(store: ExpertStore, mode: str, bandwidth: float | None = None) -> Timeline:
    """Read an expert, decode it, read the next: one thread does both."""
    with Reader(store, mode, bandwidth) as reader:
        _forget(reader)
        buffer, decoder, spans = _ready(reader.buffer()), _Decoder(store), []
        clock = _Clock()
        for layer, expert in _everyone(store):
            chunks = clock.span(spans, "read", lambda: reader.read(layer, expert, "both", buffer))
            clock.span(spans, "decode", lambda: decoder(chunks))
    return {"one thread": spans}


def overlapped(store: ExpertStore, mode: str, threads: int = 1, bandwidth: float | None = None) -> Timeline:
    """One thread reads expert after expert, `threads` others decode them."""
    buffers, decoders = queue.Queue(), queue.Queue()
    rows: Timeline = {"disk": []}
    with Reader(store, mode, bandwidth) as reader, ThreadPoolExecutor(threads) as pool:
        _forget(reader)
        for i in range(threads):
            decoders.put((_Decoder(store), rows.setdefault(f"thread {i + 1}", [])))
        for _ in range(threads + 1):
            buffers.put(_ready(reader.buffer()))
        clock = _Clock()

        def work(chunks: Any, buffer: np.ndarray) -> None:
            decoder, spans = decoders.get()
            try:
                clock.span(spans, "decode", lambda: decoder(chunks))
            finally:
                decoders.put((decoder, spans))
                buffers.put(buffer)

        tasks = []
        for layer, expert in _everyone(store):
            buffer = buffers.get()
            chunks = clock.span(rows["disk"], "read", lambda: reader.read(layer, expert, "both", buffer))
            tasks.append(pool.submit(work, chunks, buffer))
        for task in tasks:
            task.result()
    return rows


def duration(timeline: Timeline) -> float:
    """Seconds from the start to the end of the last span."""
    return max(end for spans in timeline.values() for _, _, end in spans)


def compare(plain: ExpertStore, packed: ExpertStore, mode: str, threads: Sequence[int] = (1, 2), repeats: int = 5,
            bandwidth: float | None = None) -> tuple[dict[str, list[float]], dict[str, Timeline]]:
    """Seconds of loading all experts in each way, `repeats` interleaved rounds after a first, and the last timelines.

    Parameters
    ----------
    plain, packed : stores of the same experts, uncompressed and compressed.
    mode : how to read, one of `moelab.store.reader.modes()`.
    threads : numbers of decoding threads to try.
    bandwidth : bytes a second of an emulated, slower disk; None for the real one.
    """
    arms = {"uncompressed, read only": lambda: read_only(plain, mode, bandwidth),
            "compressed, read only": lambda: read_only(packed, mode, bandwidth),
            "read, then decoded": lambda: one_after_the_other(packed, mode, bandwidth)}
    for n in threads:
        arms[f"overlapped, {n} decoding"] = lambda n=n: overlapped(packed, mode, n, bandwidth)
    samples: dict[str, list[float]] = {name: [] for name in arms}
    last: dict[str, Timeline] = {}
    for repeat in progress(range(repeats + 1), "reading", unit="rounds"):
        for name, arm in arms.items():
            last[name] = arm()
            if repeat:
                samples[name].append(duration(last[name]))
    return samples, last


def summary(samples: dict[str, list[float]], nbytes: float) -> dict[str, dict[str, float]]:
    """GB of weights a second of each way, and how many times the uncompressed rate that is, round by round."""
    base = samples["uncompressed, read only"]
    return {name: {"GB/s": nbytes / statistics.median(values) / 1e9,
                   "÷ uncompressed": statistics.median(b / a for a, b in zip(values, base))}
            for name, values in samples.items()}


class _Clock:
    """Notes when things begin and end, in seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    def span(self, spans: list, kind: str, action: Any) -> Any:
        begin = time.perf_counter()
        result = action()
        spans.append((kind, begin - self.start, time.perf_counter() - self.start))
        return result


class _Decoder:
    """Decodes experts of a store into tensors that are allocated, and touched, once."""

    def __init__(self, store: ExpertStore) -> None:
        entries = store.entries(0, 0)
        self.out = {name: tensor.zero_() for name, tensor in empty_tensors(entries).items()}
        self.scratch = np.zeros(max(entry.n for entry in entries.values()), np.uint8)

    def __call__(self, chunks: Any) -> None:
        decode(chunks, chunks, self.out, self.scratch)


def _forget(reader: Reader) -> None:
    """Let nothing of the store be in the system's cache, as far as the system can be told."""
    for layer in range(len(reader.store.layers)):
        reader.drop_cache(layer)


def _ready(buffer: np.ndarray) -> np.ndarray:
    buffer[:] = 0                   # its pages are there before the clock runs
    return buffer


def _everyone(store: ExpertStore) -> list[tuple[int, int]]:
    return [(i, expert) for i, layer in enumerate(store.layers) for expert in range(len(layer.experts))]
