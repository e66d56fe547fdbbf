"""Limits of offloading, which no engine, policy or schedule can beat: a run below one is counted
wrongly.

The ceilings of caching that need the whole trace are in `moelab.cache.optimum`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from moelab.specs import DeviceSpec, Event, MoESpec


def lru_cliff(spec: MoESpec) -> int:
    """A global LRU of so many experts or fewer never hits while decoding a single sequence: between
    two visits to a layer a token demands K different experts of each of the L − 1 others."""
    return (spec.L - 1) * spec.K


def uniform_hit_rate(spec: MoESpec, experts: int) -> float:
    """What a cache of `experts` experts hits if all are equally likely, whatever its policy:
    C/(L·E)."""
    return min(experts / (spec.L * spec.E), 1.0)


def kv_bytes(spec: MoESpec, tokens: int, itemsize: float = 2.0) -> int:
    """Bytes of keys and values of `tokens` tokens, all sequences together; for models with ordinary
    attention."""
    return round(2 * spec.num_layers * spec.kv_heads * spec.head_dim * itemsize * tokens)


class LayerRecord(NamedTuple):
    """What one layer of one forward did: bytes read, and seconds of work of each kind without
    waiting; decompress_s sums the decompression and recovery of all workers."""

    bytes: int = 0
    other_s: float = 0.0
    expert_s: float = 0.0
    decompress_s: float = 0.0


def layer_records(
    events: Iterable[Event], forwards: Sequence[tuple]
) -> tuple[list[LayerRecord], int]:
    """The records of the decode forwards of a run, and how many such forwards there were.

    forwards : (start, end, tokens, phase), in order of time. An event belongs to the last one that
    began before it. What belongs to no layer (layer −1: embedding, final norm, head) is one record
    a forward."""
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
    return [LayerRecord(*sums[key]) for key in sorted(sums)], sum(
        forward[3] == "decode" for forward in forwards
    )


def on_demand_limit(
    records: Iterable[LayerRecord], read_rate: float, steps: int = 1, workers: int = 1
) -> float:
    """Seconds per decode step of an ideal engine that reads a layer's experts when its router has
    chosen them: Σ over layers of (other + max(read, decompress, expert)).

    records : of all layers of all `steps` forwards: `layer_records`.
    read_rate : bytes/s that the disk was measured to deliver.
    """
    if read_rate <= 0 or steps < 1 or workers < 1:
        raise ValueError(
            "the rate must be positive, and steps and workers at least 1: "
            f"got {read_rate} bytes/s, {steps} steps, {workers} workers"
        )
    return (
        sum(
            record.other_s
            + max(record.bytes / read_rate, record.decompress_s / workers, record.expert_s)
            for record in records
        )
        / steps
    )


def overlapped_limit(
    records: Iterable[LayerRecord], read_rate: float, steps: int = 1, workers: int = 1
) -> float:
    """Seconds per decode step of an ideal engine that knows all experts beforehand: reading,
    decompression and computing overlap wholly, and the longest of them remains. Arguments as of
    `on_demand_limit`, which is no less."""
    records = list(records)
    return (
        max(
            sum(record.bytes for record in records) / read_rate,
            sum(record.decompress_s for record in records) / workers,
            sum(record.other_s + record.expert_s for record in records),
        )
        / steps
    )


@dataclass(frozen=True)
class MachineRates:
    """How fast experts arrive (bytes/s), memory is read (bytes/s) and numbers are multiplied
    (FLOP/s)."""

    read: float
    memory: float
    flops: float

    @classmethod
    def of(cls, device: DeviceSpec) -> MachineRates:
        """Of a card: its host link if it has one, else its disk; the fastest 16-bit or 32-bit
        arithmetic. ValueError if there is none."""
        arrival = [
            device[key]
            for key in ("link_bandwidth_gbs", "storage_read_gbs")
            if key in device.figures
        ]
        compute = [
            device[key]
            for key in ("bf16_tflops", "fp16_tflops", "fp32_tflops")
            if key in device.figures
        ]
        if not arrival or not compute:
            lacks = (
                "host link and no disk (link_bandwidth_gbs, storage_read_gbs)"
                if not arrival
                else "TFLOPS (fp32_tflops, …)"
            )
            raise ValueError(
                f"{device.name}: the card has no {lacks}; add the figure with its source"
            )
        return cls(arrival[0] * 1e9, device["memory_bandwidth_gbs"] * 1e9, compute[0] * 1e12)
