"""The limits of offloading: what no engine, policy or schedule can beat, to draw beside measurements.

Each limit is a few lines of arithmetic on a model's geometry, a machine's rates and, where it needs one, the routing
that was seen. They are bounds, not predictions: a run below one is counted wrongly. The numbers in the docstrings
(limit 1 …) follow the order in which a token meets them: bytes, hits, stalls, the link, memory.

D is the token demand L·K·B_e: the bytes of the experts that one token visits (`MoESpec.routed_bytes`), B_e the bytes
of one expert (`MoESpec.expert_bytes`). Steps are a list of forwards, each a list of (layer, {expert: tokens}).
Belady's optimum and the other ceilings of caching need the whole trace: `moelab.cache.optimum`. Left out: contention
between disk, decompression and compute for the same memory, which makes real runs slower than every limit here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moelab.specs import DeviceSpec, Event, MoESpec

Steps = Sequence[Sequence[tuple[int, Mapping[int, int]]]]


@dataclass(frozen=True)
class Rates:
    """How fast experts arrive (bytes/s), memory is read (bytes/s) and numbers are multiplied (FLOP/s)."""

    read: float
    memory: float
    flops: float

    @classmethod
    def of(cls, device: DeviceSpec) -> Rates:
        """Of a device card: from its host link if it has one, else its disk; the fastest 16-bit or 32-bit arithmetic.

        Raises
        ------
        ValueError : the card has neither a link nor a disk, or no arithmetic.
        """
        arrival = [device[key] for key in ("link_bandwidth_gbs", "storage_read_gbs") if key in device.figures]
        compute = [device[key] for key in ("bf16_tflops", "fp16_tflops", "fp32_tflops") if key in device.figures]
        if not arrival or not compute:
            raise ValueError(f"{device.name}: the card has no " + ("host link and no disk" if not arrival else "TFLOPS")
                             + "; add the figure with its source, or give Rates(read, memory, flops) yourself")
        return cls(arrival[0] * 1e9, device["memory_bandwidth_gbs"] * 1e9, compute[0] * 1e12)


class TokenBound(NamedTuple):
    """What a token takes at least of reading, of memory traffic and of arithmetic, in seconds."""

    read_s: float
    memory_s: float
    compute_s: float

    @property
    def overlapped_s(self) -> float:
        """No engine is faster: the three at the same time."""
        return max(self)

    @property
    def serial_s(self) -> float:
        """Nothing overlaps: one after another."""
        return sum(self)

    @property
    def bound_by(self) -> str:
        """Which of the three the limit comes from: "read", "memory" or "compute"."""
        return max(zip(self, ("read", "memory", "compute")))[1]


def token_bound(spec: MoESpec, rates: Rates, dense_bytes: float, hit_rate: float = 0.0, fraction: float = 1.0,
                dense_itemsize: float = 2.0) -> TokenBound:
    """Limit 2: TPOT ≥ max(D·f·(1 − h)/BW_read, (B_dense + D)/BW_memory, FLOPs/peak), for a batch of one.

    Parameters
    ----------
    dense_bytes : of all weights that every token uses; not the input embedding, of which it reads one row.
    hit_rate : h, share of the demanded bytes that are in memory.
    fraction : f, bytes read of a stored expert over its bytes in memory; below 1 if it is compressed.
    dense_itemsize : bytes of one of the dense weights; two FLOPs each, attention to past tokens not counted.
    """
    if not 0 <= hit_rate <= 1:
        raise ValueError(f"the hit rate is {hit_rate}; it is a share, from 0 to 1")
    demand = spec.routed_bytes
    flops = 2 * (spec.L * spec.K * spec.expert_params + dense_bytes / dense_itemsize)
    return TokenBound(demand * fraction * (1 - hit_rate) / rates.read, (dense_bytes + demand) / rates.memory,
                      flops / rates.flops)


def lru_cliff(spec: MoESpec) -> int:
    """Limit 3: a global LRU of so many experts or fewer never hits while decoding a single sequence.

    Between two visits to a layer a token demands K experts of each of the L − 1 others, all different, so an LRU of
    (L − 1)·K has replaced everything. At the token demand of L·K experts a whole token fits for the first time.
    """
    return (spec.L - 1) * spec.K


def uniform_hit_rate(spec: MoESpec, experts: int) -> float:
    """Limit 4: what a cache of `experts` experts hits if all are equally likely, whatever its policy: C/(L·E)."""
    return min(experts / (spec.L * spec.E), 1.0)


def overlap_hit_rate(steps: Steps) -> float:
    """Limit 4: with room for one step's experts in each layer, and all of them kept: Σ|S_t ∩ S_t−1| / Σ|S_t|.

    It bounds a policy that keeps whatever it loads. One that may pass experts by can hold popular ones instead and do
    better; Belady's optimum with bypass bounds that one. The first forward has no predecessor and counts as misses.
    """
    before, found, wanted = {}, 0, 0
    for forward in steps:
        for layer, experts in forward:
            found += len(before.get(layer, set()) & set(experts))
            wanted += len(experts)
            before[layer] = set(experts)
    return found / wanted if wanted else 0.0


def stall_floor(miss_probabilities: Iterable[float], latency_s: float, first_bytes: float, read_rate: float) -> float:
    """Limit 5: seconds that a token waits without speculation: Σ_l P(a miss in layer l)·(latency + B_first/BW).

    A layer's router must have run before its reads are known, so the first bytes of a miss arrive behind nothing.

    Parameters
    ----------
    miss_probabilities : [L] that at least one of the layer's experts is missing.
    first_bytes : the fewest that let compute go on; of one expert, if hits have nothing left to do.
    """
    return sum(miss_probabilities) * (latency_s + first_bytes / read_rate)


def prefetch_speedup(utilisation: float) -> float:
    """Limit 6: the most that prefetching can gain, however accurate: 1/u of a run whose disk is busy for the share u.

    A prefetcher moves reads to where the disk is idle. At u = 1 there is nowhere to move them: 1.0, no gain.
    """
    if not 0 < utilisation <= 1:
        raise ValueError(f"the utilisation is {utilisation}; it is a share, above 0 and at most 1")
    return 1 / utilisation


def in_place_pays(cpu_s: float, expert_bytes: float, link_rate: float, gpu_s: float) -> bool:
    """Limit 7: compute where the expert is, if that is sooner than to move it: t_cpu < B_e/BW_link + t_gpu."""
    return cpu_s < expert_bytes / link_rate + gpu_s


def lossless_fraction(exponent_bits: float) -> float:
    """Limit 8: compressed over raw size of bf16 with exponents of so many bits of entropy, coded apart: (8 + H)/16."""
    if not 0 <= exponent_bits <= 8:
        raise ValueError(f"bf16 has 8 exponent bits, so their entropy is 0 to 8 bits, not {exponent_bits}")
    return (8 + exponent_bits) / 16


def kv_bytes(spec: MoESpec, tokens: int, itemsize: float = 2.0) -> int:
    """Bytes of keys and values of `tokens` tokens, all sequences together; for models with ordinary attention."""
    return round(2 * spec.num_layers * spec.kv_heads * spec.head_dim * itemsize * tokens)


def peak_bytes(expert_slots: int, expert_bytes: int, dense_bytes: int, kv: int = 0, workspace: int = 0) -> int:
    """Limit 9: memory at the peak; it must be at most what is available less a reserve."""
    return expert_slots * expert_bytes + dense_bytes + kv + workspace


def bank_amplification(spec: MoESpec) -> float:
    """Limit 10: bytes read over bytes used, decoding one sequence, where a layer's experts are one tensor: E/K."""
    return spec.E / spec.K


class LayerRecord(NamedTuple):
    """What one layer of one forward did: bytes read, and seconds of work of each kind, waiting left out.

    decompress_s sums the work of all workers (decompression and recovery), however it overlapped.
    """

    bytes: int = 0
    other_s: float = 0.0
    expert_s: float = 0.0
    decompress_s: float = 0.0


def layer_records(events: Iterable[Event], forwards: Sequence[tuple]) -> tuple[list[LayerRecord], int]:
    """The records of the decode forwards of a run, and how many such forwards there were.

    forwards : (start, end, tokens, phase), in order of time. An event belongs to the last one that began before it;
    what belongs to no layer (layer −1: embedding, final norm, head) is one record a forward.
    """
    starts = [forward[0] for forward in forwards]
    sums = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    column = {"other": 1, "expert": 2, "decompress": 3, "recover": 3, "decode": 3}
    for event in events:
        at = bisect_right(starts, event.start) - 1
        if at < 0 or forwards[at][3] != "decode":
            continue
        record = sums[at, event.layer]
        if event.kind.startswith("read"):
            record[0] += event.bytes
        elif event.kind in column:
            record[column[event.kind]] += event.end - event.start
    return [LayerRecord(*sums[key]) for key in sorted(sums)], sum(forward[3] == "decode" for forward in forwards)


def on_demand_limit(records: Iterable[LayerRecord], read_rate: float, steps: int = 1, workers: int = 1) -> float:
    """Seconds per decode step of an ideal engine that reads a layer's experts when its router has chosen them.

    Σ over layers of (other + max(read, decompress, expert)): within a layer reading, decompression and expert
    compute overlap perfectly; attention and router come before, because they decide what is read.

    Parameters
    ----------
    records : of all layers of all `steps` forwards, from the run's own bytes and times: `layer_records`.
    read_rate : bytes/s that the disk was measured to deliver.
    workers : decompression threads; their work is shared perfectly.
    """
    if read_rate <= 0 or steps < 1 or workers < 1:
        raise ValueError("the rate must be positive, and steps and workers at least 1: "
                         f"got {read_rate} bytes/s, {steps} steps, {workers} workers")
    return sum(record.other_s + max(record.bytes / read_rate, record.decompress_s / workers, record.expert_s)
               for record in records) / steps
