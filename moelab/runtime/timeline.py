"""The timeline of a real run: `Event`s in a compact table, and the forward passes that they belong to.

An event is a row of 41 bytes, so a thousand tokens of a model with 24 MoE layers take 30 MB and not half a
gigabyte of Python objects. Appending is atomic, so every thread of the engine writes to it without a lock.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from moelab.specs import Event

_ROW = np.dtype([("resource", "i2"), ("kind", "i2"), ("layer", "i4"), ("expert", "i4"), ("start", "f8"),
                 ("end", "f8"), ("bytes", "i8")])
_BATCH = 1 << 14


class Timeline:
    """Events in the order in which they were reported; iterating gives `Event`s."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._new: list[Event] = []
        self._old: list[np.ndarray] = []
        self._names: dict[str, int] = {}

    def add(self, event: Event) -> None:
        self._new.append(event)

    def compact(self) -> None:
        """Pack what is new, if it is much; called between forward passes, when no other thread is writing."""
        if len(self._new) >= _BATCH:
            self._old.append(self._pack(self._new))
            self._new = []

    def _pack(self, events: list[Event]) -> np.ndarray:
        number = self._names
        for name in {name for event in events for name in event[:2]}:
            number.setdefault(name, len(number))
        return np.array([(number[e[0]], number[e[1]], *e[2:]) for e in events], _ROW)

    def __len__(self) -> int:
        return sum(map(len, self._old)) + len(self._new)

    def __iter__(self) -> Iterator[Event]:
        names = list(self._names)
        for rows in self._old:
            for resource, kind, *rest in rows.tolist():
                yield Event(names[resource], names[kind], *rest)
        yield from list(self._new)

    def since(self, start: float) -> list[Event]:
        """The events that ended after `start`."""
        return [event for event in self if event.end > start]
