"""Lower bounds on the makespan of a layer's tasks, the exact optimum of small instances, and how
far Algorithm 1 is from it.

Bounds: ZipMoE, Lemma B.3. The paper's Z, eq. (3), adds up reading all E-chunks and decompressing
them. With K ≥ 2 shards that is no lower bound, as the first shard is decompressed while the second
is read: one missed tensor with K = 2, one worker, u → 0, v = c = 1 takes 3 s, not the 4 s of eq.
(3). `critical_path` is exact instead.

Optimum: branch and bound over an order of reads and an order in which workers start chunks, which
may begin with one that is not read yet; for up to about four tasks of one or two chunks. What
shrinks the search makes no task ready later: the disk never pauses; a task's E-chunks are read
before its SM-chunk; each task's chunks are consecutive, as all decompress equally long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from heapq import heapreplace
from math import inf
from typing import NamedTuple

from moelab.progress import progress
from moelab.specs import State
from moelab.zipmoe.affinity import schedule
from moelab.zipmoe.tasks import Task, makespan


class Bounds(NamedTuple):
    """Seconds; every one is at most the optimal makespan."""

    io: float  # I: the disk reads everything
    workers: float  # C/L: the workers (the paper's L threads) share all decompression
    compute: float  # P: every expert runs on the one accelerator
    path: float  # Z: the longest single task

    @property
    def best(self) -> float:
        return max(self)


def bounds(tasks: Sequence[Task], workers: int) -> Bounds:
    """Lemma B.3 for any set of tasks that is not FULL; all zero for none."""
    return Bounds(
        io=sum(task.io for task in tasks),
        workers=sum(task.K * task.c for task in tasks) / workers,
        compute=sum({task.expert: task.p for task in tasks}.values()),
        path=max((critical_path(task, workers) for task in tasks), default=0.0),
    )


def critical_path(task: Task, workers: int) -> float:
    """Seconds that a task takes when it is alone: E-chunks first, each decompressed as soon as it
    is there."""
    threads = [0.0] * workers
    decompressed = 0.0
    for chunk in range(1, task.K + 1):
        decompressed = max(chunk * task.v if task.reads_e else 0.0, threads[0]) + task.c
        heapreplace(threads, decompressed)
    return max(decompressed, task.io) + task.p


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
