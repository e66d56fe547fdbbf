"""What reading, decoding and computing an expert costs on this machine, measured and never assumed.

Source: ZipMoE §3.3 and appendix C, whose scheduler and planner take "offline-profiled decompression
and I/O delays". `profile` repeats `moelab.simulation.microbenchmarks` in rounds; medians are used.

Samples are seconds, by name: "read E", "read SM", "read both" (an expert's), "read 65536" (so many
bytes at a random place), each as its share of as many as the engine has pieces under way, right
after others; "decompress", "recover", "decode" (both in one), "expert 4" (one expert on 4 tokens,
unpacked before where the executor needs it so), "one thread" (its "expert alone", if the engine
does that), "experts 8" (as many of a layer on one token, in one call of the executor), "other 4"
(what comes before a layer's experts, in a forward of 4 tokens without a past; deciding what to load
is part of it), "head 4" (what comes after the last layer), "copy", "matmul float32", "expert beside
decode" and "expert alone" (the same just before)."""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch

from moelab.arguments import number, output, whole
from moelab.checkpoint import opening
from moelab.fast.fast_decode import FastDecode
from moelab.files import load_json, write_json
from moelab.models import plugged
from moelab.offloading.requests import Delays
from moelab.offloading.threads import step_back
from moelab.progress import progress
from moelab.registry import make
from moelab.schema import Amount, Count, Must, Size
from moelab.simulation.microbenchmarks import (
    COPY,
    MATMUL,
    Microbenchmarks,
    experts_bytes,
    shards_of,
)
from moelab.specs import DeviceSpec, Figure
from moelab.store.layout import ExpertStore
from moelab.store.reader import Reader

FORMAT = "moelab.profile/2"
#: what no part of one expert takes
ABSURD = 3600.0
Seconds = Annotated[
    float, Must(lambda seconds: 0 <= seconds < ABSURD, "seconds, of less than an hour")
]
MINIMUM = 3  # rounds, however long they take


def _complete(seconds: dict[str, list[float]]) -> bool:
    """Whether there is all that `Profile` asks for, and time was taken by what divides
    something."""
    above0 = {name for name, samples in seconds.items() if min(samples) > 0}
    computed = {
        name.partition(" ")[0]
        for name in above0
        if re.fullmatch("(other|head) [1-9][0-9]{0,8}", name)
    }
    return (
        computed == {"other", "head"}
        and above0 >= {"read both", "decode", "copy", "expert 1"}
        and (seconds.keys() >= {"read E", "read SM", "decompress", "recover"})
    )


@dataclass(frozen=True, repr=False)
class Profile:
    """What was measured; `profile` makes one.

    seconds : name of the measurement → all samples.
    nbytes : bytes of an expert's "full" tensors, and the mean over all experts of its "e" and "sm"
        reads.
    experts_bytes : [L][E] of the bytes of each expert's two reads, [E-chunks, SM-chunks].
    K, N : exponent shards a tensor, tensors an expert.
    dtype, mode, workers, threads : computed in, how it was read, threads that decode, threads of
        torch.
    load_average, others, clock_mhz : that before it, the cores that other processes kept busy
        meanwhile, the cores' mean clock rate after it; None where that is not known.
    """

    seconds: Annotated[
        dict[str, Annotated[list[Seconds], Must(len, "a list of samples")]],
        Must(_complete, "samples of all reads, of decoding and of computing"),
    ]
    nbytes: Annotated[
        dict[str, Count], Must(lambda of: {"full", "e", "sm"} <= of.keys(), "full, e and sm")
    ]
    experts_bytes: list[
        list[Annotated[list[Count], Must(lambda pair: len(pair) == 2, "two numbers")]]
    ]
    K: Size
    N: Size
    model: str
    codec: str
    dtype: str
    mode: str
    workers: Size
    threads: Size
    when: str
    machine: str
    load_average: Amount | None = None
    others: Amount | None = None
    clock_mhz: Amount | None = None

    def median(self, name: str) -> float:
        if name not in self.seconds:
            raise KeyError(
                f"nothing called {name!r} was measured; there are {', '.join(self.seconds)}"
            )
        return statistics.median(self.seconds[name])

    def __add__(self, later: Profile) -> Profile:
        """The samples of both, of the same store, and as many cores busy as in the busier one."""
        others = [one.others for one in (self, later) if one.others is not None]
        return replace(
            later,
            others=max(others, default=None),
            seconds={
                name: self.seconds.get(name, []) + samples
                for name, samples in later.seconds.items()
            },
        )

    def calm(self) -> Profile:
        """The calmer half of the rounds: what disturbs a machine for a while makes all of a round
        slower."""
        rounds = len(self.seconds["read both"])
        slower = np.median(
            [
                np.array(of) / usual
                for of in self.seconds.values()
                if len(of) == rounds and (usual := statistics.median(of))
            ],
            axis=0,
        )
        kept = np.sort(np.argsort(slower, kind="stable")[: max(-(-rounds // 2), MINIMUM)])
        return replace(
            self,
            seconds={
                name: [of[i] for i in kept] if len(of) == rounds else of
                for name, of in self.seconds.items()
            },
        )

    def points(self, kind: str) -> dict[int, float]:
        """Median seconds by number: of "expert", "other" and "head" by tokens, of "read" by
        bytes."""
        return {
            int(number): self.median(name)
            for name in self.seconds
            for begin, _, number in (name.partition(" "),)
            if begin == kind and number.isdecimal() and int(number)
        }

    def fit(self, kind: str) -> tuple[float, float]:
        """(base, per token) in seconds, neither negative: exact for one token, for more with the
        least squares of relative errors; modelled."""
        (first, once), *more = self.points(kind).items()
        steps = [((n - first) / seconds, 1 - once / seconds) for n, seconds in more]
        token = sum(a * b for a, b in steps) / sum(a * a for a, _ in steps) if steps else 0.0
        token = min(max(token, 0.0), once / first)
        return max(once - token * first, 0.0), token  # rounding can leave less than nothing

    def fit_error(self, kind: str) -> float:
        base, token = self.fit(kind)
        return max(
            abs((base + token * n) / seconds - 1) for n, seconds in self.points(kind).items()
        )

    #: seconds before a layer's experts, and after the last layer's: (base, per token)
    other = property(lambda self: self.fit("other"))
    head = property(lambda self: self.fit("head"))

    def delays(self) -> Delays:
        base, token = self.fit("expert")
        beside = {
            name: max(
                1.0,
                statistics.median(
                    b / a for a, b in zip(self.seconds[f"{name.split()[0]} alone"], samples)
                ),
            )
            for name, samples in self.seconds.items()
            if " beside " in name
        }
        return Delays(
            self.median("read E"),
            self.median("read SM"),
            self.median("decompress"),
            self.median("recover"),
            base,
            token,
            self.K,
            self.N,
            self.nbytes["e"],
            self.nbytes["sm"],
            self.median("decode"),
            self.experts_bytes,
            tuple(self.points("expert").items()),
            self.median("one thread") if "one thread" in self.seconds else None,
            beside,
            self.median("read both"),
            tuple(
                sorted(several for several in self.points("experts").items() if several[0] > 1)[-1:]
            ),
        )

    def to_device(self) -> DeviceSpec:
        """A device card of this machine, its figures "measured", with when and how in their
        source."""

        def figure(value: float, unit: str, how: str) -> Figure:
            return Figure(
                value, unit, "measured", f"{how}; `moelab profile` of {self.model}, {self.when}"
            )

        both, reads, copies = (
            self.nbytes["e"] + self.nbytes["sm"],
            self.seconds["read both"],
            self.seconds["copy"],
        )
        figures = {
            "storage_read_gbs": figure(
                both / self.median("read both") / 1e9,
                "GB/s",
                f"whole experts of {both / 1e6:.2f} MB at random places, {self.mode}, median of {len(reads)}",
            ),
            "memory_bandwidth_gbs": figure(
                2 * COPY / min(copies) / 1e9,
                "GB/s",
                f"a copy of {COPY >> 20} MiB, read and written, the fastest of {len(copies)}, {self.threads} threads",
            ),
        }
        if self.nbytes["sm"]:
            figures["decompress_gbs"] = figure(
                self.nbytes["full"] / 2 / self.median("decompress") / 1e9,
                "GB/s",
                f"exponents out of one thread, {self.codec}, median of {len(self.seconds['decompress'])}",
            )
        for dtype, name in (
            ("bfloat16", "bf16_tflops"),
            ("float16", "fp16_tflops"),
            ("float32", "fp32_tflops"),
        ):
            if samples := self.seconds.get(f"matmul {dtype}"):
                figures[name] = figure(
                    2 * MATMUL**3 / min(samples) / 1e12,
                    "TFLOPS",
                    f"a product of {MATMUL} × "
                    f"{MATMUL} matrices, the fastest of {len(samples)}, {self.threads} threads",
                )
        if hasattr(os, "sysconf"):
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            figures["memory_gb"] = figure(memory / 1e9, "GB", "what the system reports")
        return DeviceSpec(self.machine, figures)

    def table(self) -> list[dict[str, Any]]:
        return [
            {
                "what": name,
                "median, ms": 1e3 * self.median(name),
                "quartiles, ms": "{:.3f} … {:.3f}".format(
                    *np.quantile(samples, (0.25, 0.75)) * 1e3
                ),
                "samples": len(samples),
            }
            for name, samples in self.seconds.items()
        ]

    def __repr__(self) -> str:
        rate = (self.nbytes["e"] + self.nbytes["sm"]) / self.median("read both")
        return (
            f"Profile({self.model}, {self.codec}, {self.when}: reading {rate / 1e6:,.0f} MB/s ({self.mode}), "
            f"decoding {self.nbytes['full'] / self.median('decode') / 1e6:,.0f} MB/s a thread, "
            f"one expert on one token {1e3 * self.median('expert 1'):.2f} ms)"
        )

    def save(self, path: str | Path) -> Path:
        return write_json(path, {"format": FORMAT, **asdict(self)})

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile; FileNotFoundError if there is none, ValueError if the file is something
        else."""
        return load_json(path, FORMAT, "profile", f"`moelab profile STORE --output {path}`", cls)


def profile(
    store: ExpertStore | str | Path,
    model: Any = None,
    workers: int = 1,
    seconds: float = 10.0,
    seed: int = 0,
    executor: Any = None,
    compact: bool = False,
    **reading: Any,
) -> Profile:
    """Measure this machine with a store's experts, chosen at random, and the model's other weights.

    model : a live model of the store, which is plugged and whose experts are left out meanwhile;
        opened if not given.
    workers : threads that decode at the same time; ValueError below 1.
    seconds : about how long to measure; at least three rounds are made, after a first that does not
        count.
    executor, compact : with which experts are computed, and whether those of few bits are kept as
        they are: see `moelab.offloading.offload.offload`. With "fast" the model's other parts use
        the fused kernels, too, as `open_model` has it.
    reading : options of `moelab.store.reader.Reader`: mode, bandwidth, verify.
    """
    if workers < 1:
        raise ValueError(f"workers is {workers}; at least one thread must decompress")
    store = store if isinstance(store, ExpertStore) else ExpertStore(store)
    model = opening.open_checkpoint(store.folder, experts="external") if model is None else model
    with (
        Reader(store, **reading) as reader,
        ThreadPoolExecutor(workers, initializer=step_back) as pool,
    ):
        measured = Microbenchmarks(
            store,
            model,
            reader,
            pool,
            workers,
            np.random.default_rng(seed),
            make("executor", executor) if isinstance(executor, str) else executor,
            compact,
        )
        with (
            closing(measured.pieces),
            measured.disk,
            torch.inference_mode(),
            FastDecode(model) if executor == "fast" else nullcontext(),
            plugged(model, measured.without_experts, measured),
        ):
            measured.once()  # compiles, touches memory
            measured.seconds.clear()
            start = time.perf_counter()
            with progress(desc="profiling", unit="rounds") as bar:
                while measured.done < MINIMUM or time.perf_counter() - start < seconds:
                    measured.once()
                    bar.update()
            measured.work.clear()  # its methods: they would keep all this memory until the next collection
        every = experts_bytes(store)
        e, sm = (
            round(statistics.fmean(pair[part] for layer in every for pair in layer))
            for part in (0, 1)
        )
        return Profile(
            seconds=measured.seconds,
            K=shards_of(store),
            N=len(store.entries(0, 0)),
            model=store.spec.name,
            codec=store.codec,
            dtype=str(model.dtype).removeprefix("torch."),
            nbytes={"full": measured.slots.sizes.full, "e": e, "sm": sm},
            experts_bytes=every,
            mode=reader.mode,
            workers=workers,
            threads=torch.get_num_threads(),
            when=time.strftime("%Y-%m-%d %H:%M"),
            machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="an expert store")
    parser.add_argument(
        "--workers", type=whole(1), default=1, metavar="L", help="threads that decode (default: 1)"
    )
    parser.add_argument(
        "--seconds",
        type=number(above=0),
        default=10.0,
        help="about how long to measure (default: 10)",
    )
    parser.add_argument(
        "--output",
        type=output,
        metavar="FILE",
        help="keep all samples in a JSON file, for Profile.load",
    )


def main(args: argparse.Namespace) -> int:
    found = profile(args.store, workers=args.workers, seconds=args.seconds)
    for row in found.table():
        print(
            f"{row['what']:<14}{row['median, ms']:>12.3f} ms   quartiles {row['quartiles, ms']:<22}"
            f"{row['samples']:>5} samples"
        )
    for kind in ("expert", "other", "head"):
        base, token = (1e3 * part for part in found.fit(kind))
        print(
            f"{kind:<14}≈ {base:.3f} ms + {token:.4f} ms a token, at most {found.fit_error(kind):.0%} off"
        )
    print(found)
    if args.output:
        print(f"saved as {found.save(args.output)}")
    return 0
