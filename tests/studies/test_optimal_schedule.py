"""The paper's clock by hand and by its graph (Fig. 6), the optimum against every schedule."""

import itertools
import random
from math import factorial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import State
from moelab.zipmoe.affinity import Task, order, schedule, whole
from notebooks.studies.optimal_schedule import (
    RESOURCES,
    execute,
    makespan,
    operations,
    optimum,
    random_instance,
    ratio_study,
    timetable,
)
from tests.timelines import at_most
from tests.zipmoe.instances import LOADING, delays, requests, task_sets


@pytest.mark.parametrize(
    "state, kinds",
    [
        ("M", "read E, decompress, read E, decompress, read SM, recover, expert"),
        ("E", "decompress, decompress, read SM, recover, expert"),
        ("S", "read E, decompress, read E, decompress, recover, expert"),
        ("C", "decompress, decompress, recover, expert"),
        ("F", "expert"),
    ],
)
def test_what_is_in_memory_is_not_read(state, kinds):
    graph = operations(Task(7, 1, State(state), u=3.0, v=0.5, c=1.0, K=2, p=1.0))
    assert ", ".join(operation.kind for operation in graph) == kinds
    for operation, before in graph.items():  # each waits for what its own chunk or tensor needs
        assert all(op.kind in ("read E", "decompress", "read SM", "recover") for op in before)
        assert operation.kind != "decompress" or {op.chunk for op in before} <= {operation.chunk}


@given(task_sets(), st.integers(1, 9), st.randoms())
def test_a_timetable_respects_graph_and_resources(tasks, workers, rng):
    rng.shuffle(tasks)  # any order at all
    times, wanted = timetable([tasks[:3], tasks[3:]], workers), {}
    for task in tasks:
        for operation, before in operations(task).items():
            wanted.setdefault(operation, []).extend(before)
    assert times.keys() == wanted.keys()
    for resource, limit in {"disk": 1, "workers": workers, "compute": 1}.items():
        spans = [span for op, span in times.items() if RESOURCES[op.kind] == resource]
        assert at_most(spans, limit)
    for operation, before in wanted.items():
        assert max((times[op][1] for op in before), default=0.0) <= times[operation][0]


def test_a_makespan_by_hand():
    a = Task(0, 0, State.MISSED, u=3.0, v=1.0, c=2.0, K=2, p=4.0)
    # E at 1 and 2, SM at 5; one worker decompresses 1–3, 3–5; the expert runs 5–9
    assert makespan([[a]], 1) == 9.0
    b = a._replace(expert=1, state=State.COMPRESSED, p=10.0)
    # the worker: b's 0–2, 2–4, then a's 4–6, 6–8; compute: b 4–14, a 14–18
    assert makespan([[b, a]], 1) == 18.0
    # two workers: b's 0–2, a's 1–3 only after b's second 0–2; b 2–12, a 12–16
    assert makespan([[b, a]], 2) == 16.0
    assert makespan([], 1) == 0.0


@given(requests(states=LOADING, most=5), delays, st.integers(1, 3))
def test_execute_and_makespan_agree_where_they_model_the_same(asked, machine, workers):
    """One tensor of one chunk, free recovery. As recovery needs a worker
    in one only, there are workers enough whenever it is an operation of its own."""
    machine = machine.__class__(
        machine.e_read,
        machine.sm_read,
        machine.decompress,
        0.0,
        machine.expert_base,
        machine.expert_token,
        N=1,
    )
    plan = order(asked, machine, workers)
    blocks = schedule([whole(r, machine) for r in asked], workers)
    if any(r.state not in "SC" for r in asked):
        workers = 2 * len(asked)
    assert execute(asked, plan, machine, workers)[1] == pytest.approx(makespan(blocks, workers))


def brute_force(tasks, workers):
    """The best of every order of reads with every order of chunks."""
    waits_for, cost = {}, {}
    for task in tasks:
        seconds = {"read E": task.v, "read SM": task.u, "decompress": task.c, "recover": 0.0}
        for operation, before in operations(task).items():
            waits_for.setdefault(operation, set()).update(before)
            cost[operation] = seconds.get(operation.kind, task.p)
    of = {kind: [op for op in waits_for if op.kind == kind] for kind in RESOURCES}
    best = float("inf")
    for reads in itertools.permutations(of["read E"] + of["read SM"]):
        now, end = 0.0, {}
        for op in reads:
            now = end[op] = now + cost[op]
        for chunks in itertools.permutations(of["decompress"]):
            threads = [0.0] * workers
            for op in chunks:
                i = threads.index(min(threads))
                begin = max([threads[i], *(end[earlier] for earlier in waits_for[op])])
                threads[i] = end[op] = begin + cost[op]
            for op in of["recover"]:
                end[op] = max(end[earlier] for earlier in waits_for[op])
            now = 0.0
            for op in sorted(of["expert"], key=lambda op: max(end[e] for e in waits_for[op])):
                now = max(now, *(end[earlier] for earlier in waits_for[op])) + cost[op]
            best = min(best, now)
    return best


def test_the_optimum_is_the_best_of_all_schedules():
    rng, worse = random.Random(11), 0
    for tasks, workers in (random_instance(rng) for _ in range(300)):
        reads = sum(task.K * task.reads_e + task.type_1 for task in tasks)
        if factorial(reads) * factorial(sum(task.K for task in tasks)) > 3000:
            continue
        least = brute_force(tasks, workers)
        assert optimum(tasks, workers) == pytest.approx(least, rel=1e-9), (tasks, workers)
        worse += makespan(schedule(tasks, workers), workers) > least * (1 + 1e-9)
    assert worse > 10, "instances that Algorithm 1 solves anyway test nothing"


def test_algorithm_1_is_within_theorem_3_1():
    found = ratio_study(300, seed=12)
    assert found["violations"] == 0 and 1 <= found["mean"] <= found["worst"] < 3
    assert 0 < found["optimal"] < 1


def test_waiting_can_be_best():
    """One worker, a chunk in memory of an expert with little to do and one to come soon of one with
    much."""
    little = Task(0, 0, State.COMPRESSED, u=0.0, v=1.0, c=10.0, K=1, p=1.0)
    much = Task(1, 0, State.SM, u=0.0, v=1.0, c=10.0, K=1, p=50.0)
    assert optimum([little, much], 1) == 1 + 10 + 50 + 1
    assert makespan([[little, much]], 1) == 10 + 10 + 50
