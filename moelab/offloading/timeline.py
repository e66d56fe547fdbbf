"""The timeline of a real run: `Event`s in a compact table.

A row has 41 bytes, so a thousand tokens of a model with 24 MoE layers take 30 MB and not half a gigabyte of Python
objects. Every thread writes without a lock: one list grows by `append` and is packed by assigning to a slice of it, and
neither can be seen or interrupted halfway.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import takewhile

import numpy as np

from moelab.specs import Event

_ROW = np.dtype([("resource", "i2"), ("kind", "i2"), ("layer", "i4"), ("expert", "i4"), ("start", "f8"),
                 ("end", "f8"), ("bytes", "i8")])
_BATCH = 1 << 14


class Timeline:
    """Events in the order in which they were reported; iterating gives `Event`s."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._packing = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self._all: list[np.ndarray | Event] = []                # tables first, then what is not packed yet

    def add(self, event: Event) -> None:
        self._all.append(event)

    def compact(self) -> None:
        """Pack what is new, if it is much."""
        with self._packing: self._compact()          # one line: see `Pipeline._locked`

    def _compact(self) -> None:
        found = self._all
        end, begin = len(found), sum(1 for _ in takewhile(lambda item: isinstance(item, np.ndarray), found))
        if end - begin >= _BATCH:
            found[begin:end] = [self._pack(found[begin:end])]   # what others have added meanwhile stays behind it

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
                yield from (Event(names[resource], names[kind], *rest) for resource, kind, *rest in item.tolist())
            else:
                yield item
