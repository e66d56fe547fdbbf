"""Three exclusive tiers: a GPU's memory, pinned memory of the CPU, and the disk.

An expert's bytes lie in one of the first two at most, so 58 GB of experts run on 24 + 48 GB without
a second copy. Who comes to the GPU leaves its pinned slot; who is evicted there is copied back into
a spare one, while the other comes: a link carries both ways at once. Where the pinned slots are
fewer than the experts that are not on the GPU, the rest is on disk; who leaves for it (by LRFU) costs
nothing, as all bytes are on disk besides. What is read from there is read into a pinned slot and sent on. Experts that are decoded on
their way cannot be taken back as they are stored: those that fit stay in this memory for good.

Why no byte of a slot is overwritten while something reads it, and no reader finds others: a slot is
*spare*, being *filled*, or an expert's *home*. Readers find a slot by its expert only (`slots`), so
nobody begins to read one that is not a home. What the GPU did last with a slot is an event
(`_last`): the end of the latest copy from it, all being on one stream, or of the copy that fills
it. Whoever fills a slot waits for that event: the CPU before it reads from disk, the GPU on its own
stream, and so does the copy to the GPU of what is still being taken back. The event goes with the
slot, not with the expert, so it is waited for whoever had the slot. On the GPU's side the same holds
by `moelab.offloading.link`. Nothing here is safe from other threads: the loader's lock is held, or
nothing is being loaded. Who computes from this memory on the CPU sees to it that nobody is released
or evicted meanwhile."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from moelab.base.progress import progress
from moelab.base.specs import ExpertKey
from moelab.cache.policies import LRFU
from moelab.cache.pools import Candidates
from moelab.offloading.link import Link, pin, shares_addresses
from moelab.offloading.slots import Sizes
from moelab.store.layout import ExpertStore, run
from moelab.store.reader import Chunks, Reader, aligned_buffer


class HostPool(Reader):
    """Experts of a store in the CPU's memory, pinned for a GPU; reads the others.

    store : the experts.
    device : where they are computed.
    count : slots.
    exchanges : whether experts come and go; else those that are read first stay for good.
    options : of `Reader`.

    link : to that GPU, set by who has it.
    slots : those of experts that are here, or on their way.
    spare : slots of nobody.
    home : int64 [L, E], the address of an expert's bytes; 0 where they are not, or have not been
        seen to have come (`landed`).
    pinned : whether the GPU reaches this memory by itself."""

    def __init__(
        self,
        store: ExpertStore,
        device: torch.device,
        count: int,
        exchanges: bool,
        **options: Any,
    ) -> None:
        super().__init__(store, **options)
        self.size = Sizes.of(store, True).full
        self.count = count
        self.device = device
        self.exchanges = exchanges
        self.link: Link | None = None
        self.home = np.zeros((store.spec.L, store.spec.E), np.int64)
        self.slots: dict[ExpertKey, int] = {}
        #: who is being taken back → the event from which on it is at its home
        self.coming: dict[ExpertKey, Any] = {}
        self._policy = LRFU()
        #: whose homes are read by the CPU now, so that nobody else comes there
        self.busy: Set[ExpertKey] = frozenset()
        self._now, self._layer = 0, -1  # a step of the policy is of one layer
        self._allocate()

    def _allocate(self) -> None:
        self._memory: np.ndarray | None = aligned_buffer(self.count * self.size)
        self._unpin = pin(self._memory, self.device, self)
        near = self.device.type != "cuda"
        self.pinned = near or self._unpin and shares_addresses(self.device)
        self.rested()

    def rested(self) -> None:
        """Nothing is under way any more: a slot that is no expert's home is spare."""
        self.landed()
        for key in [*self.coming]:  # the copy was another process's
            self._leave(key)
        self._last: dict[int, Any] = {}  # slot → what the GPU does last with it
        taken = {*self.slots.values()}
        self.spare = deque(slot for slot in range(self.count) if slot not in taken)

    def close(self) -> None:
        """Give back files and memory; nothing may be under way. Memory is had again when it is
        needed."""
        super().close()
        for key in [*self.slots]:
            self._leave(key)
        if self._unpin:
            self._unpin()
        self._memory = None

    # where experts are

    def bytes(self, slot: int) -> np.ndarray:
        """The memory of a slot, uint8."""
        return self._memory[slot * self.size : (slot + 1) * self.size]

    def held(self, layer: int, expert: int) -> Chunks:
        """An expert, whole, that has its home here."""
        return self._chunks(layer, expert, "both", self.bytes(self.slots[layer, expert]))

    def hold(self, keys: Iterable[ExpertKey]) -> None:
        """Read these experts, as many as there are spare slots, into their homes, and check them."""
        keys = [*keys][: len(self.spare)]
        slots = [self.spare.popleft() for _ in keys]
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            read = pool.map(lambda key, at: self.read(*key, "both", self.bytes(at)), keys, slots)
            watched = progress(read, "reading experts", total=len(keys), unit="experts")
            for key, slot, _ in zip(keys, slots, watched):
                self.put(key, slot)

    def read_parts(
        self, layer: int, expert: int, parts: dict[str, np.ndarray | None]
    ) -> list[Chunks]:
        """As of `Reader`; of an expert that has its home here for good nothing is left to read, and
        the buffers stay as they are."""
        if self.exchanges or (layer, expert) not in self.slots:
            return super().read_parts(layer, expert, parts)
        whole = self.held(layer, expert)
        begins = {part: run(whole.entries, part)[0] - whole.offset for part in parts}
        return [
            self._chunks(layer, expert, part, whole.data[max(0, begin) :])
            for part, begin in begins.items()
        ]

    # who comes and goes

    @property
    def room(self) -> bool:
        """Whether there is a slot: a spare one, or one whose expert may go to the disk."""
        return bool(self.spare or Candidates(self.slots, self.busy))

    def take(self) -> int | None:
        """A slot for the CPU to read into, then to `put`, if one can be had; somebody may leave for
        the disk."""
        if self._memory is None:
            self._allocate()
        slot = self._free()
        if (last := self._last.pop(slot, None)) is not None:
            last.synchronize()
        return slot

    def put(self, key: ExpertKey, slot: int, end: Any = None) -> None:
        """A slot that was read into is the home of an expert, unless that has one; a copy reads it,
        until this event."""
        if end is not None:
            self._last[slot] = end
        if key in self.slots:
            self.spare.append(slot)
            return
        self.slots[key], self.home[key] = slot, self.bytes(slot).ctypes.data
        self.touch(key)

    def reads(self, key: ExpertKey, end: Any) -> None:
        """A copy reads this expert's home, until this event."""
        self._last[self.slots[key]] = end
        self.touch(key)

    def release(self, key: ExpertKey) -> None:
        """An expert is on the GPU, or a copy that was announced brings it there: its slot is
        spare."""
        if key in self.slots:
            self.spare.append(self._leave(key))

    def take_back(
        self,
        key: ExpertKey,
        gpu: torch.Tensor,
        after: Any,
        needed: Set[ExpertKey] = frozenset(),
    ) -> Any:
        """Copy an expert, uint8 on the GPU, to a spare slot, or that of one who leaves for the disk
        and is not `needed`, when the event `after` has come. Returns the event of its end; None if
        there is no slot, or the expert is here already: then its bytes on the GPU may be overwritten."""
        if key in self.slots or (slot := self._free(needed)) is None:
            return None
        length = run(self.store.entries(*key), "both")[1]
        events = [after, *([self._last[slot]] if slot in self._last else [])]
        home = torch.from_numpy(self.bytes(slot)[:length])
        self._last[slot] = end = self.link.take_back(gpu[:length], home, events)
        self.slots[key], self.coming[key] = slot, end
        self.touch(key)
        return end

    def landed(self) -> None:
        """Look who of those that were being taken back is at home."""
        for key in [key for key, end in self.coming.items() if end.query()]:
            del self.coming[key]
            self.home[key] = self.bytes(self.slots[key]).ctypes.data

    def touch(self, key: ExpertKey) -> None:
        """An expert was read here, or came."""
        if key in self.slots:
            self._now += key[0] != self._layer
            self._layer = key[0]
            self._policy.touch(key, self._now)

    def _leave(self, key: ExpertKey) -> int:
        """The slot of an expert that is here no more."""
        self.home[key] = 0
        self.coming.pop(key, None)
        self._policy.forget(key)
        return self.slots.pop(key)

    def _free(self, needed: Set[ExpertKey] = frozenset()) -> int | None:
        """A spare slot, or that of one who leaves for the disk; None if all are needed."""
        if self.spare:
            return self.spare.popleft()
        others = Candidates(self.slots, needed | self.busy)
        return self._leave(self._policy.victim(others)) if others else None


def experts_of(store: ExpertStore) -> list[ExpertKey]:
    """A store's experts, the first of each layer first."""
    return [ExpertKey(layer, e) for e in range(store.spec.E) for layer in range(store.spec.L)]
