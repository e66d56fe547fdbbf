"""A schedule in simulated time: disk, workers and compute each take the first operation that is
ready.

`makespan` plays blocks of tasks chunk by chunk, as ZipMoE's analysis does (appendices A, B: one
serial disk, L workers, one serial accelerator, recovery for free), so that its bound can be
checked. `SimulatedMachine` plays experts as the engine does, with the same `LoadQueue`, and gives
the same `Event` records; `execute` is one layer of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import prod
from typing import Any

from moelab.offloading.load_queue import (
    HOLDS,
    KINDS,
    Load,
    LoadQueue,
    Order,
    read_name,
)
from moelab.offloading.requests import Delays, Operation, operations
from moelab.specs import Event, ExpertKey, State
from moelab.zipmoe.affinity import Block

RESOURCES = {
    "read E": "disk",
    "read SM": "disk",
    "decompress": "workers",
    "recover": "stream",
    "expert": "compute",
}


def timetable(blocks: Sequence[Block], workers: int) -> dict[Operation, tuple[float, float]]:
    """Start and end in seconds of every operation of the tasks, chunk by chunk. Disk: block by
    block the E-chunks, then the SM-chunks, in the order of the tasks. Workers: the first ready
    chunk in that order. Recovery takes no time."""
    seconds, rank, waits_for = {}, {}, {}
    for number, block in enumerate(blocks):
        for position, task in enumerate(block):
            costs = {
                "read E": task.v,
                "read SM": task.u,
                "decompress": task.c,
                "recover": 0.0,
                "expert": task.p,
            }
            for operation, before in operations(task).items():
                waits_for.setdefault(operation, set()).update(before)
                seconds[operation] = costs[operation.kind]
                rank[operation] = (number, operation.kind == "read SM", position, operation.chunk)
    then: dict[Operation, list[Operation]] = {}
    for operation, before in waits_for.items():
        for earlier in before:
            then.setdefault(earlier, []).append(operation)

    ready: dict[str, list] = {resource: [] for resource in RESOURCES.values()}
    free = {"disk": 1, "workers": workers, "stream": len(rank), "compute": 1}

    def enqueue(operation: Operation) -> None:
        if not waits_for[operation]:
            heappush(ready[RESOURCES[operation.kind]], (rank[operation], operation))

    for operation in waits_for:
        enqueue(operation)
    times: dict[Operation, tuple[float, float]] = {}
    running: list[tuple[float, Operation]] = []
    now = 0.0
    while True:
        for resource, queue in ready.items():
            while queue and free[resource]:
                operation = heappop(queue)[1]
                free[resource] -= 1
                times[operation] = now, now + seconds[operation]
                heappush(running, (now + seconds[operation], operation))
        if not running:
            return times
        now = running[0][0]
        while running and running[0][0] == now:  # all that end together, before anything starts
            operation = heappop(running)[1]
            free[RESOURCES[operation.kind]] += 1
            for later in then.get(operation, ()):
                waits_for[later].discard(operation)
                enqueue(later)


def makespan(blocks: Sequence[Block], workers: int) -> float:
    """Seconds until the last expert of the blocks is computed."""
    return max((end for _, end in timetable(blocks, workers).values()), default=0.0)


def execute(
    requests: Iterable[Any],
    order: Order,
    delays: Delays,
    workers: int,
    start: float = 0.0,
    layer: int = 0,
) -> tuple[list[Event], float]:
    """One layer's step in simulated time, with slots for all its experts, as the engine executes
    it.

    requests : objects with `.key`, `.tokens`, `.state` and `.keep`. Returns the events in order of
    their start, and the time at which the last expert is computed. ValueError without workers, or
    for an order that was made for other requests."""
    requests = list(requests)
    machine = SimulatedMachine(
        delays,
        workers,
        dict.fromkeys(KINDS, 2 * len(requests)),
        ((request.key, request.state) for request in requests),
        start=start,
    )
    ready = machine.begin(layer, requests)
    loads = [request for request in requests if request.state is not State.FULL]
    machine.queue.demand(machine.queue.begin(layer, loads, (), ready), order)
    machine.run()
    return machine.timeline(), machine.now


@dataclass
class _Work:
    """What a resource is at: its number among the events, its end if nothing changes, what then,
    and how many times as long it takes now as it would alone."""

    what: str
    event: int
    until: float
    then: Callable[[], None]
    slowed: float = 1.0


class SimulatedMachine:
    """Disk, decode workers and compute with a clock; what they do next, a `LoadQueue` says, as in
    the engine.

    Workers take tensors, or shards of the last ones, as the engine's do; here all are of equal
    size. Compute runs the experts that are FULL in ascending order, or in one go where
    `Delays.together` says so, then the others as they are loaded. Time passes in `run` and `spend`
    only, and what is under way goes on from layer to layer. Whoever works beside others is slowed
    down as `Delays.beside` says, as long as they do; an expert that compute waits for comes
    `Delays.handover` later.

    slots : of each kind.    resident : (key, state) of what is in memory.    ahead : how many experts may be
    prefetched.
    """

    def __init__(
        self,
        delays: Delays,
        workers: int,
        slots: Mapping[str, int],
        resident: Iterable[tuple[ExpertKey, State]] = (),
        ahead: int = 0,
        start: float = 0.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"there are {workers} workers; decompression needs at least 1")
        number = {kind: count() for kind in KINDS}
        held = {
            key: {kind: next(number[kind]) for kind in HOLDS[state]}
            for key, state in resident
            if state is not State.MISSED
        }
        tensors = range(delays.N if delays.decode_at_once else 1)
        self.delays, self.workers = delays, workers
        self.queue = LoadQueue(
            slots,
            ahead,
            held=held,
            tensors=lambda key: tensors,
            workers=workers,
            shards=lambda load, tensor: delays.K,
        )
        self.now = start
        self._seconds = {
            kind: seconds / len(tensors)
            for kind, seconds in (
                ("decompress", delays.decompress),
                ("recover", delays.recover),
                ("decode", delays.decode_at_once),
            )
        }
        self._events: list[Event] = []
        self._running: dict[int, _Work] = {}  # −1 disk, workers, compute
        self._idle, self._disk_free, self._compute_free, self._computed_until = (
            list(range(workers)),
            True,
            True,
            start,
        )
        self._layer, self._left = -1, 0  # _left: for compute to do
        self._requests: dict[ExpertKey, Any] = {}
        self._ready: deque[list[ExpertKey]] = deque()  # computed in one go

    def timeline(self) -> list[Event]:
        """All events so far, also those under way, in order of their start."""
        return sorted(self._events, key=lambda event: event.start)

    def spend(self, layer: int, until: float) -> None:
        """Compute does something else than experts; disk and workers go on with what is
        prefetched."""
        if until > self.now:
            self._left = 1
            self._compute("other", layer, -1, self.now, until)
            self.run()

    def begin(self, layer: int, requests: Iterable[Any]) -> Callable[[ExpertKey], object]:
        """A layer's step has these requests; returns what the queue tells of those that it has
        loaded."""
        requests = sorted(requests, key=lambda request: request.key.expert)
        self._layer, self._left = layer, len(requests)
        self._requests = {request.key: request for request in requests}
        there = [request.key for request in requests if request.state is State.FULL]
        self._ready.extend([there] if there and self.delays.together else [[key] for key in there])
        return lambda key: self._ready.append([key])

    def run(self) -> None:
        """Go on until compute has nothing left to do."""
        while self._left:
            self._start()
            self._slow_down()
            self.now = min(work.until for work in self._running.values())
            for number in sorted(self._running):  # all that end together, before anything starts
                if self._running[number].until == self.now:
                    self._running.pop(number).then()

    def _slow_down(self) -> None:
        """What is left of everybody's work takes as many times as long as the others make it."""
        beside, running = self.delays.beside, self._running.values()
        for work in running if beside else ():
            others = sorted(other.what for other in running if other is not work)
            slowed = beside.get(f"{work.what} beside {' and '.join(others)}") or prod(
                beside.get(f"{work.what} beside {other}", 1.0) for other in others
            )
            if slowed != work.slowed:
                work.until = self.now + (work.until - self.now) * slowed / work.slowed
                work.slowed = slowed
                self._events[work.event] = self._events[work.event]._replace(end=work.until)

    def finish(self) -> None:
        """End what disk and workers are at, and begin nothing more."""
        for number in sorted(
            self._running, key=lambda number: (self._running[number].until, number)
        ):
            self._running.pop(number).then()

    def _start(self) -> None:
        """Let everybody who is free take what can be done."""
        while self._disk_free and (found := self.queue.next_read()) is not None:
            self._read(*found)
        while self._idle and (found := self.queue.next_decode()) is not None:
            self._decode(*found)
        if self._compute_free and self._ready:
            keys, begin = self._ready.popleft(), self.now
            if self.now > self._computed_until:
                begin += self.delays.handover
                self._events.append(
                    Event("compute", "wait", self._layer, -1, self._computed_until, begin)
                )
            seconds = self.delays.at_once([self._requests[key] for key in keys])
            only = keys[0].expert if len(keys) == 1 else -1
            self._compute("expert", keys[0].layer, only, begin, begin + seconds, keys)

    def _read(self, load: Load, kinds: tuple[str, ...]) -> None:
        seconds, nbytes = self.delays.read(load.key, "e" in kinds, "sm" in kinds)
        self._disk_free = False

        def end() -> None:
            self._disk_free = True
            self.queue.read_done(load, kinds, nbytes)

        self._begin("disk", -1, read_name(kinds), *load.key, self.now + seconds, end, nbytes)

    def _decode(self, load: Load, tensor: Any, operation: str) -> None:
        worker, part = heappop(self._idle), self.delays.K if isinstance(tensor, tuple) else 1

        def end() -> None:
            heappush(self._idle, worker)
            self.queue.decode_done(load, tensor, operation)

        self._begin(
            f"worker {worker}",
            worker,
            operation,
            *load.key,
            self.now + self._seconds[operation] / part,
            end,
        )

    def _compute(
        self,
        kind: str,
        layer: int,
        expert: int,
        start: float,
        until: float,
        keys: Sequence[ExpertKey] = (),
    ) -> None:
        self._compute_free = False

        def end() -> None:
            self._computed_until, self._compute_free = self.now, True
            self._left -= max(len(keys), 1)
            if leaving := [
                self._requests[key] for key in keys if self._requests[key].keep is not State.FULL
            ]:
                self.queue.computed(leaving)

        self._begin("compute", self.workers, kind, layer, expert, until, end, start=start)

    def _begin(
        self,
        resource: str,
        number: int,
        kind: str,
        layer: int,
        expert: int,
        until: float,
        end: Callable[[], None],
        nbytes: int = 0,
        start: float | None = None,
    ) -> None:
        what = {-1: "read", self.workers: kind}.get(number, "decode")
        self._running[number] = _Work(what, len(self._events), until, end)
        self._events.append(
            Event(
                resource, kind, layer, expert, self.now if start is None else start, until, nbytes
            )
        )
