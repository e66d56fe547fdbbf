"""Executors of a layer's routed experts, timed beside transformers' own and the roofline of this
machine.

Every lossless executor of the registry and transformers' `eager`, `batched_mm` and `grouped_mm`
compute the same steps in interleaved rounds: a prompt, and single tokens whose experts are cold, as
layers of more weights than a cache has take turns. The roofline is the time of reading the weights
or of computing alone, whichever is longer, at the best rates of several readers and products in the
same rounds. Ratios are medians over rounds, to the best of transformers' three. Sources: AWS
Neuron's MoE guide ("Selective loading", "All-Experts algorithm"), Williams et al. 2009 (roofline).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import fmean, median

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from moelab.base.arguments import number, whole
from moelab.base.records import Numbers, Records
from moelab.base.registry import make
from moelab.bench.results import tenths
from moelab.experts import EXECUTORS
from moelab.experts.gemv import GEMV
from moelab.fast.packing import packed_as
from moelab.kernels.compile import kernel
from moelab.models import compat

from .layers import Arms, Layers, PackedExperts, rounds_of
from .timing import Samples, speed_up, torch_threads

STOCK = ("eager", "batched_mm", "grouped_mm")
#: GEMV on packed weights
PACKED = tuple(f"gemv of {form}" for form in ("bf12", "int8", "fp8", "mxfp4", "int4"))
GATHERED = 4e9  # bytes that `batched_mm` may copy weights to: beyond, it is not run
LEFT_OUT = ("exact", "neuron")  # of a comparison of techniques: a naive loop, a choice of others
LOADING = ("selective", "all_experts")
TOLERANCE = 0.05


def share(reached: float) -> float | str:
    """The share of a limit that is reached; above 1 + `TOLERANCE` words, as the limit was then
    measured wrongly."""
    return reached if reached <= 1 + TOLERANCE else f"limit invalid: beaten, {reached:.2f} of it"


class TimedLayers(Layers):
    """Layers and all that compute them; `stored`: arm → its weights' bytes over those as they are
    here."""

    def arms(self, T: int, rounds: int, left_out: Collection[str] = ()) -> tuple[Arms, int]:
        """All that compute the steps of T tokens, of which step 0 warms up (compiles kernels); and
        the bytes of weights that a step must read, on average."""
        steps = self.steps(T, rounds)
        arms = {}
        self.stored: Numbers = {}
        for name in STOCK:
            if name != "batched_mm" or T * self.K * self.expert_bytes < GATHERED:
                arms[f"transformers {name}"] = lambda i, name=name: self._stock(name, *steps[i])
        for name in EXECUTORS:
            with suppress(ValueError):  # needs options, such as a plan
                if (run := make("executor", name)).lossless:
                    arms[name] = lambda i, run=run: run(*steps[i][1:], self.seam[steps[i][0]])
        E = self.config.num_experts
        packed = [name for name in PACKED if name not in left_out]
        if (
            T == 1
            and packed
            and self.dtype == torch.bfloat16
            and packed_as("bf12", self.seam[0].own(0)["down_proj"]) is not None
        ):
            for name in packed:
                form = name.split()[-1]
                seams = self.from_sources(PackedExperts(seam, form) for seam in self.seam)
                self.stored[name] = seams[0].source.nbytes / (E * self.expert_bytes)
                arms[name] = lambda i, seams=seams: GEMV()(*steps[i][1:], seams[steps[i][0]])
        read = fmean(len(ids.unique()) for _, _, ids, _ in steps) * self.expert_bytes
        return arms, int(read)

    def _stock(self, name: str, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        compat.dispatch(self.config, name)
        return self.stock[layer](x, ids, weights)


class Limits:
    """Arms that measure memory bandwidth and arithmetic, to be timed in the same rounds as what
    they bound: torch's sum and a loop that prefetches 4 KB ahead; products of a square and of the
    layer's shape, in the experts' type and in fp32, as a CPU may lack bf16 instructions."""

    SQUARE = 1024

    def __init__(self, layers: Layers, pool: ThreadPoolExecutor) -> None:
        banks = [stock.gate_up_proj.view(-1).view(torch.int64) for stock in layers.stock]
        threads = torch.get_num_threads()
        ahead = _loop()

        def read(i: int) -> None:
            list(pool.map(ahead, np.array_split(banks[i % len(banks)].numpy(), threads)))

        self.arms: Arms = {"memory, torch's sum": lambda i: banks[i % len(banks)].sum()}
        self.arms["memory, a loop"] = read
        self.work: Numbers = dict.fromkeys(self.arms, banks[0].nbytes)
        side = self.SQUARE
        sizes = layers.config.hidden_size, 2 * layers.config.moe_intermediate_size
        for dtype in dict.fromkeys((layers.dtype, torch.float32)):
            for m, k, n in ((side,) * 3, (side, *sizes)):
                name = f"product {m} × {k} × {n}, {str(dtype).removeprefix('torch.')}"
                x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
                self.arms[name] = lambda _, x=x, w=w: linear(x, w)
                self.work[name] = 2.0 * m * k * n

    def best(self, samples: Samples) -> tuple[float, float]:
        """(bytes/s, FLOP/s): the most that any of them reached in any round."""
        rates = {name: of / min(samples[name]) for name, of in self.work.items()}
        memory = {name for name in rates if name.startswith("memory")}
        return (
            max(rates[name] for name in memory),
            max(rates[name] for name in rates.keys() - memory),
        )


@lru_cache(maxsize=1)
def _loop() -> Callable[[np.ndarray], int]:
    """A way of reading int64 words, compiled."""
    from moelab.kernels.tiles import prefetch

    @kernel
    def ahead(words):
        a = b = 0
        for i in range(0, len(words) - 15, 16):  # two cache lines
            prefetch(words.ctypes.data + 8 * i + 4096)
            prefetch(words.ctypes.data + 8 * i + 4160)
            for j in range(8):
                a += words[i + j]
                b += words[i + 8 + j]
        return a + b

    return ahead


@dataclass(frozen=True, eq=False)
class ExpertTimes:
    """Seconds of every executor and of the limits in the same rounds; `read` bytes of weights and
    `flops` of a step; `bandwidth` and `rate` of the fastest reader (bytes/s) and product (FLOP/s);
    `stored`, see `TimedLayers`."""

    samples: Samples
    read: float
    flops: float
    bandwidth: float
    rate: float
    stored: Numbers = field(default_factory=dict)

    @property
    def limits(self) -> Numbers:
        """The roofline: what limits → seconds."""
        return {
            "unpacked weights ÷ bandwidth": self.read / self.bandwidth,
            "FLOPs ÷ rate": self.flops / self.rate,
        }

    @property
    def medians(self) -> Numbers:
        """Way → median seconds of the layer's experts."""
        return {name: median(of) for name, of in self.samples.items()}

    @property
    def ours(self) -> tuple[float, str]:
        """(seconds, name) of the fastest executor of the registry."""
        return min((seconds, name) for name, seconds in self.medians.items() if name in EXECUTORS)

    @property
    def stock(self) -> tuple[float, str]:
        """(seconds, name) of the fastest of transformers' own."""
        return min(
            (seconds, name)
            for name, seconds in self.medians.items()
            if name.startswith("transformers")
        )

    @property
    def speedup(self) -> float:
        """How many times as fast the best way here is as the best of transformers."""
        return self.stock[0] / self.ours[0]

    def rows(self) -> Records:
        """Way → its times, rate and shares of the limits, as a table has them."""
        rows = {}
        best = self.stock[1]
        for name, taken in self.medians.items():
            low, high = tenths(self.samples[name])
            read = self.read * self.stored.get(name, 1.0)
            rows[name] = {
                "ms": 1e3 * taken,
                "10 %": 1e3 * low,
                "90 %": 1e3 * high,
                "× transformers' best": speed_up(self.samples, name, best),
                "GB/s": read / taken / 1e9,
                "of bandwidth": share(read / taken / self.bandwidth),
                "GFLOP/s": self.flops / taken / 1e9,
                "of roofline": share(max(read / self.bandwidth, self.flops / self.rate) / taken),
            }
        return rows


class ExpertBenchmark:
    """A layer of E experts, top-K, H × I, in as many copies as `cold` bytes take; `close` ends its
    threads."""

    def __init__(
        self,
        E: int,
        K: int,
        H: int,
        I: int,
        threads: int = 0,
        cold: float = 400e6,
    ) -> None:
        self.expert_flops, self.threads = 6 * H * I, threads or os.cpu_count() or 1
        self.layers = TimedLayers(E, K, H, I, torch.bfloat16, cold)
        self._pool = ThreadPoolExecutor(self.threads)
        with torch_threads(self.threads):
            self._limits = Limits(self.layers, self._pool)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def executors(self, T: int, rounds: int, left_out: Collection[str] = LEFT_OUT) -> ExpertTimes:
        """Every executor on T tokens, in turn, another routing and layer in each round."""
        with torch_threads(self.threads), torch.inference_mode():
            arms, read = self.layers.arms(T, rounds + 1, left_out)
            arms = {name: arm for name, arm in arms.items() if name not in left_out}
            samples = rounds_of(self._limits.arms | arms, rounds + 1, f"{T} token{'s' * (T > 1)}")
        own = {name: samples.pop(name) for name in arms}
        return ExpertTimes(
            own,
            read,
            T * self.layers.K * self.expert_flops,
            *self._limits.best(samples),
            self.layers.stored,
        )

    def loading(self, batches: Sequence[int], rounds: int) -> dict[int, Samples]:
        """Decode steps of each batch with the needed experts' weights, and with all: batch →
        executor → seconds."""
        found = {}
        with torch_threads(self.threads), torch.inference_mode():
            for b in batches:
                arms, _ = self.layers.arms(b, rounds + 1)
                found[b] = rounds_of(
                    {name: arms[name] for name in LOADING}, rounds + 1, f"batch {b}"
                )
        return found


def all_over_selective(found: dict[int, Samples]) -> dict[int, float]:
    """Batch → how many times as long all experts take as only those that are needed, of medians."""
    return {b: median(of["all_experts"]) / median(of["selective"]) for b, of in found.items()}


OPTIONS = {
    "E": (whole(1), "experts"),
    "K": (whole(1), "experts a token"),
    "H": (whole(1), "hidden size"),
    "I": (whole(1), "intermediate size"),
    "tokens": (whole(1), "of the prompt"),
    "cold": (number(above=0), "bytes of weights that take turns"),
    "rounds": (whole(1), "of the prompt; single tokens have five times as many"),
}


def run(
    E: int = 64,
    K: int = 8,
    H: int = 1024,
    I: int = 512,
    tokens: int = 512,
    cold: float = 400e6,
    rounds: int = 9,
) -> Records:
    threads = torch.get_num_threads()
    found = {"conditions": {"threads": threads}}
    bench = ExpertBenchmark(E, K, H, I, threads, cold)
    for phase, T, n in (("prefill", tokens, rounds), ("decode", 1, 5 * rounds)):
        title = f"bf16 {phase}, {T} {'token' if T == 1 else 'tokens'}"
        times = bench.executors(T, n, ())
        found["conditions"] |= {
            f"{title}: memory GB/s": times.bandwidth / 1e9,
            f"{title}: GFLOP/s": times.rate / 1e9,
        }
        found[title] = times.rows()
    bench.close()
    return found
