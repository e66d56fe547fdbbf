"""Where all experts fit, they are read when the model is opened, by all threads, straight into
their slots.

The first touch of memory takes longer than reading into it, and any number of threads can do both
at once: so no page is touched before it is read into, and the first prompt finds every expert in
memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from moelab.offloading.decoders import decoder
from moelab.offloading.slots import Slots
from moelab.offloading.threads import alone
from moelab.progress import progress
from moelab.specs import ExpertKey
from moelab.store.reader import Reader

#: threads beyond the cores: they wait for the disk
WAITING = 4


@contextmanager
def filling(
    slots: Slots, reader: Reader
) -> Iterator[Callable[[], dict[ExpertKey, dict[str, int]]]]:
    """Read all experts of a store within the block; what it gives waits for them and says which
    slots they hold.

    No more memory is used than the slots and the store's `scratch`: what threads need besides is
    that of the loads in flight, of which there are none yet.

    Raises, when waited for, what `Reader.read` raises: StoreError or OSError that name file, expert
    and offset."""
    store, sizes, spare = reader.store, slots.sizes, slots.count["e"]
    keys = [
        ExpertKey(layer, expert)
        for layer, of in enumerate(store.layers)
        for expert in range(len(of.experts))
    ]
    held = {key: {"full": slot} for slot, key in enumerate(keys)}
    own = store.scratch + (
        0 if sizes.in_place else sizes.in_flight
    )  # bytes that a thread needs besides
    most = (spare * sizes.in_flight + store.scratch) // own if own else len(keys)
    places: SimpleQueue[tuple[int, Any]] = SimpleQueue()  # to read compressed experts into
    for slot in range(spare):
        places.put((slot, decoder(slots)))

    def load(key: ExpertKey) -> None:
        whole = held[key]["full"]
        if sizes.in_place:
            chunks = reader.read(*key, "both", slots.bytes("full", whole))
            if slots.link is not None:
                slots.land(whole, chunks)
            return
        slot, decode = place = places.get()
        try:
            parts = reader.read_parts(
                *key, {"E": slots.bytes("e", slot), "SM": slots.bytes("sm", slot)}
            )
            for chunks in parts if reader.verify else ():
                reader.check(chunks)
            for name, out in slots.tensors(whole, key.layer).items():
                decode("decode", dict(zip(("e", "sm"), parts)), name, out, whole)
        finally:
            places.put(place)

    pool = ThreadPoolExecutor(
        max(1, min(most, (os.cpu_count() or 1) + WAITING)), "moelab filling", alone
    )
    try:
        loaded = pool.map(load, keys)  # begins at once

        def wait() -> dict[ExpertKey, dict[str, int]]:
            for _ in progress(loaded, "reading experts", total=len(keys), unit="experts"):
                pass
            return held

        yield wait
    finally:
        pool.shutdown(cancel_futures=True)  # what is being read is finished first
