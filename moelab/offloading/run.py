"""What an offloaded model did: written by the engine, read by the metrics, replayed by the
simulator.

An event is packed into 36 bytes, so a thousand tokens of a model with 24 MoE layers take 25 MB and
not half a gigabyte of Python objects."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from statistics import fmean
from typing import Any

from moelab.base.specs import Event, ExpertKey, MoESpec
from moelab.cache.pools import Pools
from moelab.cache.residency import CacheCounters, Residency
from moelab.offloading import perfetto
from moelab.offloading.hybrid import Rates
from moelab.offloading.load_queue import PrefetchCounts
from moelab.offloading.metrics import Forward, Metrics, metrics
from moelab.store.layout import ExpertStore

#: an event's row: numbers of its resource and kind, layer, expert, start, end, bytes
_ROW = struct.Struct("<hhiiddq")
#: what a run has of each forward pass
PER_FORWARD = "forwards", "steps", "predictions", "rates"
#: [L][E] of bytes that are read of an expert: of its E-chunks, of its SM-chunks
ExpertsBytes = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is set up: with the steps of a run, all that a simulation of it needs.

    pools, policy, scope : of its `Residency`.
    staging, ahead : loads in flight beyond what is kept, and of those prefetched.
    experts_bytes : of its store; () for a resident model.
    dense_bytes : of all weights but the routed experts.
    scheduler : what orders its reads and decoding.
    device : where experts are computed.
    first : those that are there before the first token,
        beside what a cache with room for all has.
    spare : slots of the pool that are free when a GPU begins a token alone.
    """

    spec: MoESpec
    pools: Pools
    policy: Any
    scope: str
    workers: int
    staging: int
    ahead: int
    experts_bytes: ExpertsBytes
    dense_bytes: int
    scheduler: Any = "default"
    device: str = "cpu"
    first: tuple[ExpertKey, ...] = ()
    spare: int = 0

    @property
    def mean_bytes(self) -> tuple[float, float]:
        """Of an expert's two reads; of a resident model's, all is in the first."""
        pairs = [pair for layer in self.experts_bytes for pair in layer]
        e, sm = zip(*pairs or [(self.spec.expert_bytes, 0)])
        return fmean(e), fmean(sm)


def experts_bytes(store: ExpertStore) -> ExpertsBytes:
    """What is read of each expert of a store, exact: experts compress differently."""
    spec = store.spec
    return tuple(
        tuple(tuple(store.stored_bytes(i, e, part) for part in ("E", "SM")) for e in range(spec.E))
        for i in range(spec.L)
    )


class Timeline:
    """Events in the order in which they were reported; iterating gives `Event`s.

    Every thread writes without a lock: rows only ever grow by one `extend`, and a new name's number
    is drawn and kept by one call, which no other thread can interrupt."""

    def __init__(self) -> None:
        self._rows, self._numbers = bytearray(), defaultdict(count().__next__)

    def clear(self) -> None:
        self._rows = bytearray()

    def add(self, event: Event) -> None:
        resource, kind, *rest = event
        numbers = self._numbers
        self._rows.extend(_ROW.pack(numbers[resource], numbers[kind], *rest))

    def __len__(self) -> int:
        return len(self._rows) // _ROW.size

    def __iter__(self) -> Iterator[Event]:
        return self.since(0)

    def since(self, n: int) -> Iterator[Event]:
        """Those that were reported after the first n."""
        rows = bytes(self._rows[n * _ROW.size :])
        names = list(self._numbers)
        for resource, kind, *rest in _ROW.iter_unpack(rows):
            yield Event(names[resource], names[kind], *rest)


class Recorded:
    """What a run was: its events, forward passes, and counts of its cache and of prefetching."""

    kind = "measured"
    events: Iterable[Event]
    forwards: list[Forward]
    counters: CacheCounters
    fetched: PrefetchCounts

    def metrics(self, **process: int | None) -> Metrics:
        """TTFT, TPOT, hit rates, bytes …, a real run's and a simulated one's by the same
        definitions: see `moelab.offloading.metrics`."""
        counts = self.counters, asdict(self.fetched)
        return metrics(list(self.events), self.forwards, *counts, **process)

    def to_perfetto(self, path: str | Path) -> Path:
        """Write the timeline as a file for https://ui.perfetto.dev: see
        `moelab.offloading.perfetto`."""
        return perfetto.save(path, self.events, self.forwards, self.kind)


class EngineRun(Recorded):
    """Everything since the last `reset`.

    steps : what each forward routed: a list of (layer, {expert: tokens}).
    predictions : what was announced in each forward for prefetching: a list of (layer, experts).
    rates : what decided in each forward which experts are computed where they lie; None without
        `hybrid`.
    fetched : what became of prefetched experts.
    set_up : (forward pass, settings from it on): those that it began with, then each to which its
        memory was resized; `settings` are the last.
    """

    def __init__(self, settings: EngineSettings, residency: Residency) -> None:
        self.set_up = [(0, settings)]
        self._residency = residency
        self.events = self.timeline = Timeline()
        self.fetched = PrefetchCounts()
        self.reset()

    def __repr__(self) -> str:
        return (
            f"<EngineRun of {self.settings.spec.name}: {len(self.forwards)} forward passes, "
            f"{len(self.timeline)} events>"
        )

    @property
    def settings(self) -> EngineSettings:
        return self.set_up[-1][1]

    @property
    def counters(self) -> CacheCounters:
        return self._residency.counters

    def since(self, forward: int = 0) -> EngineRun:
        """What has happened from this forward pass on, which stays as it is while the model goes
        on; its counters are of the whole run."""
        made = EngineRun(self.settings, copy(self._residency))
        made._residency.counters, made.fetched = deepcopy(self.counters), copy(self.fetched)
        made.set_up = [(max(0, at - forward), of) for at, of in self.set_up]
        for name in PER_FORWARD:
            setattr(made, name, getattr(self, name)[forward:])
        begin = made.forwards[0].start if made.forwards else float("inf")
        for event in self.timeline:
            if event.end > begin:
                made.timeline.add(event)
        return made

    def reset(self) -> None:
        self.timeline.clear()
        self._residency.reset_counters()
        self.fetched.reset()
        self.forwards: list[Forward] = []
        self.steps: list[list[tuple[int, dict[int, int]]]] = []
        self.predictions: list[list[tuple[int, list[int]]]] = []
        self.rates: list[Rates | None] = []
        self.set_up = [(0, self.settings)]
        self.begin_forward()

    def forget(self, forwards: int) -> None:
        """Forget the oldest forward passes, but for their events and counts."""
        for name in PER_FORWARD:
            del getattr(self, name)[:forwards]

    def begin_forward(self) -> None:
        """What was noted since the last forward pass is of none: of one that was interrupted, or
        of a part of the model that was called by itself."""
        self._steps: list[tuple[int, dict[int, int]]] = []
        self._predictions: list[tuple[int, list[int]]] = []
        #: what decides in the forward pass that begins
        self.rating: Rates | None = None

    def end_forward(self, forward: Forward) -> None:
        self.forwards.append(forward)
        self.steps.append(self._steps)
        self.predictions.append(self._predictions)
        self.rates.append(self.rating)
        self.begin_forward()

    def accepted(self, right: int) -> None:
        """Of the drafts of the latest forward pass, so many were right."""
        self.forwards[-1] = self.forwards[-1]._replace(right=right)

    def layer(self, layer: int, tokens: dict[int, int]) -> None:
        """A layer runs."""
        self._steps.append((layer, tokens))

    def predicted(self, layer: int, experts: list[int]) -> None:
        """Experts are announced for a layer to come."""
        self._predictions.append((layer, experts))
