"""What an offloaded model did: written by the engine, read by the metrics, replayed by the
simulator.

Events are packed into a table whose rows have 41 bytes, so a thousand tokens of a model with 24 MoE
layers take 30 MB and not half a gigabyte of Python objects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from copy import copy, deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from moelab.cache.pools import Pools
from moelab.cache.residency import CacheCounters, Residency
from moelab.offloading import perfetto
from moelab.offloading.load_queue import PrefetchCounts
from moelab.offloading.metrics import Forward
from moelab.specs import Event, MoESpec
from moelab.store.layout import ExpertStore

_ROW = np.dtype(
    [
        ("resource", "i2"),
        ("kind", "i2"),
        ("layer", "i4"),
        ("expert", "i4"),
        ("start", "f8"),
        ("end", "f8"),
        ("bytes", "i8"),
    ]
)
_BATCH = 1 << 14
#: [L][E] of bytes that are read of an expert: of its E-chunks, of its SM-chunks
ExpertsBytes = tuple[tuple[tuple[int, int], ...], ...]


@dataclass(frozen=True)
class EngineSettings:
    """How an engine is set up: with the steps of a run, all that a simulation of it needs.

    pools, policy, scope, margin : of its `Residency`.
    staging, ahead : loads in flight beyond what is kept, and of those prefetched.
    experts_bytes : of its store; () for a resident model.
    dense_bytes : of all weights but the routed experts.
    scheduler : what orders its reads and decoding.
    device : where experts are computed.
    """

    spec: MoESpec
    pools: Pools
    policy: Any
    scope: str
    margin: float | None
    workers: int
    staging: int
    ahead: int
    experts_bytes: ExpertsBytes
    dense_bytes: int
    scheduler: Any = "default"
    device: str = "cpu"

    @property
    def mean_bytes(self) -> tuple[float, float]:
        """Of an expert's two reads; of a resident model's, all is in the first."""
        pairs = [pair for layer in self.experts_bytes for pair in layer]
        e, sm = zip(*pairs or [(self.spec.expert_bytes, 0)])
        return fmean(e), fmean(sm)


def experts_bytes(store: ExpertStore) -> ExpertsBytes:
    """What is read of each expert of a store, exact: experts compress differently."""
    return tuple(
        tuple(
            (store.stored_bytes(i, expert, "E"), store.stored_bytes(i, expert, "SM"))
            for expert in range(len(layer.experts))
        )
        for i, layer in enumerate(store.layers)
    )


class Timeline:
    """Events in the order in which they were reported; iterating gives `Event`s.

    Every thread writes without a lock: one list grows by `append` and is packed by assigning to a
    slice of it, by the one thread that runs the model, and neither can be seen halfway."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self.clear()

    def clear(self) -> None:
        self._all: list[np.ndarray | Event] = []
        self._tables = 0  # at the head of the list; what follows is not packed yet

    def add(self, event: Event) -> None:
        self._all.append(event)

    def compact(self) -> None:
        """Pack the events of the latest forward passes, once there are enough."""
        begin, end = self._tables, len(self._all)  # what others add meanwhile stays behind
        if end - begin >= _BATCH:
            self._all[begin:end] = [self._pack(self._all[begin:end])]
            self._tables += 1

    def _pack(self, events: list[Event]) -> np.ndarray:
        number = self._names
        for name in {name for event in events for name in event[:2]}:
            number.setdefault(name, len(number))
        return np.array([(number[e[0]], number[e[1]], *e[2:]) for e in events], _ROW)

    def __len__(self) -> int:
        return sum(len(item) if isinstance(item, np.ndarray) else 1 for item in list(self._all))

    def __iter__(self) -> Iterator[Event]:
        found, names = list(self._all), list(self._names)
        for item in found:
            if isinstance(item, np.ndarray):
                yield from (
                    Event(names[resource], names[kind], *rest)
                    for resource, kind, *rest in item.tolist()
                )
            else:
                yield item


class EngineRun:
    """Everything since the last `reset`.

    steps : what each forward routed: a list of (layer, {expert: tokens}).
    predictions : what was announced in each forward for prefetching: a list of (layer, experts).
    fetched : what became of prefetched experts.
    """

    def __init__(self, settings: EngineSettings, residency: Residency) -> None:
        self.settings, self._residency = settings, residency
        self.timeline, self.fetched = Timeline(), PrefetchCounts()
        self.reset()

    def __repr__(self) -> str:
        return (
            f"<EngineRun of {self.settings.spec.name}: {len(self.forwards)} forward passes, "
            f"{len(self.timeline)} events>"
        )

    @property
    def counters(self) -> CacheCounters:
        return self._residency.counters

    def to_perfetto(self, path: str | Path) -> Path:
        """Write the timeline as a file for https://ui.perfetto.dev: see
        `moelab.offloading.perfetto`."""
        return perfetto.save(path, self.timeline, self.forwards, "measured")

    def since(self, forward: int = 0) -> EngineRun:
        """What has happened from this forward pass on, which stays as it is while the model goes
        on; its counters are of the whole run."""
        made = EngineRun(self.settings, copy(self._residency))
        made._residency.counters, made.fetched = deepcopy(self.counters), copy(self.fetched)
        done = len(self.forwards)
        made.forwards = self.forwards[forward:done]
        made.steps, made.predictions = self.steps[forward:done], self.predictions[forward:done]
        begin = made.forwards[0].start if made.forwards else float("inf")
        made.timeline._all = [event for event in self.timeline if event.end > begin]
        return made

    def reset(self) -> None:
        self.timeline.clear()
        self._residency.reset_counters()
        self.fetched.reset()
        self.forwards: list[Forward] = []
        self.steps: list[list[tuple[int, dict[int, int]]]] = []
        self.predictions: list[list[tuple[int, list[int]]]] = []

    def forget(self, forwards: int) -> None:
        """Forget the oldest forward passes, but for their events and counts."""
        for kept in (self.forwards, self.steps, self.predictions):
            del kept[:forwards]

    def begin_forward(self) -> None:
        """Also removes what an interrupted forward has left."""
        del self.steps[len(self.forwards) :], self.predictions[len(self.forwards) :]
        self.steps.append([])
        self.predictions.append([])

    def end_forward(self, forward: Forward) -> None:
        self.forwards.append(forward)
        self.timeline.compact()

    @property
    def _in_forward(self) -> bool:
        return len(self.steps) > len(self.forwards)

    def layer(self, layer: int, tokens: dict[int, int]) -> None:
        """A layer runs; ignored outside a forward pass, where a part of the model was called by
        itself."""
        if self._in_forward:
            self.steps[-1].append((layer, tokens))

    def predicted(self, layer: int, experts: Iterable[int]) -> None:
        """Experts are announced for a layer to come."""
        if self._in_forward:
            self.predictions[-1].append((layer, list(experts)))
