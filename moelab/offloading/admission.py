"""Who has what memory: loads get the slots that they lack, hand them on, and give them back.

Source: ZipMoE §4 (preallocated memory); Speculating Experts Algorithm 1 (experts of the next layer on their way). Three
rules exclude a deadlock. A load takes all the memory that it lacks at once, so what has been admitted can always be
finished. Experts that hold a part already hold what others may wait for: as long as one of them waits, a missed expert
must leave a slot of each kind free. And what is fetched ahead takes at most the slots that were added for it
(`room_ahead`), and gives them back when it turns out not to be wanted.

Left out: threads and locks; everything here is called with the pipeline's lock held.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from queue import SimpleQueue

from moelab.cache.residency import Request
from moelab.offloading.loads import Fetched, Held, Job, Load
from moelab.offloading.slots import Slots
from moelab.specs import ExpertKey, State
from moelab.store.reader import Reader


class Bell:
    """Wakes up to `n` threads that wait for something to do.

    It needs no lock, so whoever rings can be interrupted, or be the garbage collector within one of the threads: a ring
    is a token in a queue, and n of them wake everybody who is not awake.
    """

    def __init__(self, n: int) -> None:
        self._n, self._tokens = n, SimpleQueue()
        self.wait = self._tokens.get

    def ring(self) -> None:
        while self._tokens.qsize() < self._n:
            self._tokens.put(None)


class Admission:
    """What is held, by whom, and what is still wanted.

    Attributes
    ----------
    held : the slots and chunks of every expert that is kept or on its way for the layer that runs.
    fetched : what became of the experts fetched ahead.
    """

    def __init__(self, slots: Slots, reader: Reader, workers: int, room_ahead: int, held: dict[ExpertKey, Held],
                 fetched: Fetched) -> None:
        self.slots, self.reader, self.workers, self.room_ahead = slots, reader, workers, room_ahead
        self.held, self.fetched = held, fetched
        slots.all_but(held.values())
        self._job: Job | None = None
        self._ahead: dict[int, Job] = {}                        # by layer
        self._taken_ahead = 0                                   # experts that hold memory ahead
        self._lock = threading.Lock()                           # over everything here
        self._io, self._work = Bell(1), Bell(workers)

    def _load(self, key: ExpertKey, held: Held, keep: State | None) -> Load:
        return Load(key, held, keep, self.reader.store.layers[key.layer].tensors, self.slots.sizes.in_place,
                    self.reader.verify)

    def _admit(self) -> None:
        """Give loads that wait the memory that they lack, the most urgent first, and wake the threads."""
        free, job, admitted = self.slots.free, self._job, 0
        if job is not None and job.waiting and free["full"]:
            holders = sum(bool(load.held.slots) for load in job.waiting)
            for load in list(job.waiting):
                spare = 0 if load.held.slots else int(holders > 0)
                if all(len(free[kind]) > spare for kind in load.lacks):
                    holders -= bool(load.held.slots)
                    self._give(load)
                    admitted += 1
                if not free["full"]:
                    break
        for ahead in self._ahead.values() if job is None or not job.waiting else ():
            for load in list(ahead.waiting):
                if self._taken_ahead == self.room_ahead or not all(free[kind] for kind in load.lacks):
                    break
                self._give(load)
                self._taken_ahead += 1
                admitted += 1
        if admitted:
            self._io.ring()
            self._work.ring()

    def _give(self, load: Load) -> None:
        load.held.slots.update({kind: self.slots.free[kind].pop() for kind in load.lacks})
        load.admitted = True
        load.job.waiting.remove(load)

    def _release(self, held: Held, kinds: Iterable[str]) -> None:
        for kind in kinds:
            held.chunks.pop(kind, None)
            if kind in held.slots:
                self.slots.free[kind].append(held.slots.pop(kind))

    def _adopt(self, ahead: Job | None, job: Job | None, wanted: dict[ExpertKey, Request]) -> None:
        """Hand what of a layer has been fetched ahead and is wanted over to its job, and drop the rest."""
        for load in [] if ahead is None else [*ahead.done.values(), *ahead.loads.values()]:
            if not load.admitted:
                continue                                        # nothing has been done for it
            request = wanted.get(load.key)
            if request is None:
                self._refuse(load)
                continue
            self.fetched.begun += 1
            self.fetched.used += 1
            self.fetched.early += load.whole
            self._taken_ahead -= 1
            self.held[load.key], load.keep, load.job = load.held, request.keep, job
            job.adopted.add(load.key)
            job.loads[load.key] = load
            if load.error is not None:
                job.fail(load.error)
            elif load.whole:
                self._whole(load)
        if job is not None and ahead is not None:
            job.reads = [(load, kinds) for load, kinds in ahead.reads if load.key in job.adopted]

    def _refuse(self, load: Load) -> None:
        """Nobody wants what has been begun of this."""
        self.fetched.begun += 1
        self.fetched.wasted += load.nbytes
        self._drop(load)

    def _drop(self, load: Load) -> None:
        """Take its memory back from a load that nobody wants, as soon as no thread is at it."""
        load.dropped, load.job = True, None
        if not load.busy:
            self._release(load.held, load.lacks)                # what it held before is not its own
            self._taken_ahead -= 1

    def _whole(self, load: Load) -> None:
        """An expert is whole: keep of its chunks what shall be kept, and let it be computed, or wait for its layer."""
        job = load.job
        del job.loads[load.key]
        if load.keep is None:
            job.done[load.key] = load
            return
        kept = {"e": load.keep.has_e, "sm": load.keep.has_sm}
        self._release(load.held, [kind for kind in kept if not kept[kind]])
        job.ready.put(load.key)

    def _landed(self, load: Load, error: BaseException | None) -> None:
        """A thread is done with what it took up."""
        load.busy -= 1
        job = load.job
        if load.dropped:
            if not load.busy:
                self._drop(load)
                self._admit()
        elif error is not None:
            load.error = error
            load.todo.clear()
            job.reads = [(other, kinds) for other, kinds in job.reads if other is not load]
            if load.keep is not None:
                job.fail(error)
        elif load.whole and load.error is None:
            self._whole(load)
            self._admit()
