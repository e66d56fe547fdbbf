"""The offloading engine: an executor for the seam whose experts come from disk while others are being computed.

Source: ZipMoE §3.2–§3.4 and §4; the on-demand engine of Speculating Experts §5.1. One thread reads, L workers
decompress and join, the caller computes, all at the same time; an expert is executed as soon as it is whole, and
the results are added up in transformers' own order, so the output is that of `eager`, bit for bit. What is hit, kept
and evicted is decided by `Residency` before anything is read, so no timing changes it.

An expert that is not whole takes all the memory that it lacks at once (`_admit`), so what is on its way can always
be finished. Experts that hold a part already hold what others may wait for: as long as one of them waits, a missed
expert must leave a slot of each kind free. These two rules exclude a deadlock, whatever the order.

Left out: which expert is kept (cache/), in what order to read (schedule/), opening a model with all this (offload.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moelab.cache.residency import Request, Residency, Step
from moelab.models.seam import SeamExperts, assignments
from moelab.runtime.slots import KINDS, Slots
from moelab.runtime.timeline import Timeline
from moelab.schedule.affinity import order
from moelab.schedule.requests import Delays
from moelab.specs import Event, ExpertKey, State
from moelab.store.reader import Chunks, Reader, decode_tensor
from moelab.store.stages import decompress, recover, separable

_clock = time.perf_counter
#: what the scheduler calls a read → the kinds of slots that it fills
PARTS = {"E": ("e",), "SM": ("sm",), "both": ("e", "sm")}


class Cancelled(RuntimeError):
    """A generation was ended by `cancel()`; the engine goes on with the next one."""


class _Held:
    """The slots that an expert has, and what is in those of its chunks."""

    __slots__ = ("slots", "chunks")

    def __init__(self) -> None:
        self.slots: dict[str, int] = {}             # kind → slot
        self.chunks: dict[str, Chunks] = {}         # "e", "sm" → chunks that have been read


class _Load:
    """An expert on its way to being whole. `todo`: tensor → "both", or after the first stage "recover"."""

    __slots__ = ("request", "held", "lacks", "reads", "admitted", "todo", "busy")

    def __init__(self, request: Request, held: _Held, tensors: Any) -> None:
        self.request, self.held, self.admitted, self.busy = request, held, False, 0
        self.lacks = [kind for kind in KINDS if kind not in held.slots]
        self.reads = {kind for kind in ("e", "sm") if kind not in held.chunks}
        self.todo = dict.fromkeys(tensors, "both")


class _Job:
    """What a layer's step leaves to do; `ready` fills up with experts that can be computed."""

    def __init__(self, layer: int) -> None:
        self.layer, self.error, self.stopped, self.flying = layer, None, False, 0
        self.waiting: list[_Load] = []                          # for memory
        self.reads: list[tuple[_Load, tuple[str, ...]]] = []
        self.loads: list[_Load] = []                            # not yet whole, the most urgent first
        self.ready: deque[ExpertKey] = deque()


class Engine:
    """An executor: `(x [T, H], ids [T, K], weights [T, K], experts) → [T, H]`, equal to `eager` bit for bit.

    Parameters
    ----------
    residency : decides what is kept; the engine keeps exactly that.
    slots : memory for what residency may keep and `staging` experts more.
    reader : of the store; the engine closes it.
    delays : seconds that an expert's parts take on this machine, for the order of reading.
    workers : L, threads that decompress and join.
    """

    def __init__(self, residency: Residency, slots: Slots, reader: Reader, delays: Delays, workers: int = 1) -> None:
        self.residency, self.slots, self.reader, self.delays, self.workers = residency, slots, reader, delays, workers
        self.timeline, self.mark = Timeline(), None             # since when the model does something else than experts
        self.on_layer: Callable[[Step], None] | None = None
        self._held: dict[ExpertKey, _Held] = {}
        self._job: _Job | None = None
        self._layers, self._lock = threading.Lock(), threading.Lock()       # one layer at a time; everything below
        self._io, self._work, self._main = (threading.Condition(self._lock) for _ in range(3))
        self.closed = self._cancelled = False
        self._threads = [threading.Thread(target=self._read_loop, name="moelab disk", daemon=True)] + [
            threading.Thread(target=self._work_loop, args=(f"worker {i}",), name=f"moelab worker {i}", daemon=True)
            for i in range(workers)]
        for thread in self._threads:
            thread.start()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, experts: SeamExperts) -> Tensor:
        with self._layers:
            if self.closed:
                raise RuntimeError("this model's engine is closed; moelab.offload(store) opens it again")
            parts = {expert: (choice, tokens) for expert, choice, tokens in assignments(ids, experts.num_experts)}
            self._other(_clock(), experts.layer)
            try:
                step = self.residency.begin(experts.layer, {e: len(tokens) for e, (_, tokens) in parts.items()})
            except BaseException:                       # interrupted, or an error of a user's policy: it may say anything
                self._hold_nothing()
                raise
            if self.on_layer is not None:
                self.on_layer(step)
            job, contributions = _Job(experts.layer), []
            try:
                self._start(job, step)
                for request in self._whole(job, step):
                    expert, begun = request.key.expert, _clock()
                    choice, tokens = parts[expert]
                    tensors = self._tensors(request.key, x.dtype)
                    contributions.append((expert, tokens, experts.contribution(
                        x, tokens, weights[tokens, choice], tensors)))
                    self._executed(job, request)
                    self.mark = _clock()
                    self.timeline.add(Event("compute", "expert", job.layer, expert, begun, self.mark))
            except BaseException:
                self._abandon(job, step)
                raise
            return experts.accumulate(x, contributions)

    def end_forward(self) -> float:
        """Report what came after the last layer's experts; returns the time."""
        now = _clock()
        self._other(now, -1)
        self.mark = None
        return now

    def _other(self, now: float, layer: int) -> None:
        if self.mark is not None:
            self.timeline.add(Event("compute", "other", layer, -1, self.mark, now))

    def cancel(self) -> None:
        """End the running forward pass with `Cancelled` at its next expert."""
        with self._lock:
            self._cancelled = True
            self._main.notify_all()

    def resume(self) -> None:
        """Forget a `cancel()` that came when nothing was running."""
        self._cancelled = False

    def close(self) -> None:
        """Stop the threads and let go of files and memory. What is running ends with an error."""
        with self._lock:
            self.closed = True
            if self._job is not None:
                self._job.stopped = True
            for condition in (self._io, self._work, self._main):
                condition.notify_all()
        for thread in self._threads:
            thread.join()
        with self._layers:                              # a layer that runs ends with an error and needs its memory
            self.reader.close()
            self._held.clear()
            self.slots = None

    # ---------------------------------------------------------------------------------------------- the caller's part

    def _start(self, job: _Job, step: Step) -> None:
        """Hand a step's loads to the threads."""
        requests = [request for request in step.requests if request.state is not State.FULL]
        plan = order(requests, self.delays, self.workers) if requests else None
        with self._lock:
            for key, _ in step.evicted:
                self._release(self._held.pop(key))
            self._job = job
            if plan is None:
                return
            tensors, loads = self.reader.store.layers[job.layer].tensors, {}
            for request in requests:
                held = self._held.setdefault(request.key, _Held())
                loads[request.key.expert] = _Load(request, held, tensors)
            job.reads = [(loads[expert], PARTS[part]) for expert, part in plan.reads]
            job.loads = [loads[expert] for expert in plan.decode]
            urgent = dict.fromkeys([load.request.key.expert for load, _ in job.reads])
            job.waiting = [loads[expert] for expert in {**urgent, **loads}]
            self._admit(job)

    def _whole(self, job: _Job, step: Step) -> Iterator[Request]:
        """The step's requests as they become executable: hits first."""
        by_key = {request.key: request for request in step.requests}
        for request in step.requests:
            if request.state is State.FULL:
                self._check(job)
                yield by_key.pop(request.key)
        while by_key:
            with self._lock:
                start = _clock()
                while not (job.ready or job.error or self._cancelled or self.closed):
                    self._main.wait()
                waited = _clock() - start
                self._check(job)
                key = job.ready.popleft()
            if waited > 2e-6:
                self.timeline.add(Event("compute", "wait", job.layer, key.expert, start, start + waited))
            yield by_key.pop(key)

    def _check(self, job: _Job) -> None:
        if job.error is not None:
            raise job.error
        if self.closed:
            raise RuntimeError("the engine was closed while it was running")
        if self._cancelled:
            self._cancelled = False
            raise Cancelled("the generation was cancelled; the model can be used again")

    def _tensors(self, key: ExpertKey, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = self.slots.tensors(self._held[key].slots["full"], key.layer)
        if all(t.dtype == dtype or not t.is_floating_point() for t in tensors.values()):
            return tensors
        return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}

    def _executed(self, job: _Job, request: Request) -> None:
        """Let go of what an expert that has been computed shall not keep."""
        if request.keep is not State.FULL:
            with self._lock:
                held = self._held[request.key]
                self.slots.free["full"].append(held.slots.pop("full"))
                if not held.slots:
                    del self._held[request.key]
                self._admit(job)

    def _abandon(self, job: _Job, step: Step) -> None:
        """After an error or an interruption: wait for what is under way, then hold only what is certain to be whole."""
        with self._lock:
            job.stopped = True
            self._main.notify_all()
            while job.flying:
                self._main.wait()
            self._job, self._cancelled = None, False
            if self.closed:
                return
            unsure = {r.key for r in step.requests if r.state is not State.FULL or r.keep is not State.FULL}
            self.residency.forget(unsure)
            for key in [key for key in self._held if key in unsure or self.residency.state(key) is State.MISSED]:
                del self._held[key]
            self._count_free()

    def _hold_nothing(self) -> None:
        with self._lock:
            self.residency.clear()
            self._held.clear()
            self._count_free()

    def _count_free(self) -> None:
        """Count the free slots anew: an interruption may have come between any two lines."""
        for kind in KINDS:
            taken = {held.slots.get(kind) for held in self._held.values()}
            self.slots.free[kind] = [i for i in range(self.slots.count[kind]) if i not in taken]

    # ------------------------------------------------------------------------------------ memory; called with the lock

    def _admit(self, job: _Job) -> None:
        """Give loads that wait the memory that they lack, the most urgent first, and wake the threads."""
        free, admitted = self.slots.free, False
        if not job.waiting or not free["full"]:
            return
        holders = sum(bool(load.held.slots) for load in job.waiting)
        for load in list(job.waiting):
            spare = 0 if load.held.slots else int(holders > 0)
            if all(len(free[kind]) > spare for kind in load.lacks):
                holders -= bool(load.held.slots)
                load.held.slots.update({kind: free[kind].pop() for kind in load.lacks})
                load.admitted = admitted = True
                job.waiting.remove(load)
            if not free["full"]:
                break
        if admitted:
            self._io.notify()
            self._work.notify_all()

    def _release(self, held: _Held, kinds: tuple[str, ...] = KINDS) -> None:
        for kind in kinds:
            held.chunks.pop(kind, None)
            if kind in held.slots:
                self.slots.free[kind].append(held.slots.pop(kind))

    def _finished(self, job: _Job, load: _Load) -> None:
        """An expert is whole: keep of its chunks what shall be kept, and let it be computed."""
        keep = load.request.keep
        job.loads.remove(load)
        self._release(load.held, tuple(kind for kind, kept in (("e", keep.has_e), ("sm", keep.has_sm)) if not kept))
        job.ready.append(load.request.key)
        self._main.notify()
        self._admit(job)

    # ------------------------------------------------------------------------------------------------- reading thread

    def _read_loop(self) -> None:
        while True:
            with self._lock:
                while not (self.closed or (found := self._next_read())):
                    self._io.wait()
                if self.closed:
                    return
                (load, kinds), job = found, self._job
                job.flying += 1
            key, start, error, chunks = load.request.key, _clock(), None, ()
            try:
                buffers = [self.slots.bytes(kind, load.held.slots[kind]) for kind in kinds]
                if len(kinds) == 2:
                    chunks = self.reader.read_both(*key, *buffers)
                else:
                    chunks = (self.reader.read(*key, kinds[0].upper(), *buffers),)
            except BaseException as caught:             # whatever it is belongs to the caller of the model
                error = caught
            else:
                self.timeline.add(Event("disk", "read " + kinds[0].upper() if len(kinds) == 1 else "read", *key, start,
                                        _clock(), sum(len(c.data) for c in chunks)))
            with self._lock:
                for kind, part in zip(kinds, chunks):
                    load.held.chunks[kind] = part
                    load.reads.discard(kind)
                self._landed(job, error)
                self._work.notify()

    def _next_read(self) -> tuple[_Load, tuple[str, ...]] | None:
        job = self._job
        if job is None or job.stopped:
            return None
        for i, (load, kinds) in enumerate(job.reads):
            if load.admitted:
                del job.reads[i]
                return load, kinds
        return None

    def _landed(self, job: _Job, error: BaseException | None) -> None:
        job.flying -= 1
        if error is not None:
            job.error, job.stopped = job.error or error, True
        if job.stopped:
            self._main.notify()

    # ------------------------------------------------------------------------------------------------ worker threads

    def _work_loop(self, me: str) -> None:
        scratch = np.empty(0, np.uint8)
        while True:
            with self._lock:
                while not (self.closed or (found := self._next_task())):
                    self._work.wait()
                if self.closed:
                    return
                (load, name, kind), job = found, self._job
                load.busy += 1
                job.flying += 1
            key, held, start, error = load.request.key, load.held, _clock(), None
            try:
                out = self.slots.tensors(held.slots["full"], key.layer)[name]
                if kind == "decompress":
                    decompress(held.chunks["e"], name, out)
                elif kind == "recover":
                    recover(held.chunks["sm"], name, out)
                else:
                    if len(scratch) < out.numel():
                        scratch = np.empty(out.numel(), np.uint8)
                    decode_tensor(held.chunks["e"], held.chunks["sm"], name, out, scratch)
            except BaseException as caught:
                error = caught
            else:
                self.timeline.add(Event(me, kind, *key, start, _clock()))
            with self._lock:
                load.busy -= 1
                if kind == "decompress":
                    load.todo[name] = "recover"
                if error is None and not load.todo and not load.busy:
                    self._finished(job, load)
                self._landed(job, error)

    def _next_task(self) -> tuple[_Load, str, str] | None:
        """The most urgent thing that can be done; what is returned is taken off the list."""
        job = self._job
        if job is None or job.stopped:
            return None
        for load in job.loads:
            if not load.admitted or "e" in load.reads:
                continue
            for name, stage in load.todo.items():
                if "sm" not in load.reads:
                    if stage == "both" or stage == "recover":
                        del load.todo[name]
                        return load, name, "decode" if stage == "both" else "recover"
                elif stage == "both" and separable(load.held.chunks["e"], name):
                    load.todo[name] = "decompressing"
                    return load, name, "decompress"
        return None
