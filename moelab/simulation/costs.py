"""What a machine takes for an expert and for everything else, in seconds: all that a simulation
knows of it.

`moelab.simulation.fit` finds it in a run's timeline, `delays_of` in the figures of a device card.
A tensor's exponents lie on disk compressed (E-chunks), its signs and mantissas as one SM-chunk
(ZipMoE §3.2). Experts that are read as they are computed have one chunk, E. Left out: how much
disk, workers and computation slow each other down, except as far as they did where the seconds were
measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from moelab.base.schema import Count, Must, Size
from moelab.base.specs import DeviceSpec, ExpertKey, MoESpec
from moelab.offloading.hybrid import Rates

#: nothing that is measured takes longer
HOUR = 3600.0
Seconds = Annotated[float, Must(lambda s: 0 <= s < HOUR, "seconds, of less than an hour")]
#: seconds as base + per token
Linear = tuple[Seconds, Seconds]
#: figures of what a GPU spends besides, and of all that only a GPU beside slower memory has
SPENT = ("graph_launch_ms", "layer_ms", "step_ms", "host_trip_ms")
BESIDE = {*SPENT, "host_memory_gb", "host_memory_bandwidth_gbs"}
BESIDE |= {f"{part}_reached_ratio" for part in ("memory", "link", "host")}
#: what a card lacks by which experts could arrive
NO_WAY_IN = "host link and no disk (link_bandwidth_gbs, storage_read_gbs)"
#: compressed over raw size of bf16 exponents: 2.65 of 8 bits, the entropy in ZipMoE (Fig. 2)
RHO = 2.65 / 8


@dataclass(frozen=True)
class Delays:
    """Seconds of one expert's parts.

    e_read, sm_read : reading all its E-chunks, all its SM-chunks.
    decompress, recover : all its exponents; joining them with signs and mantissas; in one thread.
    expert_base, expert_token : computing it takes `expert_base + expert_token · tokens`.
    N : tensors of an expert, which are decoded one by one.
    shards : of a tensor's exponents.
    e_bytes, sm_bytes : what the two reads transfer.
    experts_bytes : [L][E] of these two numbers for each expert; the seconds are the mean expert's.
    together : (n, seconds) of one token's n experts in one call, ascending, n above 1; none if each
        is computed by itself.
    send : of both planes over a link to a GPU, which recovers; 0 where there is none.
    """

    e_read: Seconds
    sm_read: Seconds
    decompress: Seconds
    recover: Seconds
    expert_base: Seconds
    expert_token: Seconds
    N: Size = 3
    shards: Size = 1
    e_bytes: Count = 0
    sm_bytes: Count = 0
    experts_bytes: tuple[tuple[tuple[Count, Count], ...], ...] = ()
    together: tuple[tuple[Size, Seconds], ...] = ()
    send: Seconds = 0.0

    def read(self, key: ExpertKey, e: bool, sm: bool) -> tuple[float, int]:
        """(seconds, bytes) of reading an expert's E-chunks, SM-chunks or both, in proportion to its
        own bytes."""
        mean = self.e_bytes, self.sm_bytes
        own = self.experts_bytes[key.layer][key.expert] if self.experts_bytes else mean
        seconds = nbytes = 0
        for wanted, took, n, usual in zip((e, sm), (self.e_read, self.sm_read), own, mean):
            if wanted:
                seconds += took * n / usual if usual else took
                nbytes += n
        return seconds, nbytes

    @property
    def miss_read(self) -> float:
        """Seconds of reading a missed expert."""
        return self.e_read + self.sm_read

    @property
    def decode(self) -> float:
        """Seconds of decompressing and joining an expert, in one thread."""
        return self.decompress + self.recover

    def expert(self, tokens: int) -> float:
        """Seconds that an expert computes for so many tokens."""
        return self.expert_base + self.expert_token * tokens

    def one_token(self, n: int) -> float:
        """Seconds of one token's n experts in one call: on straight lines between one expert's and
        those of `together`, if there are any."""
        alone = self.expert(1)
        return float(np.interp(n, *zip((1, alone), *self.together))) if self.together else n * alone

    def at_once(self, requests: Sequence[Any]) -> float:
        """Seconds of experts that are computed in one call, or, for more tokens than one, one after
        another."""
        if all(request.tokens == 1 for request in requests):
            return self.one_token(len(requests))
        return sum(self.expert(request.tokens) for request in requests)


@dataclass(frozen=True)
class Machine:
    """A machine that is simulated: seconds of an expert's parts, and of all else.

    workers : threads that decode.
    other, head : before each layer's experts, and after the last layer's: (base, per token).
    decide : about a layer's step: (base, per expert that must be loaded); nothing where a GPU runs
        whole tokens alone.
    handover : until threads have woken up, between an expert's last read and its computation, if
        that waits for it.
    predict : of a prediction of a layer's experts.
    far : of an expert that is computed where it lies: (base, per token).
    trip : of a layer's activations there and back.
    """

    delays: Delays
    workers: Size = 1
    other: Linear = (0.0, 0.0)
    head: Linear = (0.0, 0.0)
    decide: Linear = (0.0, 0.0)
    handover: Seconds = 0.0
    predict: Seconds = 0.0
    far: Linear = (0.0, 0.0)
    trip: Seconds = 0.0


@dataclass(frozen=True)
class MachineRates:
    """How fast experts arrive (bytes/s), memory is read (bytes/s) and numbers are multiplied
    (FLOP/s); of a GPU also how fast the CPU beside it reads its own memory, where experts are that
    the link brings, and what is spent besides.

    host : bytes/s; 0 where what computes is the CPU, or nobody knows.
    launch : seconds of a token's graph.
    layer : of a layer's kernels beyond the bytes they read.
    step : of the host's work between two layers, where a layer is decided by it.
    trip : of a layer's activations to the CPU and back.
    """

    read: float
    memory: float
    flops: float
    host: float = 0.0
    launch: float = 0.0
    layer: float = 0.0
    step: float = 0.0
    trip: float = 0.0

    @classmethod
    def of(cls, device: DeviceSpec, reached: int = 1) -> MachineRates:
        """Of a card: its host link if it has one, else its disk; the fastest 16-bit or 32-bit
        arithmetic. ValueError if there is none.

        reached : 1: what is reached of its bandwidths, as far as the card says; 0: all of them, as
            published; 2: what is lacking is lacking twice."""

        def known(name: str) -> float:
            return device.figures[name].value if name in device.figures else 0.0

        def rate(name: str, part: str) -> float:
            return 1e9 * known(name) * (known(f"{part}_reached_ratio") or 1.0) ** reached

        read = rate("link_bandwidth_gbs", "link") or rate("storage_read_gbs", "storage")
        flops = known("bf16_tflops") or known("fp16_tflops") or known("fp32_tflops")
        if not read or not flops:
            raise ValueError(
                f"{device.name}: the card has no "
                + ("TFLOPS (bf16_tflops, fp16_tflops, fp32_tflops)" if read else NO_WAY_IN)
                + "; add the figure with its source"
            )
        return cls(
            read,
            rate("memory_bandwidth_gbs", "memory"),
            1e12 * flops,
            rate("host_memory_bandwidth_gbs", "host"),
            *(1e-3 * known(name) for name in SPENT),
        )

    def beside(self, nbytes: float) -> Rates:
        """What decides between sending an expert of so many bytes and computing it where it lies
        (`moelab.offloading.hybrid`), of one token: weights are read once."""
        return Rates(
            (0.0, 1 / self.read), (nbytes / self.memory, 0.0), (nbytes / self.host, 0.0), self.trip
        )


def delays_of(
    device: DeviceSpec,
    spec: MoESpec,
    rho: float,
    dense_bytes: float,
    decompress_gbs: float | None = None,
) -> tuple[Delays, Linear]:
    """Delays of an expert and seconds of everything else in a layer, from the figures of a device
    card.

    An expert of B bytes is B/2 of signs and mantissas and ρ·B/2 of compressed exponents. Those of a
    device with a link are in memory beside it, and cross it decompressed. Recovery reads and writes B; computing reads the weights once and then multiplies, without overlap, which
    is at most twice too slow.

    rho : compressed over raw size of the exponents: 1 if they are not compressed.
    dense_bytes : of all weights that every token uses, spread evenly over the L layers.
    decompress_gbs : GB/s of exponents that one thread puts out; an assumption to be stated, for a
        card without it.

    Raises ValueError: figures are missing, or the model is not in bf16.
    """
    from moelab.store.codecs import shard_count  # which loads torch

    if spec.dtype != "bfloat16":
        raise ValueError(
            f"{spec.name} is stored in {spec.dtype}; exponents are split off bfloat16 only. "
            "spec.with_dtype('bfloat16') is the same model in bf16"
        )
    rates = MachineRates.of(device)
    if decompress_gbs is None:
        if "decompress_gbs" not in device.figures:
            raise ValueError(
                f"the card of {device.name} doesn't say how fast a thread decompresses; give "
                "decompress_gbs, GB/s of exponents that come out, and state it as an assumption"
            )
        decompress_gbs = device["decompress_gbs"]
    half = spec.expert_bytes / 2
    read, other = delays_in_place(device, spec, rho * half, spec.expert_bytes, dense_bytes)
    N = 3 if spec.gated else 2
    far = "link_bandwidth_gbs" in device.figures
    delays = replace(
        read,
        e_read=0.0 if far else read.e_read,
        sm_read=0.0 if far else half / rates.read,
        send=2 * half / rates.read if far else 0.0,
        decompress=half / (decompress_gbs * 1e9),
        recover=4 * half / rates.memory,
        N=N,
        shards=shard_count(round(half / N)),
        sm_bytes=round(half),
    )
    return delays, other


def delays_in_place(
    device: DeviceSpec, spec: MoESpec, stored: float, computed: float, dense_bytes: float
) -> tuple[Delays, Linear]:
    """The same for experts of `stored` bytes that are read as they are computed, with nothing to
    decode; from `computed` bytes, if that reads others."""
    rates = MachineRates.of(device)
    delays = Delays(
        e_read=stored / rates.read,
        sm_read=0.0,
        decompress=0.0,
        recover=0.0,
        expert_base=computed / rates.memory,
        expert_token=2 * spec.expert_params / rates.flops,
        e_bytes=round(stored),
    )
    dense = dense_bytes / spec.L  # of a layer: read, then multiplied
    return delays, (dense / rates.memory + rates.layer, dense / rates.flops)
