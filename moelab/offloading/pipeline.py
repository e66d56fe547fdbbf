"""The I/O threads and the decode workers: they execute what the `LoadQueue` hands out, under one lock.

Source: ZipMoE §3.3 (one I/O thread, several decompression workers, work-conserving); Speculating Experts Algorithm 1
(the next layer's experts are loaded while this one's are computed). Each thread takes the first operation that can be
done, this layer's before the next one's, so an order can make a layer slow, but not wrong and not stuck.

What the running layer demands is read `DEPTH` experts at a time, so that the disk has the next request when it has
served one, even where the thread that waited for it waits for a core. They are done in the order in which they began:
so the order in which experts are summed up is no matter of chance. A prefetch is read alone. To the timeline, the disk
serves the request that ends first before the other: so its events do not overlap, and last as long as it is busy.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import torch

from moelab.offloading.decoders import decoder
from moelab.offloading.run import Timeline
from moelab.offloading.slots import Slots
from moelab.schedule.load_queue import PIECE, USES, Load, LoadQueue, Phase, PrefetchCounts, read_name
from moelab.specs import Event, ExpertKey
from moelab.store.reader import Chunks, Reader
from moelab.store.stages import separable, shards

clock = time.perf_counter
NICE = 5                    # of the workers' threads
DEPTH = 2                   # at the same time; with four the disks that we measured were no faster
_PART = {"e": "E", "sm": "SM", "full": "both"}
#: what a layer waits for: experts that can be computed, an error, or None: "look again whether to go on"
Ready = SimpleQueue


class Dropped(Exception):
    """Nobody wants the rest of a prefetched expert."""


class Bell:
    """Wakes up to `n` threads that wait for something to do, without a lock: whoever rings can be interrupted, or be
    the garbage collector within one of the threads. A ring is a token in a queue; n of them wake everybody."""

    def __init__(self, n: int) -> None:
        self._n, self._tokens = n, SimpleQueue()
        self.wait = self._tokens.get

    def ring(self) -> None:
        while self._tokens.qsize() < self._n:
            self._tokens.put(None)


def step_back() -> None:
    """Give this thread a lower priority: an OpenMP team that lost a core to it would make all its threads wait."""
    with contextlib.suppress(AttributeError, OSError):          # only on Linux has a thread a priority of its own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class Pipeline:
    """Memory, files and threads around a `LoadQueue`.

    The thread that runs the model may be interrupted at any line, by Ctrl-C. It changes what all threads share in
    `change` only, waits only on queues, and rings only bells: so no lock stays taken and nobody waits for what it would
    have done. A change that was left half done ends with this pipeline: the engine `stop`s it and makes another.

    needed : when the disk has last read what the running layer demands, or else when the layer came.
    computed : thread → seconds for which it has used a core: to copy what it reads, to check, to decode.
    before : the pipeline whose memory this one takes over, and `held`, the slots there that are certain to be filled.
    """

    def __init__(self, slots: Slots, reader: Reader, workers: int, timeline: Timeline, ahead: int = 0,
                 counts: PrefetchCounts | None = None, before: Pipeline | None = None,
                 held: dict[ExpertKey, dict[str, int]] | None = None) -> None:
        self.slots, self.reader, self.timeline, self.closed, self.needed = slots, reader, timeline, False, clock()
        self.computed: dict[str, float] = {}
        self.chunks: dict[tuple[str, int], Chunks] = before.chunks if before else {}        # of (kind, slot)
        two_stages = decoder(slots.device).two_stages
        self.queue = LoadQueue(
            slots.count, ahead, held=held, counts=counts, tensors=lambda key: reader.store.layers[key.layer].tensors,
            separable=lambda load, name: two_stages and separable(self.chunks["e", load.slots["e"]], name),
            in_place=slots.sizes.in_place, check=reader.verify, workers=workers,
            shards=lambda load, name: shards(self.chunks["e", load.slots["e"]], name) if two_stages else 1)
        self._lock, self._io, self._work = threading.Lock(), Bell(DEPTH), Bell(workers)
        self._served = 0.0                                      # when the disk has last ended a read
        #: reads under way, as they began → () or, before their turn, what became of them
        self._reading: dict[tuple[Load, tuple[str, ...]], tuple] = {}
        self._ready: Ready = SimpleQueue()                      # the running layer's
        self._living: set[int] = set()                          # threads that run, whatever `threading` says
        self._ended: SimpleQueue[None] = SimpleQueue()
        loops = {f"disk {i}": (self._read_loop, f"disk {i}") for i in range(DEPTH)} | {
            f"worker {i}": (self._work_loop, f"worker {i}") for i in range(workers)}
        self.threads = [threading.Thread(target=self._run, args=loop, name=f"moelab {name}", daemon=True)
                        for name, loop in loops.items()]

    def open(self) -> None:
        for thread in self.threads:
            thread.start()

    def change(self, how: Callable[..., Any], *args: Any) -> Any:
        """Call `how`, a method of the queue, under the lock, and wake the threads if loads were admitted."""
        before = self.queue.admitted
        result = self._locked(how, *args)
        if self.queue.admitted != before:
            self._io.ring()
            self._work.ring()
        return result

    def _locked(self, how: Callable[..., Any], *args: Any) -> Any:
        """In one line: an interruption comes before the lock is taken, or within `how`, but never between the last
        line of a block and its end."""
        with self._lock: return how(*args)

    def begin(self, *step: Any) -> tuple[Ready, list[Any]]:
        """`LoadQueue.begin` for (layer, requests, evicted); returns where the layer's experts will arrive, and the
        requests that are left."""
        self._ready = ready = SimpleQueue()
        return ready, self.change(self.queue.begin, *step, ready.put)

    def next_ready(self, ready: Ready, check: Callable[[], None]) -> ExpertKey:
        """Wait for an expert that is loaded; `check` raises what shall end the waiting, and is called on `wake`."""
        start, found = clock(), None
        while found is None:
            check()
            found = ready.get()
        if isinstance(found, BaseException):
            raise found
        if (waited := clock() - start) > 2e-6:
            self.timeline.add(Event("compute", "wait", *found, start, start + waited))
        return found

    def tensors(self, key: tuple[int, int], reuse: bool = False) -> dict[str, torch.Tensor]:
        """The tensors of an expert (layer, expert) that is loaded; `reuse` as of `Slots.tensors`."""
        return self.slots.tensors(self.queue.held[key]["full"], *key, reuse)

    def wake(self) -> None:
        self._ready.put(None)

    def halt(self) -> None:
        """Tell the threads to end when they have done what they are at; does not wait for it."""
        self.closed = True
        self._io.ring()
        self._work.ring()
        self.wake()

    def stop(self) -> None:
        """End the threads; what they are doing is finished first."""
        self.halt()
        while self._living:                                     # `join` alone may, interrupted once, no longer wait
            with contextlib.suppress(Empty):
                self._ended.get(timeout=0.05)                   # what an interrupted `stop` has taken does not come
        for thread in self.threads:
            if thread.ident is not None:                        # else it was not started, or ends at once
                thread.join()

    def free(self) -> None:
        """Let go of files and memory, after `stop`."""
        self.reader.close()
        self.queue.held.clear()
        self.chunks.clear()
        self.slots = None

    def _run(self, loop: Callable[..., None], *args: str) -> None:
        """The life of a thread; if it ends too early, because a change was left half done, so does everything else."""
        me = threading.get_ident()
        self._living.add(me)                                    # before it looks whether to begin at all
        try:
            loop(*args)
        except BaseException as error:
            self._ready.put(error)
            self.halt()
        finally:
            self._living.discard(me)
            self._ended.put(None)

    def _next(self, bell: Bell, find: Callable[[], Any]) -> Any:
        """Wait for something to do; None when the pipeline is closed."""
        while not self.closed:
            with self._lock:
                found = find()
            if found is not None:
                return found
            bell.wait()
        return None

    def _read_loop(self, me: str) -> None:
        while (found := self._next(self._io, self._next_read)) is not None:
            self._read(*found)
            self.computed[me] = time.thread_time()

    def _next_read(self) -> tuple[Load, tuple[str, ...]] | None:
        """The queue's; beside another read, only one that the running layer demands."""
        if (found := self.queue.next_read(bool(self._reading))) is not None:
            self._reading[found] = ()
        return found

    def _read_done(self, load: Load, kinds: tuple[str, ...], *result: Any) -> None:
        """A demanded read waits for those that began before it."""
        self._reading[load, kinds] = result
        for read, its in list(self._reading.items()):
            if its:
                del self._reading[read]
                self.queue.read_done(*read, *its)
            elif not read[0].ahead:
                break

    def _serve(self, start: float) -> tuple[float, float]:
        """From when until now the disk was busy with what was asked for at `start`."""
        begun, self._served = max(start, self._served), clock()
        return begun, self._served

    def _read(self, load: Load, kinds: tuple[str, ...]) -> None:
        start, error, done, seconds = clock(), None, 0, 0.0

        def landed(nbytes: int) -> None:
            nonlocal done, seconds
            begun, now = self._locked(self._serve, start)
            self.timeline.add(Event("disk", read_name(kinds), *load.key, begun, now, nbytes))
            done, seconds = done + nbytes, seconds + now - begun

        def between(nbytes: int) -> None:
            """Between two pieces of a prefetch, what the running layer demands goes first."""
            nonlocal start
            landed(nbytes)
            while load.keep is None and not self.closed:
                if urgent := self._locked(self._next_read):
                    self._read(*urgent)
                elif len(self._reading) > 1 and load.phase is not Phase.DROPPED:
                    self._io.wait()                     # until another thread has read what is demanded
                else:
                    break
            if load.phase is Phase.DROPPED:
                raise Dropped
            start = clock()

        try:
            parts = {_PART[kind]: self.slots.bytes(kind, load.slots[kind]) for kind in kinds}
            chunks = self.reader.read_parts(*load.key, parts, *((PIECE, between) if load.ahead else ()))
        except Dropped:
            pass
        except BaseException as caught:                 # whatever it is belongs to the caller of the model
            error = caught
        else:
            self.chunks.update(((kind, load.slots[kind]), part) for kind, part in zip(kinds, chunks))
            landed(sum(part.nbytes for part in chunks) - done)
        if load.keep is not None:
            self.needed = clock()
        self.change(self._read_done, load, kinds, done, error, seconds)
        self._work.ring()
        if self._reading:
            self._io.ring()

    def _next_decode(self) -> tuple[Load, str, str, dict[str, Chunks]] | None:
        """The queue's, and the chunks that it uses: of a dropped load they may soon be another's."""
        if (found := self.queue.next_decode()) is None:
            return None
        load, _, operation = found
        return *found, {kind: self.chunks[kind, load.slots[kind]] for kind in USES[operation]}

    def _work_loop(self, me: str) -> None:
        step_back()
        decode = decoder(self.slots.device)
        while (found := self._next(self._work, self._next_decode)) is not None:
            load, tensor, operation, chunks = found
            start, error = clock(), None
            name, shard = tensor if isinstance(tensor, tuple) else (tensor, None)
            try:
                # Checked here and not when they were read: the disk goes on meanwhile, and decoding finds them cached.
                for kind in chunks if self.reader.verify else ():
                    if kind in load.lacks:
                        self.reader.check(chunks[kind], name, shard)
                if operation != "check":
                    out = self.slots.tensors(load.slots["full"], load.key.layer)[name]
                    decode(operation, chunks, name, out, shard)
            except BaseException as caught:
                error = caught
            else:
                self.timeline.add(Event(me, operation, *load.key, start, clock()))
            self.computed[me] = time.thread_time()
            self.change(self.queue.decode_done, load, tensor, operation, error)
