"""The threads that make experts whole: one reads, L decompress and join, all at once, in an order that is given.

Source: ZipMoE §3.2, §3.3 (one I/O thread, L workers, work-conserving), §4 (preallocated memory); Speculating Experts
Algorithm 1 (the next layer's experts are on their way while this one's are computed). Every thread takes the first
thing in the order that can be done, this layer's before the next one's, so an order can make a layer slow, but not
wrong and not stuck.

Left out: who has what memory (see admission), which experts are kept (cache/), in what order (schedule/), what comes
next (speculate/), computing them (the engine).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from queue import Empty, SimpleQueue
from typing import Any

import torch

from moelab.cache.residency import Request
from moelab.offloading.admission import Admission, Bell
from moelab.offloading.decoders import decoder
from moelab.offloading.loads import USES, Fetched, Held, Job, Load
from moelab.offloading.slots import KINDS, Slots
from moelab.offloading.timeline import Timeline
from moelab.schedule.affinity import Order
from moelab.specs import Event, ExpertKey, State
from moelab.store.reader import Reader

clock = time.perf_counter
NICE = 5                    # of the workers' threads
_PART = {"e": "E", "sm": "SM", "full": "both"}


class Pipeline(Admission):
    """Memory, files and threads.

    The thread that runs the model may be interrupted at any line, by Ctrl-C. It changes what all threads share in
    `change` only, waits only where others put something into a queue, and rings only bells: so no lock stays taken and
    nobody waits for what it would have done. What its change then left half done ends with this pipeline: the engine
    `stop`s it, and makes another of what is certain to be whole.

    Parameters
    ----------
    slots : memory for what is kept and for what is on its way.
    reader : of the store.
    workers : L.
    timeline : where events are reported.
    room_ahead : slots of each kind that are there for fetching ahead.
    held : experts whose parts are in memory already.    fetched : to go on counting in.
    """

    def __init__(self, slots: Slots, reader: Reader, workers: int, timeline: Timeline, room_ahead: int = 0,
                 held: dict[ExpertKey, Held] | None = None, fetched: Fetched | None = None) -> None:
        super().__init__(slots, reader, workers, room_ahead, held or {}, fetched or Fetched())
        self.timeline, self.closed, self._two_stages = timeline, False, decoder(slots.device).two_stages
        self._living: set[int] = set()                          # threads that run, whatever `threading` says
        self._ended: SimpleQueue[None] = SimpleQueue()
        loops = {"disk": (self._read_loop,)} | {f"worker {i}": (self._work_loop, f"worker {i}") for i in range(workers)}
        self.threads = [threading.Thread(target=self._run, args=loop, name=f"moelab {name}", daemon=True)
                        for name, loop in loops.items()]

    def open(self) -> None:
        """Start the threads."""
        for thread in self.threads:
            thread.start()

    def change(self, how: Callable[..., Any], *args: Any) -> Any:
        """Call `how`, one of the methods below, under the lock.

        In one line: an interruption comes before the lock is taken, or within `how`, but never between the last line
        of a block and its end.
        """
        with self._lock: return how(*args)

    # ---------------------------------------------------------------------------------- for the engine, by `change`

    def start(self, layer: int, requests: list[Request], evicted: Iterable[ExpertKey]) -> tuple[Job, list[Request]]:
        """Free what is evicted and go on with what of a layer's step was fetched ahead.

        requests : for experts that aren't whole in memory. Returns the layer's job and the requests left for `load`.
        """
        job = Job(layer, self._two_stages)
        self._adopt(self._ahead.pop(layer, None), job, {request.key: request for request in requests})
        for key in evicted:
            self._release(self.held.pop(key), KINDS)
            for other in self._ahead.values():                  # which counts on what has just been released
                if (load := other.remove(key)) is not None and load.admitted:
                    self._refuse(load)
        self._job = job
        self._admit()
        return job, [request for request in requests if request.key not in job.adopted]

    def load(self, job: Job, requests: list[Request], plan: Order) -> None:
        """Hand the loads of a layer's step to the threads, in the order of the plan."""
        job.put([self._load(request.key, self.held.setdefault(request.key, Held()), request.keep)
                 for request in requests], plan, self.slots.sizes.in_place)
        self._admit()

    def fetch(self, layer: int, requests: list[Request], plan: Order) -> None:
        """Begin to make experts whole that a layer to come will probably want, where nothing else is to do."""
        if layer in self._ahead:
            return
        job = self._ahead[layer] = Job(layer, self._two_stages)
        job.put([self._load(request.key, Held(self.held.get(request.key)), None) for request in requests],
                plan, self.slots.sizes.in_place)
        self._admit()

    def drop_ahead(self) -> None:
        """Forget what has been fetched ahead: the forward pass that wanted it is over."""
        for job in self._ahead.values():
            self._adopt(job, None, {})
        self._ahead.clear()

    def executed(self, requests: list[Request]) -> None:
        """Let go of what experts that have been computed, and shall not stay whole, keep."""
        for request in requests:
            held = self.held[request.key]
            self._release(held, ("full",))
            if not held.slots:
                del self.held[request.key]
        self._admit()

    # ------------------------------------------------------------------------------------- for the engine, as it is

    @property
    def ahead(self) -> bool:
        """Whether anything has been announced for layers to come."""
        return bool(self._ahead)

    def busy(self, job: Job) -> bool:
        """Whether threads have something to do, for this layer or for one to come."""
        return bool(job.loads) or any(ahead.loads for ahead in self._ahead.values())

    def next_ready(self, job: Job, check: Callable[[], None]) -> ExpertKey:
        """Wait for an expert that is whole; `check` raises what shall end the waiting, and is called on `wake`."""
        start, found = clock(), None
        while found is None:
            check()
            found = job.ready.get()
        if isinstance(found, BaseException):
            raise found
        if (waited := clock() - start) > 2e-6:
            self.timeline.add(Event("compute", "wait", job.layer, found.expert, start, start + waited))
        return found

    def tensors(self, key: tuple[int, int]) -> dict[str, torch.Tensor]:
        """The tensors of an expert (layer, expert) that is whole."""
        return self.slots.tensors(self.held[key].slots["full"], key[0])

    def wake(self) -> None:
        """Let the engine look again whether to go on."""
        if (job := self._job) is not None:
            job.ready.put(None)

    def halt(self) -> None:
        """Tell everybody to end, without waiting: the threads do when they have done what they are at."""
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
        """Let go of files and memory, after `stop`, when no layer runs any more."""
        self.reader.close()
        self.held.clear()
        self.slots = None

    # --------------------------------------------------------------------------------------------- what threads do

    def _run(self, loop: Callable[..., None], *args: str) -> None:
        """The life of a thread; if it ends too early, because a change was left half done, so does everything else."""
        me = threading.get_ident()
        self._living.add(me)                                    # before it looks whether to begin at all
        try:
            loop(*args)
        except BaseException as error:
            if (job := self._job) is not None:
                job.fail(error)
            self.halt()
        finally:
            self._living.discard(me)
            self._ended.put(None)

    def _next(self, bell: Bell, find: Callable[[Job], tuple[Load, Any] | None]
              ) -> tuple[Load, Any] | None:
        """Wait for something to do; None when the pipeline is closed."""
        while not self.closed:
            with self._lock:
                for job in (self._job, *self._ahead.values()):
                    if job is not None and not job.stopped and (found := find(job)) is not None:
                        found[0].busy += 1
                        return found
            bell.wait()
        return None

    def _read_loop(self) -> None:
        while (found := self._next(self._io, Job.next_read)) is not None:
            load, kinds = found
            start, error, chunks, size, ahead = clock(), None, [], 0, load.keep is None
            try:
                chunks = self.reader.read_parts(*load.key, {_PART[kind]: self.slots.bytes(kind, load.held.slots[kind])
                                                            for kind in kinds})
            except BaseException as caught:             # whatever it is belongs to the caller of the model
                error = caught
            else:
                size = sum(part.nbytes for part in chunks)
                self.timeline.add(Event("disk", "read " + kinds[0].upper() if kinds in (("e",), ("sm",)) else "read",
                                        *load.key, start, clock(), size))
            with self._lock:
                load.nbytes += size
                self.fetched.nbytes += size if ahead else 0
                self.fetched.wasted += size if load.dropped else 0
                load.held.chunks.update(zip(kinds, chunks))
                if self.reader.verify:
                    load.held.unchecked.update((kind, name) for kind in kinds for name in load.todo)
                load.reads.difference_update(kinds[:len(chunks)])
                self._landed(load, error)
            self._work.ring()

    def _work_loop(self, me: str) -> None:
        _yield_to_compute()
        decode = decoder(self.slots.device)
        while (found := self._next(self._work, Job.next_task)) is not None:
            load, (name, kind) = found
            held, start, error = load.held, clock(), None
            try:
                # Checked here and not when they were read: the disk goes on meanwhile, and decoding finds them cached.
                for part in USES[kind]:
                    if (part, name) in held.unchecked:
                        self.reader.check(held.chunks[part], name)
                        held.unchecked.discard((part, name))
                if kind != "check":
                    decode(kind, held.chunks, name, self.slots.tensors(held.slots["full"], load.key.layer)[name])
            except BaseException as caught:
                error = caught
            else:
                self.timeline.add(Event(me, kind, *load.key, start, clock()))
            with self._lock:
                if kind == "decompress":
                    load.todo[name] = "recover"
                self._landed(load, error)


def _yield_to_compute() -> None:
    """Give this thread a lower priority: an OpenMP team that loses a core to it would make all its threads wait."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except (AttributeError, OSError):
        pass                                    # not on Linux, where a thread has a priority of its own
