import itertools
import random
from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.specs import State
from moelab.zipmoe.affinity import schedule
from moelab.zipmoe.optimal_schedule import (
    Bounds,
    bounds,
    critical_path,
    optimum,
    random_instance,
)
from moelab.zipmoe.tasks import Task, makespan, operations
from tests.zipmoe.instances import task_sets


def size(tasks):
    """How many schedules the brute force has to look at."""
    return factorial(sum(task.K * task.reads_e + task.type_1 for task in tasks)) * factorial(
        sum(task.K for task in tasks)
    )


def brute_force(tasks, workers):
    """The best of every order of reads with every order of chunks."""
    waits_for, cost = {}, {}
    for task in tasks:
        seconds = {
            "read E": task.v,
            "read SM": task.u,
            "decompress": task.c,
            "recover": 0.0,
            "expert": task.p,
        }
        for operation, before in operations(task).items():
            waits_for.setdefault(operation, set()).update(before)
            cost[operation] = seconds[operation.kind]
    of = {kind: [op for op in waits_for if op.kind == kind] for kind in seconds}
    best = float("inf")
    for reads in itertools.permutations(of["read E"] + of["read SM"]):
        now, end = 0.0, {}
        for op in reads:
            now = end[op] = now + cost[op]
        for chunks in itertools.permutations(of["decompress"]):
            threads = [0.0] * workers
            for op in chunks:
                i = threads.index(min(threads))
                threads[i] = end[op] = (
                    max([threads[i], *(end[earlier] for earlier in waits_for[op])]) + cost[op]
                )
            for op in of["recover"]:
                end[op] = max(end[earlier] for earlier in waits_for[op])
            now = 0.0
            for ready, op in sorted(
                (max(end[earlier] for earlier in waits_for[op]), op) for op in of["expert"]
            ):
                now = max(now, ready) + cost[op]
            best = min(best, now)
    return best


def instances(n, seed, most=float("inf")):
    rng = random.Random(seed)
    while n:
        tasks, workers = random_instance(rng)
        if size(tasks) <= most:
            n -= 1
            yield tasks, workers


def test_the_optimum_is_the_best_of_all_schedules():
    worse = 0
    for tasks, workers in instances(150, seed=11, most=3000):
        least = brute_force(tasks, workers)
        assert optimum(tasks, workers) == pytest.approx(least, rel=1e-9), (tasks, workers)
        worse += makespan(schedule(tasks, workers), workers) > least * (1 + 1e-9)
    assert worse > 10, "instances that Algorithm 1 solves anyway test nothing"


def test_bounds_optimum_algorithm():
    """Lemma B.3 ≤ optimum ≤ Algorithm 1 ≤ (3 − 1/L) · optimum, Theorem 3.1."""
    for tasks, workers in instances(300, seed=12):
        least, ours = optimum(tasks, workers), makespan(schedule(tasks, workers), workers)
        assert bounds(tasks, workers).best <= least * (1 + 1e-9)
        assert least <= ours <= (3 - 1 / workers) * least * (1 + 1e-9), (tasks, workers)


def test_waiting_can_be_best():
    """One worker, a chunk in memory of an expert with little to do and one to come soon of one with
    much."""
    little = Task(0, 0, State.COMPRESSED, u=0.0, v=1.0, c=10.0, K=1, p=1.0)
    much = Task(1, 0, State.SM, u=0.0, v=1.0, c=10.0, K=1, p=50.0)
    assert optimum([little, much], 1) == 1 + 10 + 50 + 1
    assert makespan([[little, much]], 1) == 10 + 10 + 50


def test_bounds_by_hand():
    a = Task(0, 0, State.MISSED, u=3.0, v=1.0, c=2.0, K=2, p=4.0)
    b = Task(1, 0, State.COMPRESSED, u=3.0, v=1.0, c=2.0, K=2, p=9.0)
    found = bounds([a, a._replace(tensor=1), b], workers=2)
    assert found == Bounds(io=10.0, workers=6.0, compute=13.0, path=11.0)
    assert found.best == 13.0
    assert bounds([], 2) == Bounds(0, 0, 0, 0)


@given(task_sets(experts=1, tensors=1), st.integers(1, 6))
def test_the_path_of_one_task_is_what_it_takes(tasks, workers):
    assert abs(critical_path(tasks[0], workers) - makespan([tasks], workers)) < 1e-9


def critical_path_printed(task, workers):
    """z_j as eq. (3) prints it."""
    return (
        task.reads_e * task.K * task.v
        + max(task.K * task.c / min(task.K, workers), task.type_1 * task.u)
        + task.p
    )


def test_the_printed_path_exceeds_a_schedule_with_two_shards():
    task = Task(0, 0, State.SM, u=0.0, v=1.0, c=1.0, K=2, p=0.0)
    assert (
        critical_path_printed(task, 1)
        == 4.0
        > makespan([[task]], 1)
        == critical_path(task, 1)
        == 3.0
    )
