"""Lossless compression of experts: size beside the entropy bound, and rates a thread beside memcpy and zipnn.

Every codec packs and unpacks the same bf16 expert in turn with zipnn and memcpy; rates are medians, in GB of weights a
second. Rates "a thread" are per second of processor time; rates "together" are per second on the clock, which is
meaningful only while the machine is idle. `decode` is from packed bytes to bf16 weights in a given buffer.
Source: ZipMoE §2.2 and Fig. 3 (sizes; LZ4HC and ZSTD with its settings are `lz4hc` and `zstd`), §2.3 and Fig. 4.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from moelab.bench import reading
from moelab.bench.measure import Samples, interleaved, load_average, speed_up
from moelab.models.synthesize import COLUMNS, draw
from moelab.store import bits
from moelab.store.codecs import CODECS, DEFAULT, compress_tensor, decompress_tensor
from moelab.store.entropy import describe, joint_counts
from moelab.store.reader import measure_modes, modes

EXPERT = 16 << 20               # bytes of the expert that is measured
PEER = "zipnn"
MISSING = "not installed"


def synthetic_expert(nbytes: int = EXPERT, seed: int = 0) -> torch.Tensor:
    """A bf16 matrix [rows, 2048] of about `nbytes`; exponent entropy 2.64 bits, ZipMoE's models 2.55–2.65 (Fig. 2)."""
    rows = max(1, nbytes // (2 * COLUMNS))
    return draw(rows * COLUMNS, seed).view(rows, COLUMNS)


@dataclass(frozen=True)
class Coder:
    """A way to pack one expert: its stored size in bytes, and functions of no arguments to be timed."""

    nbytes: int
    compress: Callable[[], Any]
    decode: Callable[[], Any]
    another: Callable[[], Callable[[], Any]]        # a decode with buffers of its own, for one more thread


def coders(weights: torch.Tensor, names: Iterable[str] = CODECS) -> dict[str, Coder]:
    """A coder for each codec, and for zipnn where it is installed; ValueError for one that loses anything."""
    made = {name: _coder(weights, name) for name in names}
    with suppress(ImportError):
        made[PEER] = _zipnn(weights)
    return made


def _coder(weights: torch.Tensor, name: str) -> Coder:
    packed, out = compress_tensor(weights, name), torch.empty_like(weights)
    decompress_tensor(packed, out)
    _check(name, bits.as_bytes(out), weights)

    def another() -> Callable[[], None]:
        out, scratch = torch.empty_like(weights), np.empty(weights.numel(), np.uint8)
        out.zero_(), scratch.fill(0)                            # pre-faulted pages
        return lambda: decompress_tensor(packed, out, scratch)
    return Coder(packed.nbytes, lambda: compress_tensor(weights, name), another(), another)


def _zipnn(weights: torch.Tensor) -> Coder:
    """zipnn on bytes, one thread. It compresses in place, so its input is copied before each run, a small part."""
    import zipnn
    make = partial(zipnn.ZipNN, input_format="byte", bytearray_dtype="bfloat16", threads=1)
    data = bytes(bits.as_bytes(weights))
    buffer = bytearray(data)

    def compress() -> Any:
        buffer[:] = data
        return make().compress(buffer)
    packed = bytes(compress())

    def decode() -> Any:
        return make().decompress(packed)
    _check(PEER, np.frombuffer(decode(), np.uint8), weights)
    return Coder(len(packed), compress, decode, lambda: decode)


def _check(name: str, found: np.ndarray, weights: torch.Tensor) -> None:
    if not np.array_equal(found, bits.as_bytes(weights)):
        raise ValueError(f"{name} does not give the same bytes back; its rates would mean nothing")


def copies(weights: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Two arms for comparison: memcpy of the expert, and recovery alone, which writes as many bytes."""
    source, out = bits.as_bytes(weights), np.zeros(weights.numel() * 2, np.uint8)
    exponents, rest = bits.split(weights)
    words = out.view(np.uint16)
    return {"memcpy": lambda: np.copyto(out, source), "recovery": lambda: bits.join(exponents, rest, words)}


def per_thread(weights: torch.Tensor, made: Mapping[str, Coder], repeats: int = 7) -> Samples:
    """Seconds of processor time of "memcpy", "recovery" and "NAME compress", "NAME decode" of every coder."""
    arms = copies(weights)
    for name, coder in made.items():
        arms |= {f"{name} compress": coder.compress, f"{name} decode": coder.decode}
    return interleaved(arms, repeats)


def together(made: Mapping[str, Coder], counts: Sequence[int] = (1, 2), repeats: int = 7, loops: int = 4) -> Samples:
    """Seconds on the clock until each of n threads has decoded the expert `loops` times: "NAME × n"."""
    with ThreadPoolExecutor(max(counts)) as pool:
        def loop(decode: Callable[[], Any]) -> None:
            for _ in range(loops):
                decode()

        def arm(coder: Coder, n: int) -> Callable[[], Any]:
            decoders = [coder.another() for _ in range(n)]
            return lambda: list(pool.map(loop, decoders))
        return interleaved({f"{name} × {n}": arm(coder, n) for name, coder in made.items() for n in counts},
                           repeats, time.perf_counter, loops=1)


def rate(samples: Samples, name: str, nbytes: float) -> float:
    """GB of weights a second: `nbytes` over the median."""
    return nbytes / statistics.median(samples[name]) / 1e9


def sizes(weights: torch.Tensor, made: Mapping[str, Coder]) -> dict[str, dict[str, float]]:
    """Of each coder, the compressed size and its distance from the order-0 bound: percent of the weights."""
    size, bound = weights.numel() * 2, describe(joint_counts(weights)).bound
    return {name: {"fraction %": 100 * coder.nbytes / size, "bound %": 100 * bound,
                   "points above the bound": 100 * (coder.nbytes / size - bound)} for name, coder in made.items()}


def rates(samples: Samples, nbytes: float) -> dict[str, dict[str, Any]]:
    """Of each coder in `per_thread`'s samples, the rates a thread and their ratios to zipnn and memcpy."""
    names = [name.removesuffix(" decode") for name in samples if name.endswith(" decode")]
    peer = f"{PEER} decode" in samples
    return {name: {
        "compress GB/s": rate(samples, f"{name} compress", nbytes),
        "decode GB/s": rate(samples, f"{name} decode", nbytes),
        f"decode ÷ {PEER}": speed_up(samples, f"{name} decode", f"{PEER} decode") if peer else MISSING,
        "decode ÷ memcpy": speed_up(samples, f"{name} decode", "memcpy")} for name in names}


def scaling(samples: Samples, nbytes: float, loops: int = 4) -> dict[str, float]:
    """Of `together`'s samples, "NAME × n GB/s", and "NAME × n ÷ × 1" for n above 1."""
    found = {}
    for arm in samples:
        name, n = arm.rsplit(" × ", 1)
        found[f"{arm} GB/s"] = rate(samples, arm, nbytes * int(n) * loops)
        if n != "1":
            found[f"{arm} ÷ × 1"] = int(n) * speed_up(samples, arm, f"{name} × 1")
    return found


def from_disk(nbytes: int, repeats: int) -> tuple[dict[str, Any], Samples]:
    """Figures and samples of reading a store in the system's temporary folder; see `moelab.bench.reading`."""
    weights = [synthetic_expert(nbytes, seed) for seed in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        plain, packed = (reading.write_store(f"{folder}/{codec}", weights, codec) for codec in ("raw", DEFAULT))
        found = {f"{mode} reads GB/s": value / 1e9 for mode, value in measure_modes(plain, len(weights)).items()}
        samples, _ = reading.compare(plain, packed, modes()[0], repeats=repeats)
    ways = reading.summary(samples, sum(w.numel() * 2 for w in weights))
    return found | {f"{name}, {unit}": value for name, row in ways.items() for unit, value in row.items()}, samples


def run(nbytes: int = EXPERT, repeats: int = 7) -> dict[str, dict[str, Any]]:
    load, weights = load_average(), synthetic_expert(nbytes)
    size, made = weights.numel() * 2, coders(weights)
    single = per_thread(weights, made, repeats)
    counts = sorted({1, 2, os.cpu_count() or 1})
    several = together({name: coder for name, coder in made.items() if name != "raw"}, counts, repeats)
    found = {"conditions": {
        "load average before": load, "expert bytes": size, "memcpy GB/s": rate(single, "memcpy", size),
        "recovery time ÷ memcpy time": 1 / speed_up(single, "recovery", "memcpy"),
        PEER: "in this run" if PEER in made else MISSING}}
    first, second = sizes(weights, made), rates(single, size)
    found |= {f"{name}, one thread": first[name] | second[name] for name in made}
    found["threads together, by the clock"] = scaling(several, size)
    found[f"from disk, {modes()[0]} reads of {DEFAULT}"], disk = from_disk(nbytes, repeats)
    return found | {"samples": single | several | disk}
