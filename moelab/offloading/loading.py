"""The threads that load experts: they execute what the `LoadQueue` hands out, under one lock.

Source: ZipMoE §3.3 (I/O beside several decompression workers, work-conserving); Speculating Experts
Algorithm 1 (the next layer's experts are loaded while this one's are computed). Each thread takes
the first operation that can be done, this layer's before the next one's, so an order can make a
layer slow, but not wrong and not stuck. A thread reads a whole expert in one request; `DEPTH` of
them keep the disk busy while one that is done waits for a core.

In the timeline the disk serves one read after another, in the order in which they end: so its
events do not overlap, and last as long as it is busy."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from queue import SimpleQueue
from typing import Any

from moelab.base.progress import progress
from moelab.base.specs import Event, ExpertKey, State
from moelab.cache.residency import Request
from moelab.offloading.decoders import OnGPU, on_cpu, recovers
from moelab.offloading.host import Host
from moelab.offloading.load_queue import USES, Load, LoadQueue, Piece, read_name
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.offloading.slots import Slots
from moelab.offloading.threads import alone, step_back
from moelab.offloading.tiers import HostPool, experts_of
from moelab.store.reader import Chunks, Reader

clock = time.perf_counter
DEPTH = 3  # reads at the same time
WAITING = 4  # threads beyond the cores that fill all slots: they wait for the disk
_PART = {"e": "E", "sm": "SM", "full": "both"}


class Bell:
    """Wakes threads that wait for something to do: a ring is a token in a queue. It has no lock, as
    the garbage collector may ring it within one of these threads."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._tokens = SimpleQueue()
        self.wait = self._tokens.get

    def ring(self, n: int | None = None) -> None:
        """Wake n threads, or all."""
        n = self._threads if n is None else min(n, self._threads)
        while self._tokens.qsize() < n:
            self._tokens.put(None)


@dataclass(eq=False)
class Loader:
    """Memory, files and threads around a `LoadQueue`.

    workers, readers : threads that decode, and that read.
    run : is told what happens.
    ready : where the running layer's experts arrive: keys, or an error.
    """

    slots: Slots
    reader: Reader
    workers: int
    run: EngineRun
    readers: int

    def __post_init__(self) -> None:
        self.timeline = self.run.timeline
        self.in_place = self.slots.sizes.in_place
        reader = self.reader
        #: where experts lie that are not on the GPU, if they are computed there as they lie
        self.pool = reader if isinstance(reader, HostPool) and reader.exchanges else None
        if self.pool:
            self.pool.link = self.slots.link
        #: experts that have come to stay (True) or left (False) since the engine last asked
        self.moved: dict[ExpertKey, bool] = {}
        self._checked: set[tuple] = set()  # parts of experts: see `_check_first`
        self._source = "link" if isinstance(reader, Host) and not self.pool else "disk"
        self._served = 0.0  # when the disk has last ended a read
        self._used: dict[str, float] = {}  # thread → seconds for which it has used a core
        self._chunks: dict[tuple[str, int], Chunks] = {}  # what lies in a slot of a kind
        self.start()

    def _new_queue(self) -> LoadQueue:
        store = self.reader.store
        device = self.slots.device
        return LoadQueue(
            self.slots.count,
            self.run.settings.ahead,
            counts=self.run.fetched,
            tensors=lambda key: store.layers[key.layer].tensors,
            shards=lambda load, name: store.entries(*load.key)[name].shards * recovers(device),
            workers=self.workers,
            in_place=self.in_place,
            moved=self._moved,
        )

    def start(self, queue: LoadQueue | None = None) -> None:
        """Begin with nothing in memory, or this queue, and threads of its own."""
        self.queue = queue or self._new_queue()
        self.slots.give_back(self.queue.free, self.queue.held)
        far = self.slots.link and not self.in_place
        self._passing = OnGPU(self.slots) if far else None  # what SM-chunks are announced to
        self._decode = self._passing or partial(on_cpu, self.slots)
        self.ready = SimpleQueue()
        self.closed = False
        #: experts that have left the GPU's slots and are not yet being taken back → slot, event
        self._leaving: dict[ExpertKey, tuple[int, Any]] = {}
        if self.pool:
            self.pool.rested()
        self._lock = threading.Lock()
        workers = 0 if self.in_place else self.workers
        self._disk, self._work = Bell(self.readers), Bell(workers)
        loops = [(self._read_loop, f"disk {i}") for i in range(self.readers)]
        loops += [(self._work_loop, f"worker {i}") for i in range(workers)]
        self.threads = [
            threading.Thread(target=self._run, args=loop, name=f"moelab {loop[1]}", daemon=True)
            for loop in loops
        ]
        for thread in self.threads:
            thread.start()

    def resize(
        self, count: dict[str, int], how: EngineSettings, evicted: Iterable[ExpertKey]
    ) -> None:
        """Have so many slots of each kind, from which these experts leave."""
        self.queue.drop_prefetched()
        self.stop()
        for key in evicted:
            self.queue.leave(key)
        self.slots.count = count
        self.queue.resize(count, how.ahead)
        self.readers = DEPTH
        self.workers = how.workers
        self.start(self.queue)

    # what the thread that runs the model calls

    @contextmanager
    def changing(self) -> Iterator[LoadQueue]:
        """The queue, under the lock; then threads are woken if loads were admitted."""
        with self._lock:
            before = self.queue.admitted
            yield self.queue
            admitted = self.queue.admitted - before
            if self.pool:
                self._send()
                admitted = self.queue.readable
        if admitted:
            self._disk.ring(admitted if self.in_place else None)
            self._work.ring()

    def wait(self) -> ExpertKey:
        """The next expert of the running layer that is loaded; raises what ended loading it."""
        start = clock()
        found = self.ready.get()
        end = clock()
        if isinstance(found, BaseException):
            raise found
        if end - start > 2e-6:
            self.timeline.add(Event("compute", "wait", *found, start, end))
        return found

    @property
    def used(self) -> float:
        """Seconds for which the threads have used a core: to copy what they read, to check, to
        decode."""
        return sum(self._used.values())

    def settle(self) -> None:
        """Let the timeline know how long the GPU took for what was sent, and to recover it."""
        link = self.slots.link
        for (resource, kind, key), begin, end, nbytes in link.landed() if link else ():
            self.timeline.add(Event(resource, kind, *key, begin, end, nbytes))

    @property
    def tiers(self) -> dict[str, int]:
        """Where the experts are, each once: by the place, bytes as they are stored."""
        store = self.reader.store
        near = "gpu" if self.slots.link else "memory"
        found = {near: 0, "pinned": 0, "disk": 0}
        held = self.queue.held
        pinned = getattr(self.reader, "slots", ())
        for key in experts_of(store):
            where = near if "full" in held.get(key, ()) else "pinned" if key in pinned else "disk"
            found[where] += store.stored_bytes(*key, "both")
        return found

    # the end

    def halt(self, error: BaseException | None = None) -> None:
        """Tell the threads to end when they have done what they are at, and a layer that waits for
        them to raise the error; does not wait."""
        self.closed = True
        self._disk.ring()
        self._work.ring()
        self.ready.put(error or RuntimeError("this model's engine was closed while a layer ran"))

    def stop(self) -> None:
        """End the threads; what they are doing is finished first."""
        self.halt()
        for thread in self.threads:
            thread.join()
        if self.slots and self.slots.link:
            self.slots.link.rest()

    def end(self) -> None:
        """Stop, and let go of files and memory. The garbage collector, which runs in any thread, may
        ask one of these to: it tells the others, which end by themselves."""
        self.halt()
        if threading.current_thread() not in self.threads:
            self.stop()
            self.reader.close()
            self.queue.held.clear()
            self._chunks.clear()
            self.slots = self._decode = self._passing = None

    def forked(self) -> None:
        """In a child process there are no threads, and their lock may be taken."""
        self._lock = threading.Lock()
        self.threads = []
        self.halt(
            RuntimeError(
                "the process was forked while this model was loading experts: run it again"
            )
        )

    # what the threads do

    def _run(self, loop: Callable[[str], None], me: str) -> None:
        """The life of a thread. If it ends too early, the layer that waits for it does, too."""
        try:
            loop(me)
        except BaseException as error:
            self.halt(error)

    def _next(self, bell: Bell, find: Callable[[], Any]) -> Any:
        """Wait for something to do; None when the loader is closed."""
        while not self.closed:
            with self._lock:
                found = find()
            if found is not None:
                return found
            bell.wait()
        return None

    def _read_loop(self, me: str) -> None:
        if self.readers > DEPTH:  # what converts what it reads has no team of threads, then
            alone()
        while (found := self._next(self._disk, self._next_read)) is not None:
            self._read(me, *found)
            self._used[me] = time.thread_time()

    def _next_read(self) -> tuple[Load, tuple[str, ...], int | None] | None:
        """What is to be read from the disk: (load, kinds, slot of the pool to read into, if there is
        one)."""
        found = self.queue.next_read(lambda key: not self._near(key))
        if not (found and self.pool):
            return found and (*found, None)
        self._make_way(found[0])
        return *found, self.pool.take()

    def _read(self, me: str, load: Load, kinds: tuple[str, ...], landing: int | None) -> None:
        start = clock()
        chunks = []
        error = None
        pool = self.pool
        try:
            if pool:
                into = {"both": None if landing is None else pool.bytes(landing)}
            else:
                into = {_PART[kind]: self.slots.bytes(kind, load.slots[kind]) for kind in kinds}
            if self._passing and "sm" in kinds:
                self._passing.wait_for(load.slots["sm"])
            elif self._passing and "sm" not in load.reads:  # kept: it goes ahead
                self._passing.announce(load, self._chunks["sm", load.slots["sm"]])
            chunks = self.reader.read_parts(*load.key, into)
            end = clock()
            if self._passing and "sm" in kinds:
                self._passing.announce(load, chunks[-1])
            if self.in_place and self._check_first(*chunks):
                worker = me.replace("disk", "worker")
                self.timeline.add(Event(worker, "check", *load.key, end, clock()))
            if pool:
                what = "link", "send", load.key
                with self._lock:  # nobody waits meanwhile for all that was sent
                    sent = self.slots.send(what, load.slots["full"], *chunks)
        except BaseException as caught:  # whatever it is belongs to the caller of the model
            error = caught
            end = clock()
        nbytes = sum(part.nbytes for part in chunks)
        with self.changing() as queue:
            if landing is not None and not error:
                pool.put(load.key, landing, sent)
            elif landing is not None:
                pool.spare.append(landing)
            elif not (pool or error):
                self._chunks |= zip(((kind, load.slots[kind]) for kind in kinds), chunks)
            if nbytes:
                begin = max(start, self._served)
                self._served = max(end, self._served)
                name = "warm" if load.warm else read_name(kinds)  # a warm one, no token needs
                self.timeline.add(Event(self._source, name, *load.key, begin, self._served, nbytes))
            queue.read_done(load, kinds, nbytes, error)
        if not self.in_place:
            self._work.ring()

    def _check_first(self, part: Chunks, tensor: str | None = None) -> bool:
        """Compare the checksums of a part of an expert, or of one tensor's in it, when it is read
        for the first time: a pass over memory at each read would take as long as computing. Returns
        whether it did; StoreError for damage."""
        what = part.layer, part.expert, part.part, tensor
        if not self.reader.verify or what in self._checked:
            return False
        self.reader.check(part, tensor)
        self._checked.add(what)
        return True

    # a GPU's slots, and the pool of what is not there

    def _near(self, key: ExpertKey) -> bool:
        """Whether an expert need not be read from the disk."""
        pool = self.pool
        return pool and (key in pool.slots or key in self._leaving and pool.room)

    def _send(self) -> None:
        """All that is in pinned memory is sent: it may be computed as soon as the GPU has been told
        so. Who makes room for it is taken back."""
        pool = self.pool
        while found := self.queue.next_read(self._near):
            load, kinds = found
            self._make_way(load)
            self.queue.read_done(load, kinds, self.send(load.key, load.slots["full"]))
        for key in [*self._leaving][: len(pool.spare)]:
            self._take_back(key)

    def send(self, key: ExpertKey, slot: int) -> int:
        """Copy an expert from pinned memory to a slot, behind what was sent before and when it has come
        back itself; returns its bytes. The lock is held."""
        pool = self.pool
        chunks = pool.held(*key)
        pool.reads(key, self.slots.send(("link", "read", key), slot, chunks, pool.coming.get(key)))
        return chunks.nbytes

    @property
    def leaving(self) -> dict[ExpertKey, int]:
        """Experts that have left a slot, and lie there as long as nobody has taken them back."""
        return {key: slot for key, (slot, _) in self._leaving.items()}

    def writable(self, n: int) -> list[int]:
        """As many free slots, those that have been free longest, if there are so many, which what this
        thread tells the GPU from now on may write into. The lock is held."""
        found = self.free_slots[:n]
        for slot in found:
            self.slots.link.overwrite(slot)
        return found

    @property
    def free_slots(self) -> list[int]:
        """Free slots of the GPU whose last expert has been copied back, the longest free first."""
        leaving = {*self.leaving.values()}
        return [slot for slot in self.queue.free["full"] if slot not in leaving]

    def _moved(self, key: ExpertKey, slot: int, stays: bool) -> None:
        """An expert has come to stay where it is computed, or leaves."""
        self.moved[key] = stays
        pool = self.pool
        link = self.slots.link
        if stays and pool:
            pool.release(key)
        elif not stays and link:
            done = link.leave(slot)
            if pool and key not in pool.slots:
                self._leaving[key] = slot, done

    def _make_way(self, load: Load) -> None:
        """A load's slot is going to be written: who has left it is taken back first, and the expert
        itself, if it has just left another. Nobody who is needed now leaves for the disk."""
        if load.key in self._leaving:
            self._take_back(load.key)
        for key, (slot, _) in [*self._leaving.items()]:
            if slot == load.slots["full"]:
                self._take_back(key, {load.key, *self.queue.demanded})

    def _take_back(self, key: ExpertKey, needed: Set[ExpertKey] = frozenset()) -> None:
        """Begin to copy an expert that has left its slot to the pool."""
        slot, done = self._leaving.pop(key)
        if end := self.pool.take_back(key, self.slots.full(slot), done, needed):
            self.slots.link.leave_after(slot, end)

    def bring_home(self, keys: Iterable[ExpertKey]) -> None:
        """Wait until the CPU can read these experts where they lie, if they are being taken back."""
        with self._lock:
            for key in keys:
                if key in self._leaving:
                    self._take_back(key)
                if end := self.pool.coming.get(key):
                    end.synchronize()
            self.pool.landed()

    def _next_decode(self) -> tuple[Load, Piece, str, dict[str, Chunks]] | None:
        """The queue's, and the chunks that it uses: of a dropped load they may soon be
        another's."""
        if (found := self.queue.next_decode()) is None:
            return None
        load, _, operation = found
        return *found, {kind: self._chunks[kind, load.slots[kind]] for kind in USES[operation]}

    def _work_loop(self, me: str) -> None:
        step_back()
        while (found := self._next(self._work, self._next_decode)) is not None:
            load, piece, operation, chunks = found
            start = clock()
            error = None
            try:
                # not when it is read: decoding finds it cached; of a tensor in shards by the first
                for part in chunks.values() if not piece.shard else ():
                    self._check_first(part, piece.tensor)
                self._decode(operation, chunks, piece, load)
                self.timeline.add(Event(me, operation, *load.key, start, clock()))
            except BaseException as caught:
                error = caught
            self._used[me] = time.thread_time()
            with self.changing() as queue:
                queue.decode_done(load, piece, operation, error)


def threads_to_fill(slots: Slots, scratch: int) -> int:
    """Threads that read all experts into these slots, and as many that decode them; each reads with
    `scratch` bytes of its own.

    The first touch of memory takes longer than reading into it, and any number of threads can do
    both at once. No more memory is used than the slots and what `DEPTH` threads read with: what
    others need is that of the loads in flight, of which there are none yet."""
    sizes = slots.sizes
    threads = (os.cpu_count() or 1) + WAITING
    own = scratch + (0 if sizes.in_place else sizes.in_flight)  # bytes that a thread needs
    room = slots.count["e"] * sizes.in_flight + scratch
    return max(1, min(threads, room // own)) if own else threads


def fill(loader: Loader, keys: Iterable[ExpertKey]) -> None:
    """Read these experts, to stay. Raises what `Reader.read` raises: StoreError or OSError that
    name file, expert and offset."""
    layers = [
        [Request(key, 1, State.MISSED, State.FULL) for key in of]
        for _, of in groupby(sorted(keys), attrgetter("layer"))
    ]
    asked = progress(layers, "reading experts", unit="layers")
    for requests, before in zip(asked, [[], *layers]):
        with loader.changing() as queue:
            queue.begin(requests[0].key.layer, requests, [], loader.ready.put)
        for _ in before:  # while this layer is read
            loader.wait()
    for _ in layers[-1]:
        loader.wait()
    if loader.slots.link:
        loader.slots.link.rest()
