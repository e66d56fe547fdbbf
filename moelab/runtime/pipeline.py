"""The threads that make experts whole: one reads, L decompress and join, all at once, in an order that is given.

Source: ZipMoE §3.2, §3.3 (one I/O thread, L workers, work-conserving), §4 (preallocated memory); Speculating Experts
Algorithm 1 (the next layer's experts are on their way while this one's are computed). Every thread takes the first
thing in the order that can be done, this layer's before the next one's, so an order can make a layer slow, but not
wrong and not stuck.

A load takes all the memory that it lacks at once (`_admit`), so what has been admitted can always be finished.
Experts that hold a part already hold what others may wait for: as long as one of them waits, a missed expert must
leave a slot of each kind free. What is fetched ahead takes at most the slots that were added for it (`room_ahead`) and
gives them back when it turns out not to be wanted. These three rules exclude a deadlock.

Left out: which experts are kept (cache/), in what order (schedule/), what comes next (speculate/), computing (engine).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from moelab.cache.residency import Request
from moelab.runtime.decoders import decoder
from moelab.runtime.loads import USES, Fetched, Held, Job, Load
from moelab.runtime.slots import KINDS, Slots
from moelab.runtime.timeline import Timeline
from moelab.schedule.affinity import Order
from moelab.specs import Event, ExpertKey, State
from moelab.store.reader import Reader

clock = time.perf_counter
NICE = 5                    # of the workers' threads
_PART = {"e": "E", "sm": "SM", "full": "both"}


class Pipeline:
    """Memory, files and threads.

    Parameters
    ----------
    slots : memory for what is kept and for what is on its way.
    reader : of the store; closed with the pipeline.
    workers : L.
    timeline : where events are reported.
    room_ahead : slots of each kind that are there for fetching ahead.
    """

    def __init__(self, slots: Slots, reader: Reader, workers: int, timeline: Timeline, room_ahead: int = 0) -> None:
        self.slots, self.reader, self.timeline, self.closed = slots, reader, timeline, False
        self.held: dict[ExpertKey, Held] = {}
        self.room_ahead, self.fetched = room_ahead, Fetched()
        self._job: Job | None = None
        self._ahead: dict[int, Job] = {}                        # by layer
        self._taken_ahead = self._flying = 0                    # experts that hold memory ahead; what threads are at
        self._two_stages = decoder(slots.device).two_stages
        self._lock = threading.Lock()                           # over everything here
        self._io, self._work, self._main = (threading.Condition(self._lock) for _ in range(3))
        self._threads = [threading.Thread(target=self._read_loop, name="moelab disk", daemon=True)] + [
            threading.Thread(target=self._work_loop, args=(f"worker {i}",), name=f"moelab worker {i}", daemon=True)
            for i in range(workers)]
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------------------------------- for the engine

    def start(self, layer: int, requests: list[Request], evicted: Iterable[ExpertKey]) -> tuple[Job, list[Request]]:
        """Free what is evicted and go on with what of a layer's step was fetched ahead.

        requests : for experts that aren't whole in memory. Returns the layer's job and the requests left for `load`.
        """
        job = Job(layer, self._two_stages)
        with self._lock:
            self._adopt(self._ahead.pop(layer, None), job, {request.key: request for request in requests})
            for key in evicted:
                self._release(self.held.pop(key), KINDS)
                for other in self._ahead.values():              # which counts on what has just been released
                    if (load := other.loads.pop(key, None) or other.done.pop(key, None)) is not None:
                        self._drop(load)
            self._job = job
            self._admit()
            return job, [request for request in requests if request.key not in job.adopted]

    def load(self, job: Job, requests: list[Request], plan: Order) -> None:
        """Hand the loads of a layer's step to the threads, in the order of the plan."""
        with self._lock:
            job.put([self._load(request.key, self.held.setdefault(request.key, Held()), request.keep)
                     for request in requests], plan, self.slots.sizes.in_place)
            self._admit()

    def fetch(self, layer: int, requests: list[Request], plan: Order) -> None:
        """Begin to make experts whole that a layer to come will probably want, where nothing else is to do."""
        with self._lock:
            if layer in self._ahead:
                return
            job = self._ahead[layer] = Job(layer, self._two_stages)
            job.put([self._load(request.key, Held(self.held.get(request.key)), None) for request in requests],
                    plan, self.slots.sizes.in_place)
            self._admit()

    def drop_ahead(self) -> None:
        """Forget what has been fetched ahead: the forward pass that wanted it is over."""
        with self._lock:
            for job in self._ahead.values():
                self._adopt(job, None, {})
            self._ahead.clear()

    def busy(self, job: Job) -> bool:
        """Whether threads have something to do, for this layer or for one to come."""
        return bool(job.loads) or any(ahead.loads for ahead in self._ahead.values())

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

    def executed(self, request: Request) -> None:
        """Let go of what an expert that has been computed shall not keep."""
        if request.keep is not State.FULL:
            with self._lock:
                held = self.held[request.key]
                self._release(held, ("full",))
                if not held.slots:
                    del self.held[request.key]
                self._admit()

    def tensors(self, key: ExpertKey) -> dict[str, torch.Tensor]:
        """The tensors of an expert that is whole."""
        return self.slots.tensors(self.held[key].slots["full"], key.layer)

    def wake(self) -> None:
        """Let the engine look again whether to go on."""
        with self._lock:
            self._main.notify_all()

    def abandon(self, keep: Callable[[ExpertKey], bool]) -> None:
        """Wait for what is under way, then hold only the experts that `keep` says."""
        with self._lock:
            for job in (self._job, *self._ahead.values()):
                if job is not None:
                    job.stopped = True
            while self._flying:
                self._main.wait()
            self._job, self._taken_ahead = None, 0
            self._ahead.clear()
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

    # ------------------------------------------------------------------------------- bookkeeping; called with the lock

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
            self._io.notify()
            self._work.notify_all()

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
            self.fetched.begun += 1
            if request is None:
                self.fetched.wasted += load.nbytes
                self._drop(load)
                continue
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
        job.ready.append(load.key)
        self._main.notify()

    def _landed(self, load: Load, error: BaseException | None) -> None:
        """A thread is done with what it took up."""
        load.busy -= 1
        self._flying -= 1
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
        if job is None or job.stopped:
            self._main.notify_all()

    # --------------------------------------------------------------------------------------------- what threads do

    def _next(self, condition: threading.Condition, find: Callable[[Job], tuple[Load, Any] | None]
              ) -> tuple[Load, Any] | None:
        """Wait for something to do; None when the pipeline is closed."""
        with self._lock:
            while not self.closed:
                for job in (self._job, *self._ahead.values()):
                    if job is not None and not job.stopped and (found := find(job)) is not None:
                        found[0].busy += 1
                        self._flying += 1
                        return found
                condition.wait()
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
                size = sum(len(part.data) for part in chunks)
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
                self._work.notify_all()

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
