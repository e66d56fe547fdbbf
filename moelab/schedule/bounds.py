"""Lower bounds on the makespan of a layer's tasks: ZipMoE, Lemma B.3.

No schedule ends before the disk has read everything (I), the workers have shared all decompression (C/L, the paper's L
threads), every expert has run on the one accelerator (P), and the longest single task is done (Z).

The paper's Z, eq. (3), adds up reading all E-chunks and decompressing them. With K ≥ 2 shards that is no lower bound,
as the first shard is decompressed while the second is read: one missed tensor with K = 2, one worker, u → 0, v = c = 1
takes 3 s, not the 4 s of eq. (3). `critical_path` is the exact time of a single task instead; the two agree for K = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace
from typing import NamedTuple

from moelab.schedule.requests import Task


class Bounds(NamedTuple):
    """Seconds; every one is at most the optimal makespan."""

    io: float           # I
    workers: float      # C/L
    compute: float      # P
    path: float         # Z

    @property
    def best(self) -> float:
        return max(self)


def bounds(tasks: Sequence[Task], workers: int) -> Bounds:
    """Lemma B.3 for any set of tasks that is not FULL; all zero for none."""
    return Bounds(io=sum(task.io for task in tasks),
                  workers=sum(task.K * task.c for task in tasks) / workers,
                  compute=sum({task.expert: task.p for task in tasks}.values()),
                  path=max((critical_path(task, workers) for task in tasks), default=0.0))


def critical_path(task: Task, workers: int) -> float:
    """Seconds that a task takes when it is alone: E-chunks first, each decompressed as soon as it is there."""
    threads = [0.0] * workers
    decompressed = 0.0
    for chunk in range(1, task.K + 1):
        decompressed = max(chunk * task.v if task.reads_e else 0.0, threads[0]) + task.c
        heapreplace(threads, decompressed)
    return max(decompressed, task.io) + task.p


def critical_path_printed(task: Task, workers: int) -> float:
    """z_j as eq. (3) prints it, for comparison."""
    return (task.reads_e * task.K * task.v
            + max(task.K * task.c / min(task.K, workers), task.type_1 * task.u) + task.p)
