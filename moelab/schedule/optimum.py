"""The exact optimum of small instances, and how far Algorithm 1 is from it.

Branch and bound over an order of reads and an order in which workers start chunks, each as soon as its input and a
worker are there; the accelerator runs whatever is ready. A chunk that is not read yet may come first in the workers'
order, so waiting on purpose is among the schedules.

Four exchanges shrink the search, none of which makes any task ready later:
- The disk never pauses.
- A task's E-chunks are read before its SM-chunk, as the task waits for the last of them anyway.
- All chunks decompress equally long, so each task's chunks are consecutive, both among the chunks read and, in the same
  order, among the chunks read that workers start; likewise among the chunks that are in memory.
- Tasks of one expert in one state are interchangeable.

Meant for up to about four tasks of one or two chunks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from typing import Any

from moelab.progress import progress
from moelab.schedule.affinity import schedule
from moelab.schedule.bounds import bounds
from moelab.schedule.execution import makespan
from moelab.schedule.requests import Task
from moelab.specs import State


def optimum(tasks: Sequence[Task], workers: int) -> float:
    """The least makespan of all schedules, in seconds; 0 for no tasks.

    Raises
    ------
    ValueError : tasks that are FULL or differ in u, v, c or K, no workers.
    """
    incumbent = makespan(schedule(tasks, workers), workers)         # also checks the input
    return _Search(tasks, workers, incumbent).best if tasks else 0.0


class _Search:
    """Depth first: the reads one by one, then the workers' chunks one by one. `best` is the least makespan.

    `left[j]` counts the E-chunks of task j still to read or, in `start`, its chunks in memory still to decompress;
    `sm[j]` is when its SM-chunk is in memory, inf if unknown yet.
    """

    def __init__(self, tasks: Sequence[Task], workers: int, incumbent: float) -> None:
        self.tasks, self.best = tasks, incumbent
        self.u, self.v, self.c, self.K = tasks[0][3:7]
        self.p = {task.expert: task.p for task in tasks}
        least = bounds(tasks, workers)
        shortest = min(self.p.values())     # whatever is read or decompressed last, an expert runs after it
        #: no schedule is shorter
        self.floor = max(least.best, least.io and least.io + shortest, least.workers + shortest) + 1e-12 * incumbent
        #: the previous task of the same expert in the same state, which goes first
        self.twin = [max((i for i in range(j) if (tasks[i].expert, tasks[i].state) == (task.expert, task.state)),
                         default=None) for j, task in enumerate(tasks)]
        self.threads = [0.0] * workers
        self.read(0.0, [], [task.K * task.reads_e for task in tasks], [inf if t.type_1 else 0.0 for t in tasks])

    def compute(self, ready: Sequence[float]) -> float:
        """The makespan when task j is recovered at `ready[j]`: whoever is ready runs."""
        experts: dict[int, float] = {}
        for task, at in zip(self.tasks, ready, strict=True):
            experts[task.expert] = max(at, experts.get(task.expert, 0.0))
        now = 0.0
        for at, expert in sorted((at, expert) for expert, at in experts.items()):
            now = max(now, at) + self.p[expert]
        return now

    def read(self, now: float, stream: list[tuple[int, float]], left: list[int], sm: list[float]) -> None:
        """The next read from `now` on; `stream` has the (task, end) of each E-chunk read."""
        if self.best <= self.floor:
            return
        # each task at its earliest, as if the disk had nothing else to do
        soonest = [max(now + left[j] * self.v + self.c if left[j] else self.c,
                       sm[j] if sm[j] < inf else now + left[j] * self.v + self.u) for j in range(len(left))]
        for j, end in stream:
            soonest[j] = max(soonest[j], end + self.c)
        if self.compute(soonest) >= self.best:
            return
        if not any(left) and inf not in sm:
            in_memory = [0 if task.reads_e else self.K for task in self.tasks]
            self.start(self.threads, stream, in_memory, sm, [0.0] * len(sm))
            return
        begun = [j for j, n in enumerate(left) if 0 < n < self.K and self.tasks[j].reads_e]
        for j in begun or [j for j, n in enumerate(left) if n]:
            if self.twin[j] is None or left[self.twin[j]] == 0:
                fewer = left.copy()
                fewer[j] -= 1
                self.read(now + self.v, [*stream, (j, now + self.v)], fewer, sm)
        for j, n in enumerate(left):
            if not n and sm[j] == inf and (self.twin[j] is None or sm[self.twin[j]] < inf):
                self.read(now + self.u, stream, left, [*sm[:j], now + self.u, *sm[j + 1:]])

    def start(self, threads: list[float], stream: list[tuple[int, float]], left: list[int], sm: list[float],
              done: list[float]) -> None:
        """The next chunk that a worker starts: the next of `stream`, or one that was `left` in memory; `threads` is
        when the workers are free, ascending, and `done[j]` when the last chunk of task j so far is decompressed."""
        if self.best <= self.floor:
            return
        first, others = threads[0], threads[1:]
        soonest = [max(done[j], sm[j], first + self.c if n else 0.0) for j, n in enumerate(left)]
        for j, arrival in stream:
            soonest[j] = max(soonest[j], max(first, arrival) + self.c)
        least = self.compute(soonest)
        if least >= self.best:
            return
        if not stream and not any(left):
            self.best = least
            return
        if stream:
            j, arrival = stream[0]
            end = max(first, arrival) + self.c
            self.start(sorted([end, *others]), stream[1:], left, sm, [*done[:j], end, *done[j + 1:]])
        begun = [j for j, n in enumerate(left) if 0 < n < self.K]
        for j in begun or [j for j, n in enumerate(left) if n]:
            if self.twin[j] is None or left[self.twin[j]] == 0:
                fewer, end = left.copy(), first + self.c
                fewer[j] -= 1
                self.start(sorted([end, *others]), stream, fewer, sm, [*done[:j], end, *done[j + 1:]])


def random_instance(rng: random.Random) -> tuple[list[Task], int]:
    """1 to 4 tasks of 1 or 2 chunks, and 1 to 3 workers; delays are small integers or up to a thousandfold apart."""
    def delay() -> float:
        return float(rng.randint(1, 9)) if rng.random() < 0.5 else 10 ** rng.uniform(-2, 1)

    u, v, c = delay(), delay(), delay()
    K, workers = rng.randint(1, 2), rng.randint(1, 3)
    tasks: list[Task] = []
    for expert in range(rng.randint(1, 4)):
        state, p = rng.choice("MESC"), delay()
        for tensor in range(rng.randint(1, 2)):
            if len(tasks) < 4:
                tasks.append(Task(expert, tensor, State(state), u, v, c, K, p))
    return tasks, workers


def ratio_study(n: int = 10_000, seed: int = 0) -> dict[str, Any]:
    """Algorithm 1 against the optimum on random small instances.

    Returns
    -------
    "n", "seed"; "mean", "worst": of makespan / optimum, and "optimal", the share of instances that reach it;
    "largest_share": the worst of ratio / (3 − 1/L), at most 1 if Theorem 3.1 holds; "violations": how often it
    doesn't; "worst_instance": {"tasks", "workers", "makespan", "optimum"}.
    """
    rng = random.Random(seed)
    ratios, shares, worst = [], [], {}
    for _ in progress(range(n), "Algorithm 1 against the optimum"):
        tasks, workers = random_instance(rng)
        ours, least = makespan(schedule(tasks, workers), workers), optimum(tasks, workers)
        if ours / least > max(ratios, default=0.0):
            worst = {"tasks": tasks, "workers": workers, "makespan": ours, "optimum": least}
        ratios.append(ours / least)
        shares.append(ratios[-1] / (3 - 1 / workers))
    return {"n": n, "seed": seed, "mean": sum(ratios) / n, "worst": max(ratios),
            "optimal": sum(ratio <= 1 + 1e-9 for ratio in ratios) / n, "largest_share": max(shares),
            "violations": sum(share > 1 + 1e-9 for share in shares), "worst_instance": worst}
