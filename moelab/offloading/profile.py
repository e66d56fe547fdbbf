"""The profiler: what reading, decoding and computing experts costs on this machine, measured and never assumed.

Source: ZipMoE §3.3 and appendix C, whose scheduler and planner take "offline-profiled decompression and I/O delays".
Everything that a decode step is made of is timed on the store's own experts, in rounds: each round runs every
measurement once on other experts, so that a busy moment or a warm cache favours none of them. Medians are used, all
samples are kept. What grows with the number of tokens is summed up by a base and an amount a token.

Shapes: samples in seconds, by name: "read E", "read SM", "read both" (an expert's), "read 65536" (so many bytes at a
random place), "decompress", "recover", "decode" (both in one), "expert 4" (one expert on 4 tokens), "other 4" (all
that comes before a layer's experts, in a forward of 4 tokens without a past), "head 4" (what comes after the last
layer), "copy", "matmul float32". Left out: contention, for each is timed with the others at rest, except that as many
threads decode as will; attention to a long past; other devices than the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from bisect import bisect_left
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from moelab.arguments import number, whole
from moelab.models import opening, plugged
from moelab.progress import progress
from moelab.offloading.delays import experts_bytes
from moelab.offloading.microbenchmarks import COPY, MATMUL, Rounds
from moelab.offloading.slots import Sizes
from moelab.schedule.requests import Delays
from moelab.specs import DeviceSpec, Figure
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader

FORMAT = "moelab.profile/2"
MINIMUM = 3                                                     # rounds, however long they take


@dataclass(frozen=True)
class MeasuredDelays(Delays):
    """Delays whose computation is read off the measured (tokens, seconds), for no line goes through them all.

    A product of a matrix and a vector and one of two matrices are different code; expert_base and expert_token sum
    them up.
    """

    computed: tuple[tuple[int, float], ...] = ()

    def expert(self, tokens: int) -> float:
        """Seconds for so many tokens, on straight lines between the measured ones; beyond them, the last goes on."""
        if len(self.computed) < 2:
            return super().expert(tokens)
        at = min(bisect_left(self.computed, (tokens,)), len(self.computed) - 1)
        (n0, low), (n1, high) = self.computed[max(at - 1, 0)], self.computed[max(at, 1)]
        return max(low + (high - low) * (tokens - n0) / (n1 - n0), 0.0)


@dataclass(frozen=True, repr=False)
class Profile:
    """What was measured; `profile` makes one.

    Attributes
    ----------
    seconds : name of the measurement → all samples, in seconds.
    nbytes : bytes of an expert's "full" tensors, and the mean over all experts of its "e" and "sm" reads.
    experts_bytes : [L][E] of the bytes of each expert's two reads, [E-chunks, SM-chunks].
    K, N : exponent shards a tensor, tensors an expert.
    model, codec, dtype : whose experts; the type that they are computed in.
    mode, workers, threads : how it was read; threads that decode, threads of torch.
    when, machine : in words.
    """

    seconds: dict[str, list[float]]
    nbytes: dict[str, int]
    experts_bytes: list[list[list[int]]]
    K: int
    N: int
    model: str
    codec: str
    dtype: str
    mode: str
    workers: int
    threads: int
    when: str
    machine: str

    def median(self, name: str) -> float:
        """Seconds of one measurement; KeyError for an unknown name, saying which there are."""
        if name not in self.seconds:
            raise KeyError(f"nothing called {name!r} was measured; there are {', '.join(self.seconds)}")
        return statistics.median(self.seconds[name])

    def spread(self, name: str) -> tuple[float, float]:
        """Lower and upper quartile, in seconds."""
        self.median(name)
        return tuple(np.quantile(self.seconds[name], (0.25, 0.75)).tolist())

    def points(self, kind: str) -> dict[int, float]:
        """Median seconds by number: of "expert", "other" and "head" by tokens, of "read" by bytes."""
        return {int(number): self.median(name) for name in self.seconds
                for begin, _, number in (name.partition(" "),) if begin == kind and number.isdigit()}

    def fit(self, kind: str) -> tuple[float, float]:
        """(base, per token) in seconds, neither negative: exact for one token, for more with the least squares of
        relative errors; modelled."""
        (first, once), *more = self.points(kind).items()
        steps = [((n - first) / seconds, 1 - once / seconds) for n, seconds in more]
        token = sum(a * b for a, b in steps) / sum(a * a for a, _ in steps) if steps else 0.0
        token = min(max(token, 0.0), once / first)
        return max(once - token * first, 0.0), token            # rounding can leave less than nothing

    def fit_error(self, kind: str) -> float:
        """The largest relative error of the fit."""
        base, token = self.fit(kind)
        return max(abs((base + token * n) / seconds - 1) for n, seconds in self.points(kind).items())

    @property
    def other(self) -> tuple[float, float]:
        """Seconds before a layer's experts: (base, per token)."""
        return self.fit("other")

    @property
    def head(self) -> tuple[float, float]:
        """Seconds after the last layer's experts: (base, per token)."""
        return self.fit("head")

    def delays(self) -> Delays:
        """What the scheduler, the planner and the simulator want to know of one expert."""
        base, token = self.fit("expert")
        return MeasuredDelays(
            self.median("read E"), self.median("read SM"), self.median("decompress"), self.median("recover"), base,
            token, self.K, self.N, self.nbytes["e"], self.nbytes["sm"], self.median("decode"),
            self.experts_bytes, tuple(self.points("expert").items()))

    def to_device(self) -> DeviceSpec:
        """A device card of this machine, its figures "measured", with when and how in their source."""
        def figure(value: float, unit: str, how: str) -> Figure:
            return Figure(value, unit, "measured", f"{how}; `moelab profile` of {self.model}, {self.when}")
        both = self.nbytes["e"] + self.nbytes["sm"]
        names = {"bfloat16": "bf16_tflops", "float16": "fp16_tflops", "float32": "fp32_tflops"}
        figures = {
            "storage_read_gbs": figure(both / self.median("read both") / 1e9, "GB/s", "whole experts of "
                                       f"{both / 1e6:.2f} MB at random places, {self.mode}, median of "
                                       f"{len(self.seconds['read both'])}"),
            "memory_bandwidth_gbs": figure(2 * COPY / min(self.seconds["copy"]) / 1e9, "GB/s", f"a copy of "
                                           f"{COPY >> 20} MiB, read and written, the fastest of "
                                           f"{len(self.seconds['copy'])}, {self.threads} threads"),
            **{names[dtype]: figure(2 * MATMUL ** 3 / min(samples) / 1e12, "TFLOPS", f"a product of {MATMUL} × {MATMUL}"
                                    f" matrices, the fastest of {len(samples)}, {self.threads} threads")
               for name, samples in self.seconds.items() for begin, _, dtype in (name.partition(" "),)
               if begin == "matmul" and dtype in names}}
        if hasattr(os, "sysconf"):
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            figures["memory_gb"] = figure(memory / 1e9, "GB", "what the system reports")
        return DeviceSpec(self.machine, figures)

    def table(self) -> list[dict[str, Any]]:
        """A row a measurement: name, median and quartiles in milliseconds, samples."""
        return [{"what": name, "median, ms": 1e3 * self.median(name), "quartiles, ms": "{:.3f} … {:.3f}".format(
            *(1e3 * q for q in self.spread(name))), "samples": len(samples)} for name, samples in self.seconds.items()]

    def __repr__(self) -> str:
        rate = (self.nbytes["e"] + self.nbytes["sm"]) / self.median("read both")
        return (f"Profile({self.model}, {self.codec}, {self.when}: reading {rate / 1e6:,.0f} MB/s ({self.mode}), "
                f"decoding {self.nbytes['full'] / self.median('decode') / 1e6:,.0f} MB/s a thread, "
                f"one expert on one token {1e3 * self.median('expert 1'):.2f} ms)")

    def save(self, path: str | Path) -> Path:
        """Write to `path` as JSON, whole or not at all; returns the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1))
        os.replace(part, path)
        return path

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile; FileNotFoundError if there is none, ValueError if the file is something else."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"no profile at {path}; `python -m moelab profile STORE --output {path}` makes one")
        try:
            fields = json.loads(path.read_text())
            if fields.pop("format") != FORMAT:
                raise ValueError("of another format")
            return cls(**fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no profile ({FORMAT}): {error}; measure again") from error


def profile(store: ExpertStore | str | Path, model: Any = None, workers: int = 1, seconds: float = 10.0, seed: int = 0,
            **reading: Any) -> Profile:
    """Measure this machine with a store's experts and the model's other weights.

    Parameters
    ----------
    store : whose experts are read, decoded and computed; chosen at random.
    model : a live model of the store, which is plugged and whose experts are left out meanwhile; opened if not given.
    workers : threads that decode at the same time.
    seconds : about how long to measure; at least three rounds are made, after a first that does not count.
    reading : options of `moelab.store.reader.Reader`: mode, bandwidth, verify.

    Raises
    ------
    ValueError : workers below 1. Also what `ExpertStore`, `open_checkpoint` and `Reader` raise.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; at least one thread must decompress")
    store = store if isinstance(store, ExpertStore) else ExpertStore(store)
    model = opening.open_checkpoint(store.folder, experts="external") if model is None else model
    with Reader(store, **reading) as reader, ThreadPoolExecutor(workers) as pool, torch.inference_mode():
        rounds = Rounds(store, model, reader, pool, workers, np.random.default_rng(seed))
        try:
            with plugged(model, rounds.without_experts):
                rounds.once()                                   # compiles, touches memory
                rounds.seconds.clear()
                start = time.perf_counter()
                with progress(desc="profiling", unit="rounds") as bar:
                    while rounds.done < MINIMUM or time.perf_counter() - start < seconds:
                        rounds.once()
                        bar.update()
        finally:
            rounds.pieces.close()
        first, every = store.entries(0, 0), experts_bytes(store)
        e, sm = (round(statistics.fmean(pair[part] for layer in every for pair in layer)) for part in (0, 1))
        return Profile(
            seconds=rounds.seconds, K=max(len(entry.planes[0][1]) for entry in first.values()), N=len(first),
            model=store.spec.name, codec=store.codec, dtype=str(model.dtype).removeprefix("torch."),
            nbytes={"full": Sizes.of(store).full, "e": e, "sm": sm}, experts_bytes=every,
            mode=reader.mode, workers=workers, threads=torch.get_num_threads(), when=time.strftime("%Y-%m-%d %H:%M"),
            machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="an expert store")
    parser.add_argument("--workers", type=whole(1), default=1, metavar="L", help="threads that decode (default: 1)")
    parser.add_argument("--seconds", type=number(above=0), default=10.0, help="about how long to measure (default: 10)")
    parser.add_argument("--output", metavar="FILE", help="keep all samples in a JSON file, for Profile.load")


def main(args: argparse.Namespace) -> int:
    found = profile(args.store, workers=args.workers, seconds=args.seconds)
    for row in found.table():
        print(f"{row['what']:<14}{row['median, ms']:>12.3f} ms   quartiles {row['quartiles, ms']:<22}"
              f"{row['samples']:>5} samples")
    for kind in ("expert", "other", "head"):
        base, token = (1e3 * part for part in found.fit(kind))
        print(f"{kind:<14}≈ {base:.3f} ms + {token:.4f} ms a token, at most {found.fit_error(kind):.0%} off")
    print(found)
    if args.output:
        print(f"saved as {found.save(args.output)}")
    return 0
