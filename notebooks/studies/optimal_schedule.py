"""The exact optimum of a layer's tasks in small instances, and how far Algorithm 1 is from it.

`makespan` plays blocks of tasks chunk by chunk, as ZipMoE's analysis does (appendices A, B: one
serial disk, L workers, one serial accelerator, recovery for free), so that its bound, Theorem 3.1,
can be checked. `execute` plays a layer's experts as the engine does.

Optimum: branch and bound over an order of reads and an order in which workers start chunks, which
may begin with one that is not read yet; for up to about four tasks of one or two chunks. What
shrinks the search makes no task ready later: the disk never pauses; a task's E-chunks are read
before its SM-chunk; each task's chunks are consecutive, as all decompress equally long."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from math import inf
from typing import Any, NamedTuple

from moelab.base.progress import progress
from moelab.base.specs import Event, State
from moelab.cache.residency import Step
from moelab.offloading.load_queue import KINDS, Order
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.machine import SimulatedMachine
from moelab.zipmoe.affinity import Block, Task, schedule


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


def optimum(tasks: Sequence[Task], workers: int) -> float:
    """The least makespan of all schedules, in seconds; 0 for no tasks. Raises what `schedule`
    does."""
    incumbent = makespan(schedule(tasks, workers), workers)  # also checks the input
    return _Search(tasks, workers, incumbent).best if tasks else 0.0


class _Search:
    """Depth first: the reads one by one, then the workers' chunks one by one. `best` is the least
    makespan.

    `left[j]` counts the E-chunks of task j still to read or, in `start`, its chunks in memory still
    to decompress; `sm[j]` is when its SM-chunk is in memory, inf if unknown yet."""

    def __init__(self, tasks: Sequence[Task], workers: int, incumbent: float) -> None:
        self.tasks = tasks
        self.best = incumbent
        self.u, self.v, self.c, self.K = tasks[0][3:7]
        self.p = {task.expert: task.p for task in tasks}
        self.threads = [0.0] * workers
        e_left = [task.K * task.reads_e for task in tasks]
        self.read(0.0, [], e_left, [inf if task.type_1 else 0.0 for task in tasks])

    def compute(self, ready: Sequence[float]) -> float:
        """The makespan when task j is recovered at `ready[j]`: whoever is ready runs."""
        experts: dict[int, float] = {}
        for task, at in zip(self.tasks, ready, strict=True):
            experts[task.expert] = max(at, experts.get(task.expert, 0.0))
        now = 0.0
        for at, expert in sorted((at, expert) for expert, at in experts.items()):
            now = max(now, at) + self.p[expert]
        return now

    def read(
        self, now: float, stream: list[tuple[int, float]], left: list[int], sm: list[float]
    ) -> None:
        """The next read from `now` on; `stream` has the (task, end) of each E-chunk read."""
        if not any(left) and inf not in sm:
            in_memory = [0 if task.reads_e else self.K for task in self.tasks]
            self.start(self.threads, stream, in_memory, sm, [0.0] * len(sm))
            return
        # each task at its earliest, as if the disk had nothing else to do
        soonest = []
        for n, sm_read in zip(left, sm):
            e_read = now + n * self.v if n else 0.0
            sm_read = now + n * self.v + self.u if sm_read == inf else sm_read
            soonest.append(max(e_read + self.c, sm_read))
        for j, end in stream:
            soonest[j] = max(soonest[j], end + self.c)
        if self.compute(soonest) >= self.best:
            return
        for j in self._next(left):
            end = now + self.v
            self.read(end, [*stream, (j, end)], _with(left, j, left[j] - 1), sm)
        for j, n in enumerate(left):
            if not n and sm[j] == inf:
                self.read(now + self.u, stream, left, _with(sm, j, now + self.u))

    def start(
        self,
        threads: list[float],
        stream: list[tuple[int, float]],
        left: list[int],
        sm: list[float],
        done: list[float],
    ) -> None:
        """The next chunk that a worker starts: the next of `stream`, or one that was `left` in
        memory; `threads` is when the workers are free, ascending, and `done[j]` when the last chunk
        of task j so far is decompressed."""
        first = threads[0]
        others = threads[1:]
        soonest = [max(done[j], sm[j], first + self.c if n else 0.0) for j, n in enumerate(left)]
        for j, arrival in stream:
            soonest[j] = max(soonest[j], max(first, arrival) + self.c)
        if (least := self.compute(soonest)) >= self.best:
            return
        if not stream and not any(left):
            self.best = least
            return
        if stream:
            j, arrival = stream[0]
            end = max(first, arrival) + self.c
            self.start(sorted([end, *others]), stream[1:], left, sm, _with(done, j, end))
        for j in self._next(left):
            end = first + self.c
            fewer = _with(left, j, left[j] - 1)
            self.start(sorted([end, *others]), stream, fewer, sm, _with(done, j, end))

    def _next(self, left: list[int]) -> list[int]:
        """The tasks that may go on: one that was begun, or else any."""
        begun = [j for j, n in enumerate(left) if 0 < n < self.K]
        return begun or [j for j, n in enumerate(left) if n]


def _with(values: list, j: int, value: float) -> list:
    """The values with another one at j."""
    return [*values[:j], value, *values[j + 1 :]]


def random_instance(rng: random.Random) -> tuple[list[Task], int]:
    """1 to 4 tasks of 1 or 2 chunks, and 1 to 3 workers; delays are small integers or up to a
    thousandfold apart."""

    def delay() -> float:
        return float(rng.randint(1, 9)) if rng.random() < 0.5 else 10 ** rng.uniform(-2, 1)

    u = delay()
    v = delay()
    c = delay()
    K = rng.randint(1, 2)
    workers = rng.randint(1, 3)
    tasks: list[Task] = []
    for expert in range(rng.randint(1, 4)):
        state = rng.choice("MESC")
        p = delay()
        for tensor in range(rng.randint(1, 2)):
            if len(tasks) < 4:
                tasks.append(Task(expert, tensor, State(state), u, v, c, K, p))
    return tasks, workers


def ratio_study(n: int = 10_000, seed: int = 0) -> dict[str, float]:
    """Algorithm 1 against the optimum on n random small instances.

    Returns "mean" and "worst" of makespan / optimum; "optimal", the share of instances that reach
    it; "violations", how many exceed the 3 − 1/workers of Theorem 3.1."""
    rng = random.Random(seed)
    ratios = []
    violations = 0
    for _ in progress(range(n), "Algorithm 1 against the optimum"):
        tasks, workers = random_instance(rng)
        ratios.append(makespan(schedule(tasks, workers), workers) / optimum(tasks, workers))
        violations += ratios[-1] / (3 - 1 / workers) > 1 + 1e-9
    return {
        "mean": sum(ratios) / n,
        "worst": max(ratios),
        "optimal": sum(ratio <= 1 + 1e-9 for ratio in ratios) / n,
        "violations": violations,
    }


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
