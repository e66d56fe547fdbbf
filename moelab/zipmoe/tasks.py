"""Tasks and the graph of operations that an expert's state leaves to do (ZipMoE §3.2, Fig. 6), and
their schedule in time.

A tensor's exponents lie on disk as K compressed shards (E-chunks), its signs and mantissas as one
SM-chunk. When all N tensors of an expert are recovered, it runs. What is in memory already need not
be read.

    read E 0 → decompress 0 ┐
    read E 1 → decompress 1 ┼→ recover → expert
                    read SM ┘

The letters K, N, u, v, c, p are the paper's. `makespan` plays blocks of tasks chunk by chunk, as
the paper's analysis does (appendices A, B: one serial disk, L workers, one serial accelerator,
recovery for free), so that its bound can be checked; `execute` plays a layer's experts as the
engine does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

from moelab.cache.residency import Step
from moelab.offloading.load_queue import KINDS, Order
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.machine import SimulatedMachine
from moelab.specs import Event, State


class Task(NamedTuple):
    """One tensor to recover, or a whole expert as one, which is tensor 0."""

    expert: int
    tensor: int
    state: State  # what of it is in memory; never FULL in a schedule
    u: float  # seconds to read its SM-chunk
    v: float  # seconds to read one of its K E-chunks; the paper's ρu/K
    c: float  # seconds to decompress one E-chunk
    K: int
    p: float  # seconds that its expert computes, once all tensors are there

    @property
    def type_1(self) -> bool:
        """Whether the SM-chunk must be read (§3.3)."""
        return self.state is State.MISSED or self.state is State.E

    @property
    def reads_e(self) -> bool:
        return self.state is State.MISSED or self.state is State.SM

    @property
    def io(self) -> float:
        """Seconds of reading that are left to do: v_j of Lemma B.3."""
        return self.reads_e * self.K * self.v + self.type_1 * self.u


class Operation(NamedTuple):
    """A node of the graph. `kind` is "read E", "read SM", "decompress", "recover" or "expert"; −1
    for no tensor or no chunk."""

    kind: str
    expert: int
    tensor: int = -1
    chunk: int = -1


def operations(task: Task) -> dict[Operation, tuple[Operation, ...]]:
    """What a task leaves to do (Fig. 6): each operation with those that must end before it starts,
    in such an order."""
    where = task.expert, task.tensor
    expert = Operation("expert", task.expert)
    recover = Operation("recover", *where)
    sm = Operation("read SM", *where)
    if task.state is State.FULL:
        return {expert: ()}
    graph: dict[Operation, tuple[Operation, ...]] = {}
    for chunk in range(task.K):
        read = (Operation("read E", *where, chunk),) if task.reads_e else ()
        graph |= dict.fromkeys(read, ()) | {Operation("decompress", *where, chunk): read}
    decompressed = tuple(operation for operation in graph if operation.kind == "decompress")
    if task.type_1:
        graph[sm] = ()
    return graph | {
        recover: (*decompressed, sm) if task.type_1 else decompressed,
        expert: (recover,),
    }


Block = list[Task]


def whole(request: Any, delays: Delays) -> Task:
    """A request, which has `.key.expert`, `.tokens` and `.state`, as one task of one chunk, which is
    what the engine's threads handle; recovery is a worker's."""
    return Task(
        request.key.expert,
        0,
        request.state,
        delays.sm_read,
        delays.e_read,
        delays.decode,
        1,
        delays.expert(request.tokens),
    )


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
    seconds = {}
    rank = {}
    waits_for = {}
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
    step = Step(layer, sorted(requests, key=lambda request: request.key.expert), [])
    simulated = SimulatedMachine(
        Machine(delays, workers),
        dict.fromkeys(KINDS, 2 * len(step.requests)),
        ((request.key, request.state) for request in step.requests),
        start=start,
    )
    simulated.begin(step)
    simulated.queue.begin(layer, step.loads, [], simulated.ready, lambda _: order)
    simulated.run()
    return simulated.timeline(), simulated.now
