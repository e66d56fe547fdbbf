"""Limits of offloading, which no engine, cache or schedule can beat: a run below one is counted
wrongly.

Most hits of any cache on a recorded run: keeping an expert from one use to the next is an interval
over the gaps between steps, so the most hits are the most intervals of which no more than C
overlap. Giving up the one that ends last whenever C + 1 overlap is optimal: Belady's rule (1966),
with bypass, since what is given up may be the newcomer. Steps are [(layer, {expert: tokens}), …] in
the order of the run, capacity is experts in memory. All are exact counts, from an empty cache; for
pools of each layer, ask layer by layer.

Least seconds of a decode step: what each layer reads, decompresses and computes, overlapped ideally."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from moelab.base.specs import Event, ExpertKey
from moelab.trace import RoutingTrace

Steps = Sequence[tuple[int, Mapping[int, int]]]


def steps(trace: RoutingTrace) -> list[tuple[int, int, dict[int, int]]]:
    """(row of the trace, layer, {expert: 1}), token by token, prompt after prompt; no prefill."""
    ids = trace.ids.tolist()
    E = trace.spec.E
    return [
        (row, layer, dict.fromkeys((e for e in chosen if e != E), 1))
        for row in trace.sequence.long().argsort(stable=True).tolist()
        for layer, chosen in enumerate(ids[row])
        if chosen[0] != E
    ]


def request_count(steps: Steps) -> int:
    """Experts that the steps request; hits divided by this is a hit rate."""
    return sum(len(tokens) for _, tokens in steps)


def belady_hits(steps: Steps, capacity: int) -> int:
    """The most hits that any replacement decisions reach, bypass allowed."""
    if capacity < 0:
        raise ValueError(f"the capacity is {capacity} experts; it must be 0 or more")
    following: list[
        dict[ExpertKey, int]
    ] = []  # expert → the next step that uses it; last step first
    upcoming: dict[ExpertKey, int] = {}
    for number, (layer, tokens) in reversed(list(enumerate(steps))):
        keys = [ExpertKey(layer, expert) for expert in tokens]
        following.append({key: upcoming[key] for key in keys if key in upcoming})
        upcoming.update(dict.fromkeys(keys, number))
    hits = 0
    kept: dict[ExpertKey, int] = {}  # kept expert → its next use
    furthest: list[tuple[int, ExpertKey]] = []  # the same as a heap; past uses lie at its bottom
    for (layer, tokens), nexts in zip(steps, reversed(following)):
        hits += sum(kept.pop(ExpertKey(layer, expert), None) is not None for expert in tokens)
        for key, use in nexts.items():
            kept[key] = use
            heapq.heappush(furthest, (-use, key))
        while len(kept) > capacity:
            del kept[heapq.heappop(furthest)[1]]
    return hits


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
