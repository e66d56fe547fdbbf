"""The threads that make experts whole: one reads, L decompress and join, all at once, in an order that is given.

Source: ZipMoE §3.2 (what a state leaves to do), §3.3 (one I/O thread, L workers, work-conserving), §4 (preallocated
memory). A *load* is an expert on its way to being whole; a *job* is one layer's loads. Every thread takes the first
thing in the order that can be done, so an order can make a layer slow, but not wrong and not stuck.

A load takes all the memory that it lacks at once (`_admit`), so what has been admitted can always be finished.
Experts that hold a part already hold what others may wait for: as long as one of them waits, a missed expert must
leave a slot of each kind free. These two rules exclude a deadlock.

Left out: which experts are kept (cache/), in what order (schedule/), computing them (the engine).
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from moelab.cache.residency import Request
from moelab.runtime.decoders import decoder
from moelab.runtime.slots import KINDS, Slots
from moelab.runtime.timeline import Timeline
from moelab.schedule.affinity import Order
from moelab.specs import Event, ExpertKey, State
from moelab.store.reader import Chunks, Reader
from moelab.store.stages import separable

clock = time.perf_counter
#: what the scheduler calls a read → the kinds of slots that it fills
PARTS = {"E": ("e",), "SM": ("sm",), "both": ("e", "sm")}
#: what a worker does → the chunks that it uses
USES = {"decompress": ("e",), "recover": ("sm",), "decode": ("e", "sm")}
NICE = 5                    # of the workers' threads


class Held:
    """The slots that an expert has, what is in those of its chunks, and which of that has not been checked yet."""

    __slots__ = ("slots", "chunks", "unchecked")

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}             # kind → slot
        self.chunks: dict[str, Chunks] = {}         # "e", "sm" → chunks that have been read
        self.unchecked: set[tuple[str, str]] = set()            # ("e" or "sm", tensor)


class Load:
    """An expert on its way to being whole. `todo`: tensor → "both" stages, "decompressing", or "recover"."""

    __slots__ = ("request", "held", "lacks", "reads", "admitted", "todo", "busy")

    def __init__(self, request: Request, held: Held, tensors: Iterable[str]) -> None:
        self.request, self.held, self.admitted, self.busy = request, held, False, 0
        self.lacks = [kind for kind in KINDS if kind not in held.slots]
        self.reads = {kind for kind in ("e", "sm") if kind not in held.chunks}
        self.todo = dict.fromkeys(tensors, "both")


class Job:
    """What a layer's step leaves to do; `ready` fills up with experts that can be computed."""

    def __init__(self, layer: int) -> None:
        self.layer, self.error, self.stopped, self.flying = layer, None, False, 0
        self.waiting: list[Load] = []                           # for memory
        self.reads: list[tuple[Load, tuple[str, ...]]] = []
        self.loads: list[Load] = []                             # not yet whole, the most urgent first
        self.ready: deque[ExpertKey] = deque()
        self.early = False                                      # whether exponents may be decompressed by themselves


class Pipeline:
    """Memory, files and threads.

    Parameters
    ----------
    slots : memory for what is kept and for what is on its way.
    reader : of the store; closed with the pipeline.
    workers : L.
    timeline : where events are reported.
    """

    def __init__(self, slots: Slots, reader: Reader, workers: int, timeline: Timeline) -> None:
        self.slots, self.reader, self.timeline, self.closed = slots, reader, timeline, False
        self.held: dict[ExpertKey, Held] = {}
        self._job: Job | None = None
        self._two_stages = decoder(slots.device).two_stages
        self._lock = threading.Lock()                           # over everything here
        self._io, self._work, self._main = (threading.Condition(self._lock) for _ in range(3))
        self._threads = [threading.Thread(target=self._read_loop, name="moelab disk", daemon=True)] + [
            threading.Thread(target=self._work_loop, args=(f"worker {i}",), name=f"moelab worker {i}", daemon=True)
            for i in range(workers)]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------------------------------- for the engine

    def start(self, job: Job, requests: list[Request], plan: Order | None, evicted: Iterable[ExpertKey]) -> None:
        """Free what is evicted and hand the loads of a layer's step to the threads."""
        with self._lock:
            for key in evicted:
                self._release(self.held.pop(key), KINDS)
            self._job = job
            if plan is None:
                return
            tensors, loads = self.reader.store.layers[job.layer].tensors, {}
            for request in requests:
                loads[request.key.expert] = Load(request, self.held.setdefault(request.key, Held()), tensors)
            job.early = self._two_stages
            job.reads = [(loads[expert], PARTS[part]) for expert, part in plan.reads]
            job.loads = [loads[expert] for expert in plan.decode]
            first = dict.fromkeys(load.request.key.expert for load, _ in job.reads)
            job.waiting = [loads[expert] for expert in first | loads]
            self._admit(job)

    def next_ready(self, job: Job, check: Callable[[], None]) -> ExpertKey:
        """Wait for an expert that is whole; `check` raises what shall end the waiting, and is called on `wake`."""
        with self._lock:
            start = clock()
            while True:
                if job.error is not None:
                    raise job.error
                check()
                if job.ready:
                    break
                self._main.wait()
            key, waited = job.ready.popleft(), clock() - start
        if waited > 2e-6:
            self.timeline.add(Event("compute", "wait", job.layer, key.expert, start, start + waited))
        return key

    def executed(self, job: Job, request: Request) -> None:
        """Let go of what an expert that has been computed shall not keep."""
        if request.keep is not State.FULL:
            with self._lock:
                held = self.held[request.key]
                self._release(held, ("full",))
                if not held.slots:
                    del self.held[request.key]
                self._admit(job)

    def tensors(self, key: ExpertKey) -> dict[str, torch.Tensor]:
        """The tensors of an expert that is whole."""
        return self.slots.tensors(self.held[key].slots["full"], key.layer)

    def wake(self) -> None:
        """Let the engine look again whether to go on."""
        with self._lock:
            self._main.notify_all()

    def abandon(self, job: Job, keep: Callable[[ExpertKey], bool]) -> None:
        """Wait for what is under way, then hold only the experts that `keep` says."""
        with self._lock:
            job.stopped = True
            while job.flying:
                self._main.wait()
            self._job = None
            if not self.closed:
                self.held = {key: held for key, held in self.held.items() if keep(key)}
                for kind in KINDS:          # counted anew: an interruption may have come between any two lines
                    taken = {held.slots.get(kind) for held in self.held.values()}
                    self.slots.free[kind] = [i for i in range(self.slots.count[kind]) if i not in taken]

    def stop(self) -> None:
        """End the threads; what they are doing is finished first."""
        with self._lock:
            self.closed = True
            for condition in (self._io, self._work, self._main):
                condition.notify_all()
        for thread in self._threads:
            thread.join()

    def free(self) -> None:
        """Let go of files and memory, after `stop`, when no layer runs any more."""
        self.reader.close()
        self.held.clear()
        self.slots = None

    # ---------------------------------------------------------------------------------- memory; called with the lock

    def _admit(self, job: Job) -> None:
        """Give loads that wait the memory that they lack, the most urgent first, and wake the threads."""
        if not job.waiting or not self.slots.free["full"]:
            return
        free, admitted = self.slots.free, 0
        holders = sum(bool(load.held.slots) for load in job.waiting)
        for load in list(job.waiting):
            spare = 0 if load.held.slots else int(holders > 0)
            if all(len(free[kind]) > spare for kind in load.lacks):
                holders -= bool(load.held.slots)
                load.held.slots.update({kind: free[kind].pop() for kind in load.lacks})
                load.admitted = True
                job.waiting.remove(load)
                admitted += 1
            if not free["full"]:
                break
        if admitted:
            self._io.notify()
            self._work.notify_all()

    def _release(self, held: Held, kinds: Iterable[str]) -> None:
        for kind in kinds:
            held.chunks.pop(kind, None)
            if kind in held.slots:
                self.slots.free[kind].append(held.slots.pop(kind))

    def _whole(self, job: Job, load: Load) -> None:
        """An expert is whole: keep of its chunks what shall be kept, and let it be computed."""
        keep = load.request.keep
        job.loads.remove(load)
        self._release(load.held, [kind for kind, kept in (("e", keep.has_e), ("sm", keep.has_sm)) if not kept])
        job.ready.append(load.request.key)
        self._main.notify()
        self._admit(job)

    def _landed(self, job: Job, error: BaseException | None) -> None:
        job.flying -= 1
        if error is not None:
            job.error, job.stopped = job.error or error, True
        if job.stopped:
            self._main.notify_all()

    # --------------------------------------------------------------------------------------------- what threads do

    def _next(self, condition: threading.Condition, find: Callable[[Job], Any]) -> tuple[Job, Any] | None:
        """Wait for something to do; None when the pipeline is closed."""
        with self._lock:
            while not self.closed:
                job = self._job
                if job is not None and not job.stopped and (found := find(job)) is not None:
                    job.flying += 1
                    return job, found
                condition.wait()
        return None

    def _read_loop(self) -> None:
        while (found := self._next(self._io, _next_read)) is not None:
            job, (load, kinds) = found
            key, start, error, chunks = load.request.key, clock(), None, []
            try:
                chunks = self.reader.read_parts(*key, {kind.upper(): self.slots.bytes(kind, load.held.slots[kind])
                                                       for kind in kinds})
            except BaseException as caught:             # whatever it is belongs to the caller of the model
                error = caught
            else:
                self.timeline.add(Event("disk", "read " + kinds[0].upper() if len(kinds) == 1 else "read", *key, start,
                                        clock(), sum(len(part.data) for part in chunks)))
            with self._lock:
                load.held.chunks.update(zip(kinds, chunks))
                if self.reader.verify:
                    load.held.unchecked.update((kind, name) for kind in kinds for name in load.todo)
                load.reads.difference_update(kinds[:len(chunks)])
                self._landed(job, error)
                self._work.notify_all()

    def _work_loop(self, me: str) -> None:
        _yield_to_compute()
        decode = decoder(self.slots.device)
        while (found := self._next(self._work, _next_task)) is not None:
            job, (load, name, kind) = found
            key, start, error = load.request.key, clock(), None
            try:
                # Checked here and not when they were read: the disk goes on meanwhile, and decoding finds them cached.
                for part in USES[kind]:
                    if (part, name) in load.held.unchecked:
                        self.reader.check(load.held.chunks[part], name)
                        load.held.unchecked.discard((part, name))
                decode(kind, load.held.chunks, name, self.slots.tensors(load.held.slots["full"], key.layer)[name])
            except BaseException as caught:
                error = caught
            else:
                self.timeline.add(Event(me, kind, *key, start, clock()))
            with self._lock:
                load.busy -= 1
                if kind == "decompress":
                    load.todo[name] = "recover"
                if error is None and not load.todo and not load.busy:
                    self._whole(job, load)
                self._landed(job, error)


def _yield_to_compute() -> None:
    """Give this thread a lower priority: an OpenMP team that loses a core to it would make all its threads wait."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    except (AttributeError, OSError):
        pass                                    # not on Linux, where a thread has a priority of its own


def _next_read(job: Job) -> tuple[Load, tuple[str, ...]] | None:
    """The first read whose expert has its memory; taken off the list."""
    for i, (load, kinds) in enumerate(job.reads):
        if load.admitted:
            del job.reads[i]
            return load, kinds
    return None


def _next_task(job: Job) -> tuple[Load, str, str] | None:
    """The most urgent tensor that can be worked on, and how; taken off the list."""
    for load in job.loads:
        if not load.admitted or "e" in load.reads:
            continue
        for name, stage in load.todo.items():
            if stage != "decompressing" and "sm" not in load.reads:
                del load.todo[name]
                load.busy += 1
                return load, name, "decode" if stage == "both" else "recover"
            if job.early and stage == "both" and "sm" in load.reads and separable(load.held.chunks["e"], name):
                load.todo[name] = "decompressing"
                load.busy += 1
                return load, name, "decompress"
    return None
