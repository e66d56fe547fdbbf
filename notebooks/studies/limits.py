"""The least seconds of a decode step of offloading, which no engine or schedule can beat: what each
layer reads, decompresses and computes, overlapped ideally. A run below is counted wrongly."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from moelab.base.specs import Event


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
