"""The graph of operations (Fig. 6), and a schedule's times against it and by hand."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.simulation.costs import Delays
from moelab.specs import ExpertKey, State
from moelab.zipmoe.affinity import order, schedule
from moelab.zipmoe.tasks import (
    RESOURCES,
    Operation,
    Task,
    execute,
    makespan,
    operations,
    timetable,
    whole,
)
from tests.timelines import at_most
from tests.zipmoe.instances import LOADING, Request, delays, requests, task_sets


def graph(state, K=2):
    return operations(Task(7, 1, state, u=1.0, v=1.0, c=1.0, K=K, p=1.0))


def test_a_missed_tensor():
    e0, e1 = (Operation("read E", 7, 1, chunk) for chunk in (0, 1))
    d0, d1 = (Operation("decompress", 7, 1, chunk) for chunk in (0, 1))
    sm, recover = Operation("read SM", 7, 1), Operation("recover", 7, 1)
    assert graph(State.MISSED) == {
        e0: (),
        d0: (e0,),
        e1: (),
        d1: (e1,),
        sm: (),
        recover: (d0, d1, sm),
        Operation("expert", 7): (recover,),
    }


@pytest.mark.parametrize(
    "state, kinds",
    [
        (State.E, ["decompress", "decompress", "read SM", "recover", "expert"]),
        (State.SM, ["read E", "decompress", "read E", "decompress", "recover", "expert"]),
        (State.COMPRESSED, ["decompress", "decompress", "recover", "expert"]),
        (State.FULL, ["expert"]),
    ],
)
def test_what_is_in_memory_is_not_read(state, kinds):
    assert [operation.kind for operation in graph(state)] == kinds
    if state is not State.FULL:
        task = Task(0, 0, state, u=3.0, v=0.5, c=1.0, K=4, p=1.0)
        cost = {"read E": 0.5, "read SM": 3.0}
        assert task.io == sum(cost.get(operation.kind, 0.0) for operation in operations(task))


def test_an_expert_as_one_task():
    found = whole(
        Request(ExpertKey(0, 5), 4, State.MISSED, State.MISSED),
        Delays(12.0, 9.0, 24.0, 1.0, 5.0, 0.5),
    )
    assert found == Task(5, 0, State.MISSED, u=9.0, v=12.0, c=25.0, K=1, p=7.0)


@settings(deadline=None, max_examples=60)
@given(task_sets(), st.integers(1, 9), st.randoms())
def test_a_timetable_respects_graph_and_resources_and_never_idles(tasks, workers, rng):
    rng.shuffle(tasks)  # any order at all
    times, wanted = timetable([tasks[:3], tasks[3:]], workers), {}
    for task in tasks:
        for operation, before in operations(task).items():
            wanted.setdefault(operation, []).extend(before)
    assert times.keys() == wanted.keys()
    limits = {"disk": 1, "workers": workers, "compute": 1}
    spans = {
        resource: {op: span for op, span in times.items() if RESOURCES[op.kind] == resource}
        for resource in limits
    }
    for resource, limit in limits.items():
        assert at_most(spans[resource].values(), limit)
    for operation, before in wanted.items():
        start = times[operation][0]
        ready = max((times[earlier][1] for earlier in before), default=0.0)
        assert ready <= start
        resource = RESOURCES[operation.kind]
        others = [s for op, s in spans.get(resource, {}).items() if op != operation]
        # all servers are busy between being ready and starting; moments between edges suffice
        edges = sorted({ready, start, *(t for s in others for t in s if ready < t < start)})
        for left, right in zip(edges, edges[1:]):
            if right - left > 1e-9:
                busy = sum(a <= (left + right) / 2 < b for a, b in others)
                assert busy == limits[resource]


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


@settings(deadline=None, max_examples=60)
@given(requests(states=LOADING, most=5), delays, st.integers(1, 3))
def test_execute_and_makespan_agree_where_they_model_the_same(asked, machine, workers):
    """One tensor of one chunk, free recovery, no request of both parts: the two clocks must show
    the same. As recovery needs a worker in one only, there are workers enough whenever it is an
    operation of its own."""
    base, token = machine.expert_base, machine.expert_token
    machine = Delays(machine.e_read, machine.sm_read, machine.decompress, 0.0, base, token, N=1)
    plan = order(asked, machine, workers)
    blocks = schedule([whole(r, machine) for r in asked], workers)
    if any(a == b for (a, _), (b, _) in pairwise(plan.io)):
        return
    if any(r.state not in "SC" for r in asked):
        workers = 2 * len(asked)
    assert execute(asked, plan, machine, workers)[1] == pytest.approx(makespan(blocks, workers))
