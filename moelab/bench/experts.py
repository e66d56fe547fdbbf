"""Executors of a layer's routed experts, timed beside transformers' own and the roofline of this machine.

Every lossless executor of the registry and transformers' `eager`, `batched_mm` and `grouped_mm` compute the same steps
in interleaved rounds: a prompt, and single tokens whose experts are cold, as several layers with more weights than any
cache take turns, and neighbours in a round compute other steps. Each runs twice, on two steps, and the second run
counts, when the memory that it allocates is pre-faulted. Rates are of the weights that a step must read; the roofline
is the time that memory or arithmetic alone would take, whichever is longer. Both limits are the best of several readers
and products, in the experts' type and in fp32, in the same rounds (`moelab.bench.measure`). Ratios are medians over
rounds, to the best of transformers' three. CPU only.

Source: AWS Neuron's MoE guide (executors), Williams et al. 2009 (roofline).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.arguments import number, whole
from moelab.bench import measure
from moelab.bench.measure import Samples
from moelab.experts import EXECUTORS
from moelab.experts.gemm import Packed
from moelab.experts.gemv import PlanesGEMV
from moelab.models.seam import seam_class
from moelab.registry import make
from moelab.store import bits

STOCK = ("eager", "batched_mm", "grouped_mm")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
PLANES = "gemv of split planes"
GATHERED = 4e9                  # bytes that `batched_mm` may copy weights to: beyond, it is not run
Arms = dict[str, Callable[[int], Any]]          # name → computes the step of a number


class Layers:
    """Layers of random experts, enough of them for `cold` bytes, as transformers has them and behind the seam."""

    def __init__(self, E: int, K: int, H: int, I: int, dtype: torch.dtype, cold: float) -> None:
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
        self.K, self.expert_bytes, self.dtype = K, 3 * H * I * dtype.itemsize, dtype
        self.config = Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=I, num_experts=E, num_experts_per_tok=K)
        self.config._experts_implementation = "eager"
        self.stock, self.seam = [], []
        for seed in range(max(2, -(-int(cold) // (E * self.expert_bytes)))):
            rng = torch.Generator().manual_seed(seed)
            stock = Qwen3MoeExperts(self.config).to(dtype).requires_grad_(False).eval()
            for bank in stock.parameters():
                bank.normal_(0, bank.shape[-1] ** -0.5, generator=rng)
            seam = copy.copy(stock)                         # the same parameters
            seam.__class__ = seam_class(type(stock))
            seam.source, seam.layer, seam.executor = None, seed, None
            self.stock.append(stock)
            self.seam.append(seam)

    def steps(self, T: int, rounds: int) -> list[tuple[int, Tensor, Tensor, Tensor]]:
        """(layer, x [T, H], ids [T, K], weights [T, K]) of each round; routing is uniform."""
        rng, found = torch.Generator().manual_seed(T), []
        E, H = self.config.num_experts, self.config.hidden_size
        for i in range(rounds):
            ids = torch.rand(T, E, generator=rng).topk(self.K).indices
            weights = torch.rand(T, self.K, generator=rng) + 0.1
            found.append((i % len(self.stock), torch.randn(T, H, generator=rng).to(self.dtype), ids,
                          (weights / weights.sum(-1, keepdim=True)).to(self.dtype)))
        return found

    def arms(self, T: int, rounds: int) -> tuple[Arms, int]:
        """All that compute the steps of T tokens; and the bytes of weights that a step must read, on average.

        Step 0 warms up: with it, weights are packed and kernels compiled.
        """
        steps = self.steps(T, rounds)
        arms: Arms = {}
        for name in STOCK:
            if name != "batched_mm" or T * self.K * self.expert_bytes < GATHERED:
                arms[f"transformers {name}"] = lambda i, name=name: self._stock(name, *steps[i])
        for name in lossless():
            arms[name] = self._arm(make("executor", name), steps)
        if T == 1 and self.dtype == torch.bfloat16:
            planes = [[{name: bits.split(w) for name, w in seam.own(e).items()} for e in range(seam.num_experts)]
                      for seam in self.seam]
            run = PlanesGEMV(lambda layer, e: planes[layer][e])
            arms[PLANES] = lambda i: run(*steps[i][1:], self.seam[steps[i][0]])
        read = fmean(len(ids.unique()) for _, _, ids, _ in steps) * self.expert_bytes
        return arms, int(read)

    def _arm(self, run: Any, steps: list[tuple[int, Tensor, Tensor, Tensor]]) -> Callable[[int], Tensor]:
        def arm(i: int) -> Tensor:
            if i == 0 and isinstance(run, Packed):          # packing, once for all experts, is no part of a step
                E, H = self.config.num_experts, self.config.hidden_size
                for seam in self.seam:
                    run(torch.zeros(E, H, dtype=self.dtype), torch.arange(E)[:, None],
                        torch.ones(E, 1, dtype=self.dtype), seam)
            layer, *step = steps[i]
            return run(*step, self.seam[layer])
        return arm

    def _stock(self, name: str, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.config._experts_implementation = name
        return self.stock[layer](x, ids, weights)


def lossless() -> list[str]:
    """The names of the registry's executors that are lossless and need no plan."""
    found = []
    for name in EXECUTORS:
        with suppress(ValueError):              # it cannot be made without options
            if make("executor", name).lossless:
                found.append(name)
    return found


def rounds_of(arms: Arms, rounds: int, title: str) -> Samples:
    """Seconds of each arm in each round; round 0, step 0, warms up and does not count.

    Arms that follow each other compute different steps, so that none finds its weights in a cache; and each has run
    another step just before, so that it allocates memory that it has had already.
    """
    samples: Samples = {name: [] for name in arms}
    steps = range(1, rounds)
    for i, (place, name) in measure.turns(list(enumerate(arms)), rounds, title):
        if not i:
            arms[name](0)
            continue
        arms[name](steps[(i + place + len(steps) // 2) % len(steps)])
        samples[name].append(measure.seconds(arms[name], steps[(i + place) % len(steps)]))
    return samples


class Limits:
    """Arms that measure memory bandwidth and arithmetic, to be timed in the same rounds as what they bound.

    Readers: two loops, one of which prefetches 4 KB ahead, and torch's sum, all with torch's number of threads.
    Products: a square and the layer's own shape, in the experts' type and in fp32, each `REPEAT` times in a turn.
    """

    REPEAT, SQUARES, ROWS = 2, (1024,), 2048

    def __init__(self, layers: Layers, pool: ThreadPoolExecutor) -> None:
        banks = [stock.gate_up_proj.view(-1).view(torch.int64) for stock in layers.stock]
        self.nbytes, threads = banks[0].nbytes, torch.get_num_threads()

        def reader(loop: Callable[[np.ndarray], int]) -> Callable[[int], Any]:
            def read(i: int) -> None:
                words = banks[i % len(banks)].numpy()
                list(pool.map(loop, [words[len(words) * t // threads:len(words) * (t + 1) // threads]
                                     for t in range(threads)]))
            return read
        self.readers: Arms = {"memory, torch's sum": lambda i: banks[i % len(banks)].sum()}
        self.readers |= {f"memory, {name}": reader(loop) for name, loop in _loops().items()}
        H, I = layers.config.hidden_size, layers.config.moe_intermediate_size
        self.products: Arms = {}
        self.flops: dict[str, float] = {}
        for dtype in dict.fromkeys((layers.dtype, torch.float32)):
            for m, k, n in [(size,) * 3 for size in self.SQUARES] + [(self.ROWS, H, 2 * I)]:
                name = f"product {m} × {k} × {n}, {str(dtype).removeprefix('torch.')}"
                x, w = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
                self.products[name] = lambda _, x=x, w=w: [torch.nn.functional.linear(x, w)
                                                           for _ in range(self.REPEAT)]
                self.flops[name] = self.REPEAT * 2.0 * m * k * n

    @property
    def arms(self) -> Arms:
        return self.readers | self.products

    def best(self, samples: Samples) -> tuple[float, float]:
        """(bytes/s, FLOP/s): the most that any of them reached in any round."""
        return (max(self.nbytes / min(samples[name]) for name in self.readers),
                max(self.flops[name] / min(samples[name]) for name in self.products))


@lru_cache(maxsize=1)
def _loops() -> dict[str, Callable[[np.ndarray], int]]:
    """Two ways of reading int64 words, compiled."""
    from moelab.kernels.tiles import prefetch

    @bits.kernel
    def plain(words):
        result = 0
        for i in range(len(words)):
            result += words[i]
        return result

    @bits.kernel
    def ahead(words):
        a = b = 0
        for i in range(0, len(words) - 15, 16):                 # two cache lines
            prefetch(3, words.ctypes.data + 8 * i + 4096)
            prefetch(3, words.ctypes.data + 8 * i + 4160)
            for j in range(8):
                a += words[i + j]
                b += words[i + 8 + j]
        return a + b
    return {"plain loop": plain, "prefetching loop": ahead}


def table(samples: Samples, read: int, flops: float, bandwidth: float, peak: float) -> dict[str, dict[str, Any]]:
    """A row for each arm, of a step's seconds."""
    medians = {name: median(seconds) for name, seconds in samples.items()}
    best = min((name for name in medians if name.startswith("transformers")), key=medians.get)
    roofline, rows = max(read / bandwidth, flops / peak), {}
    for name, seconds in samples.items():
        low, high = measure.tenths(seconds)
        rows[name] = {"ms": 1e3 * medians[name], "10 %": 1e3 * low, "90 %": 1e3 * high,
                      "× transformers' best": measure.speed_up(samples, name, best), "GB/s": read / medians[name] / 1e9,
                      "of bandwidth": measure.share(read / medians[name] / bandwidth),
                      "GFLOP/s": flops / medians[name] / 1e9, "of roofline": measure.share(roofline / medians[name])}
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for letter, value in (("E", 64), ("K", 8), ("H", 1024), ("I", 512)):
        parser.add_argument(f"--{letter}", type=whole(1), default=value)
    parser.add_argument("--tokens", type=whole(1), default=512, help="of the prompt")
    parser.add_argument("--cold", type=number(above=0), default=400e6, help="bytes of weights that take turns")
    parser.add_argument("--rounds", type=whole(1), default=9,
                        help="of the prompt; single tokens have five times as many")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))


@torch.inference_mode()
def run(E: int = 64, K: int = 8, H: int = 1024, I: int = 512, tokens: int = 512, cold: float = 400e6, rounds: int = 9,
        dtypes: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Sections of figures; what is aimed at, and the samples in seconds, come last."""
    threads = torch.get_num_threads()
    found: dict[str, dict[str, Any]] = {"conditions": {"threads": threads,
                                                       "load average before": measure.load_average()}}
    aims: dict[str, dict[str, Any]] = {}
    every: Samples = {}
    with ThreadPoolExecutor(threads) as pool:
        for label in dtypes or list(DTYPES):
            layers = Layers(E, K, H, I, DTYPES[label], cold)
            limits = Limits(layers, pool)
            for phase, T, n in (("prefill", tokens, rounds), ("decode", 1, 5 * rounds)):
                arms, read = layers.arms(T, n + 1)
                title = f"{label} {phase}, {T} {'token' if T == 1 else 'tokens'}"
                samples = rounds_of(limits.arms | arms, n + 1, title)
                bandwidth, peak = limits.best(samples)
                found["conditions"] |= {f"{title}: memory GB/s": bandwidth / 1e9, f"{title}: GFLOP/s": peak / 1e9}
                own = {name: samples[name] for name in arms}
                found[title] = table(own, read, 6 * T * K * H * I, bandwidth, peak)
                every |= {f"{title}: {name}": seconds for name, seconds in samples.items()}
                aims |= _aims(label, phase, found[title])
    return found | {"aims": aims, "samples": every}


def _aims(label: str, phase: str, rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    own = {name: row for name, row in rows.items() if not name.startswith("transformers") and name != PLANES}
    best = min(own, key=lambda name: own[name]["ms"])
    ratio = own[best]["× transformers' best"]
    if phase == "prefill":
        return {f"{label} prefill, {best} × transformers' best": measure.aim(ratio, 1.0 if label == "bf16" else 1.6)}
    if label != "bf16":
        return {}
    return {f"bf16 decode, {best} × transformers' best": measure.aim(ratio, 1.8),
            f"bf16 decode, {best}: share of memory bandwidth": measure.aim(own[best]["of bandwidth"], 0.8),
            "rate of split planes ÷ bf16 GEMV's": measure.aim(rows["gemv"]["ms"] / rows[PLANES]["ms"], 0.8)}
