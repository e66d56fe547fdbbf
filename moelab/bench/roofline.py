"""The roofline of a layer's experts on this machine, and how near executors come; all figures are measured.

An `ExpertBenchmark` holds layers of random bf16 experts, more than caches hold, and two limits that are timed in turn
with the executors (`moelab.bench.experts.Limits`): reading a layer's weights once, and large products in bf16 and fp32,
of which the fastest counts (a CPU without bf16 instructions computes in fp32). `executors` times every executor beside
them, `loading` the guide's two ways of loading a decode step's experts.

Sources: Williams et al. 2009 (roofline); AWS Neuron's MoE guide, "Selective loading", "All-Experts algorithm".
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from moelab.bench import measure
from moelab.bench.experts import Layers, Limits, rounds_of
from moelab.bench.measure import Samples
from moelab.experts import EXECUTORS
from moelab.specs import DeviceSpec, Figure

#: lossless executors that take no part: a naive loop, a choice of others
LEFT_OUT = ("exact", "neuron")
LOADING = ("selective", "all_experts")


@contextmanager
def torch_threads(n: int) -> Iterator[None]:
    """torch uses n threads within the block."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(n)
        yield
    finally:
        torch.set_num_threads(before)


def least_seconds(unique: float, T: int, K: int, H: int, I: int, weight_bytes: int, bandwidth: float, rate: float
                  ) -> dict[str, float]:
    """The roofline of one gated layer: reading the weights of `unique` experts once, and computing T·K of them."""
    return {"weights ÷ bandwidth": unique * 3 * H * I * weight_bytes / bandwidth,
            "FLOPs ÷ rate": T * K * 2 * 3 * H * I / rate}


@dataclass(frozen=True, eq=False)
class ExpertTimes:
    """A layer's experts on T tokens: samples of every executor in seconds, and the two limits in the same rounds.

    bandwidth, rate : bytes/s of the fastest reader, FLOP/s of the fastest product. limits : what limits → seconds.
    """

    samples: Samples
    bandwidth: float
    rate: float
    limits: dict[str, float]

    @property
    def medians(self) -> dict[str, float]:
        """Seconds of each executor."""
        return {name: median(of) for name, of in self.samples.items()}

    @property
    def ours(self) -> tuple[float, str]:
        """(seconds, name) of the fastest executor of the registry."""
        return min((seconds, name) for name, seconds in self.medians.items() if name in EXECUTORS)

    @property
    def stock(self) -> tuple[float, str]:
        """(seconds, name) of the fastest of transformers' own."""
        return min((seconds, name) for name, seconds in self.medians.items() if "transformers" in name)

    @property
    def speedup(self) -> float:
        return self.stock[0] / self.ours[0]

    @property
    def reached(self) -> float | str:
        """Share of what the roofline allows that the fastest executor reaches; words if the roofline was beaten."""
        return measure.share(max(self.limits.values()) / self.ours[0])

    @property
    def bound(self) -> str:
        """The limit that counts."""
        return max(self.limits, key=self.limits.get)


class ExpertBenchmark:
    """A layer of E experts, top-K, H × I, in as many copies as `cold` bytes take; `close` ends its threads."""

    def __init__(self, E: int, K: int, H: int, I: int, threads: int = 0, cold: float = 400e6) -> None:
        self.shape, self.threads = (K, H, I), threads or os.cpu_count() or 1
        self.layers = Layers(E, K, H, I, torch.bfloat16, cold)
        self._pool = ThreadPoolExecutor(self.threads)
        with torch_threads(self.threads):
            self._limits = Limits(self.layers, self._pool)

    def close(self) -> None:
        self._pool.shutdown()

    def machine(self, rounds: int) -> DeviceSpec:
        """This machine as a card: the bandwidth and the rate of the two limits."""
        with torch_threads(self.threads), torch.inference_mode():
            bandwidth, rate = self._limits.best(rounds_of(self._limits.arms, rounds + 1, "limits"))
        return DeviceSpec(f"this machine ({self.threads} thread(s))", {
            "memory_bandwidth_gbs": Figure(bandwidth / 1e9, "GB/s", "measured", "reading a layer's weights"),
            "bf16_tflops": Figure(rate / 1e12, "TFLOPS", "measured", "the fastest of large products, bf16 or fp32")})

    def executors(self, T: int, rounds: int) -> ExpertTimes:
        """Every executor on T tokens, in turn, another routing and layer in each round."""
        with torch_threads(self.threads), torch.inference_mode():
            arms, read = self.layers.arms(T, rounds + 1)
            arms = {name: arm for name, arm in arms.items() if name not in LEFT_OUT}
            samples = rounds_of(self._limits.arms | arms, rounds + 1, f"{T} token{'s' * (T > 1)}")
        bandwidth, rate = self._limits.best(samples)
        limits = least_seconds(read / self.layers.expert_bytes, T, *self.shape, 2, bandwidth, rate)
        return ExpertTimes({name: samples[name] for name in arms}, bandwidth, rate, limits)

    def loading(self, batches: Sequence[int], rounds: int, names: Collection[str] = LOADING) -> dict[int, Samples]:
        """Decode steps of each batch with the needed experts' weights, and with all: batch → executor → seconds."""
        found = {}
        with torch_threads(self.threads), torch.inference_mode():
            for b in batches:
                arms, _ = self.layers.arms(b, rounds + 1)
                found[b] = rounds_of({name: arms[name] for name in names}, rounds + 1, f"batch {b}")
        return found


def all_over_selective(found: dict[int, Samples]) -> dict[int, float]:
    """Batch → how many times as long all experts take as only those that are needed, of medians."""
    return {b: median(of["all_experts"]) / median(of["selective"]) for b, of in found.items()}


def crossing(ratios: dict[int, float]) -> int | None:
    """The first batch at which loading all is faster; None where there is none."""
    return next((b for b, ratio in ratios.items() if ratio < 1), None)
