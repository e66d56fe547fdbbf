from collections import Counter
from dataclasses import replace
from itertools import permutations
from math import inf, prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.offloading.load_queue import HOLDS, KINDS
from moelab.offloading.requests import Delays, Task, operations
from moelab.simulation.execution import RESOURCES, SimulatedMachine, execute, makespan, timetable
from moelab.specs import ExpertKey, State
from moelab.zipmoe.affinity import naive_order, order, schedule
from tests.zipmoe.instances import LOADING, Request, delays, requests, task_sets

UNIT = Delays(
    e_read=2.0, sm_read=3.0, decompress=4.0, recover=1.0, expert_base=5.0, expert_token=1.0, N=1
)
#: whose experts are one tensor each, of one shard
machines = delays.map(lambda machine: replace(machine, N=1, K=1))
TINY = 1e-9


def request(expert, state, keep="M", tokens=1, layer=0):
    return Request(ExpertKey(layer, expert), tokens, State(state), State(keep))


def at_most(spans, limit):
    """Whether at no moment more than `limit` of the (start, end) overlap."""
    edges = sorted(
        [(end - TINY, -1) for start, end in spans if end - start > 3 * TINY]
        + [(start, 1) for start, end in spans if end - start > 3 * TINY]
    )
    running = 0
    for _, step in edges:
        running += step
        if running > limit:
            return False
    return True


@settings(deadline=None)
@given(task_sets(), st.integers(1, 9), st.randoms())
def test_timetable_respects_graph_and_resources(tasks, workers, rng):
    rng.shuffle(tasks)  # any order at all
    times = timetable([tasks[:3], tasks[3:]], workers)
    wanted = {}
    for task in tasks:
        for operation, before in operations(task).items():
            wanted.setdefault(operation, []).extend(before)
    assert times.keys() == wanted.keys()
    for operation, before in wanted.items():
        assert all(times[earlier][1] <= times[operation][0] for earlier in before)
    for resource, limit in (("disk", 1), ("workers", workers), ("compute", 1)):
        assert at_most(
            [span for op, span in times.items() if RESOURCES[op.kind] == resource], limit
        )


@settings(deadline=None)
@given(task_sets(), st.integers(1, 4))
def test_timetable_never_idles_while_something_is_ready(tasks, workers):
    times = timetable([tasks], workers)
    for operation, (start, _) in times.items():
        resource = RESOURCES[operation.kind]
        if resource == "stream":
            continue
        before = [times[op][1] for task in tasks for op in operations(task).get(operation, ())]
        ready = max(before, default=0.0)
        others = [
            span for op, span in times.items() if RESOURCES[op.kind] == resource and op != operation
        ]
        limit = workers if resource == "workers" else 1
        # in each moment between being ready and starting, all servers are busy; moments between
        # edges suffice
        edges = sorted({ready, start, *(t for span in others for t in span if ready < t < start)})
        for left, right in zip(edges, edges[1:], strict=False):
            middle = (left + right) / 2
            if right - left > TINY:
                assert sum(a <= middle < b for a, b in others) == limit


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


def check(events, asked, workers, start, end):
    """Resources, precedence and completeness of one step's events."""
    state = {r.key.expert: r.state for r in asked}
    tokens = {r.key.expert: r.tokens for r in asked}
    of = {}
    for event in events:
        assert event.start >= start and event.end <= end + TINY and event.layer == 2
        if event.kind != "wait":
            assert (event.expert, event.kind) not in of, "done twice"
            of[event.expert, event.kind] = event
    by_resource = {}
    for event in events:
        by_resource.setdefault(event.resource, []).append((event.start, event.end))
    assert by_resource.keys() <= {"disk", "compute", *(f"worker {i}" for i in range(workers))}
    assert all(at_most(spans, 1) for spans in by_resource.values())
    for expert, was in state.items():
        kinds = {kind for who, kind in of if who == expert}
        run = of[expert, "expert"]
        if was is State.FULL:
            assert kinds == {"expert"}
            continue
        got = {"read E": -inf if was.has_e else None, "read SM": -inf if was.has_sm else None}
        for kind, parts in (("read", ("E", "SM")), ("read E", ("E",)), ("read SM", ("SM",))):
            for part in parts:
                if kind in kinds:
                    assert got[f"read {part}"] is None, "read though it was in memory"
                    got[f"read {part}"] = of[expert, kind].end
        assert None not in got.values()
        if "decode" in kinds:
            assert not kinds & {"decompress", "recover"}
            assert of[expert, "decode"].start >= max(got.values())
            assert run.start >= of[expert, "decode"].end
        else:
            assert of[expert, "decompress"].start >= got["read E"]
            assert of[expert, "recover"].start >= max(of[expert, "decompress"].end, got["read SM"])
            assert run.start >= of[expert, "recover"].end
        assert tokens[expert]
    assert {who for who, kind in of if kind == "expert"} == state.keys()


@settings(max_examples=300, deadline=None)
@given(
    requests(),
    machines,
    st.integers(1, 5),
    st.none() | st.integers(1, 5),
    st.sampled_from([0.0, 12.5]),
    st.booleans(),
)
def test_execute_respects_the_graph(asked, machine, workers, in_flight, start, naive):
    plan = naive_order(asked) if naive else order(asked, machine, workers)
    events, end = (
        execute(asked, plan, machine, workers, start, layer=2)
        if in_flight is None
        else limited(asked, plan, machine, workers, in_flight, start)
    )
    check(events, asked, workers, start, end)
    assert [event.start for event in events] == sorted(event.start for event in events)
    assert sum(event.bytes for event in events) == sum(
        (3 * (not r.state.has_e) + 5 * (not r.state.has_sm))
        for r in asked
        if r.state is not State.FULL
    )
    # compute is busy or says that it waits
    compute = sorted((event.start, event.end) for event in events if event.resource == "compute")
    now = start
    for begin, stop in compute:
        assert begin == pytest.approx(now)
        now = stop
    assert now == pytest.approx(end)


def limited(asked, plan, machine, workers, in_flight, start=0.0):
    """The step with so many slots beside those of a cache that has room for what is there before
    and after it."""
    slots = {
        kind: max(
            sum(kind in HOLDS[state] for state in states)
            for states in ([r.state for r in asked], [r.keep for r in asked])
        )
        + in_flight
        for kind in KINDS
    }
    pipeline = SimulatedMachine(
        machine, workers, slots, ((r.key, r.state) for r in asked), start=start
    )
    pipeline.queue.demand(pipeline.begin(2, asked), plan)
    pipeline.run()
    return pipeline.timeline(), pipeline.now


@settings(max_examples=150, deadline=None)
@given(requests(), machines, st.integers(1, 4), st.integers(1, 4))
def test_slots_limit_what_is_in_flight(asked, machine, workers, in_flight):
    """Where nothing is kept and nothing is there, an expert has its slots from its first operation
    to its last."""
    asked = [r._replace(state=State.MISSED, keep=State.MISSED) for r in asked]
    events, _ = limited(asked, order(asked, machine, workers), machine, workers, in_flight)
    spans = []
    for r in asked:
        mine = [event for event in events if event.expert == r.key.expert]
        spans.append((min(event.start for event in mine), max(event.end for event in mine)))
    assert at_most(spans, in_flight)


@settings(deadline=None)
@given(requests(states=LOADING, most=5), delays, st.integers(1, 3))
def test_execute_and_makespan_agree_where_they_model_the_same(asked, machine, workers):
    """One tensor of one chunk, free recovery, no request of both parts: the two clocks must show
    the same. As recovery needs a worker in one only, there are workers enough whenever it is an
    operation of its own."""
    machine = Delays(
        machine.e_read,
        machine.sm_read,
        machine.decompress,
        0.0,
        machine.expert_base,
        machine.expert_token,
        K=1,
        N=1,
    )
    plan, blocks = (
        order(asked, machine, workers),
        schedule([machine.whole(r) for r in asked], workers),
    )
    if any(kind == "both" for _, kind in plan.reads):
        return
    if any(not r.state.has_sm for r in asked):
        workers = 2 * len(asked)
    assert execute(asked, plan, machine, workers)[1] == pytest.approx(makespan(blocks, workers))


def timeline(asked, plan, workers=1):
    events, end = execute(asked, plan, UNIT, workers)
    return [(e.resource, e.kind, e.expert, e.start, e.end) for e in events], end


def test_one_missed_expert():
    asked = [request(0, "M")]
    events, end = timeline(asked, order(asked, UNIT, 1))
    assert events == [
        ("disk", "read", 0, 0, 5),
        ("compute", "wait", -1, 0, 10),
        ("worker 0", "decode", 0, 5, 10),
        ("compute", "expert", 0, 10, 16),
    ]
    assert end == 16


def test_the_tensors_of_an_expert_are_decoded_side_by_side():
    """Three tensors, of 5/3 s each after a read of 5 s: on three workers, on two, on one; then the
    expert."""
    asked, machine = [request(0, "M")], replace(UNIT, N=3)
    for workers, expected in (
        (4, 5 + 5 / 3 + 6),
        (3, 5 + 5 / 3 + 6),
        (2, 5 + 10 / 3 + 6),
        (1, 5 + 5 + 6),
    ):
        events, end = execute(asked, order(asked, machine, workers), machine, workers)
        assert end == pytest.approx(expected) and sum(e.kind == "decode" for e in events) == 3
        assert len({e.resource for e in events if e.kind == "decode"}) == min(workers, 3)


def test_a_lone_miss_is_decoded_by_all_workers():
    """Shards of 5/4 s where there are more workers than tensors; a second expert is there before it
    comes to that."""
    machine = replace(UNIT, K=4)
    for states, workers, expected in (
        ("M", 4, 5 + 5 / 4 + 6),
        ("M", 3, 5 + 5 / 2 + 6),
        ("M", 1, 5 + 5 + 6),
        ("CC", 2, 5 + 12),
        ("C", 2, 5 / 2 + 6),
    ):
        asked = [request(i, state) for i, state in enumerate(states)]
        assert execute(asked, order(asked, machine, workers), machine, workers)[1] == pytest.approx(
            expected
        )


@settings(max_examples=100, deadline=None)
@given(requests(), delays, st.integers(1, 4))
def test_workers_decode_every_tensor_once_and_never_wait_for_nothing(asked, machine, workers):
    loads = sum(r.state is not State.FULL for r in asked)
    events, end = execute(asked, order(asked, machine, workers), machine, workers)
    work = [e for e in events if e.resource.startswith("worker")]
    assert sum(e.end - e.start for e in work) == pytest.approx(loads * machine.decode_at_once)
    kinds, tensors = (
        Counter(e.kind for e in work),
        loads * (machine.N if machine.decode_at_once else 1),
    )
    assert kinds["decompress"] == kinds["recover"]
    assert tensors <= kinds["decode"] + kinds["recover"] <= tensors * machine.K


def test_decompression_while_the_rest_is_read():
    asked = [request(0, "E")]
    events, end = timeline(asked, order(asked, UNIT, 1))
    assert [e[1:] for e in events if e[0] != "compute"] == [
        ("read SM", 0, 0, 3),
        ("decompress", 0, 0, 4),
        ("recover", 0, 4, 5),
    ]
    assert end == 11


def test_hits_run_first_and_only_run():
    asked = [request(0, "M"), request(1, "F"), request(2, "F", tokens=3)]
    events, end = timeline(asked, order(asked, UNIT, 2))
    assert [e for e in events if e[0] == "compute"] == [
        ("compute", "expert", 1, 0, 6),
        ("compute", "expert", 2, 6, 14),
        ("compute", "expert", 0, 14, 20),
    ]
    assert end == 20
    assert timeline(asked[1:], order(asked[1:], UNIT, 2))[1] == 14


def test_more_experts_in_a_block_than_slots_is_no_deadlock():
    asked = [request(e, "M") for e in range(4)]
    machine = Delays(
        e_read=2.0, sm_read=3.0, decompress=0.5, recover=0.1, expert_base=0.5, expert_token=0.0, N=1
    )
    plan = order(asked, machine, 1)
    assert plan.io[:4] == [(0, "E"), (1, "E"), (2, "E"), (3, "E")]
    events, _ = limited(asked, plan, machine, 1, 1)
    assert [(e.kind, e.expert) for e in events if e.resource == "disk"] == [
        (kind, e) for e in range(4) for kind in ("read E", "read SM")
    ]


def test_an_expert_that_is_kept_takes_a_slot_of_the_cache():
    """One slot beside the cache's: of two experts that are kept whole, the second waits only for
    chunks' slots; of two that are not, also until the first is computed."""
    for keep, second in (("F", 10), ("M", 16)):
        asked = [request(0, "M", keep), request(1, "M", keep)]
        events, _ = limited(asked, naive_order(asked), UNIT, 1, 1)
        assert [e.start for e in events if e.resource == "disk"] == [0, second]


def test_work_beside_other_work_by_hand():
    """A hit computes while a missed expert is read, at half its speed, then while it is decoded, at
    a third; reading takes 5/4, decoding twice as long beside it."""
    machine = replace(
        UNIT,
        beside={
            "expert beside read": 2.0,
            "read beside expert": 1.25,
            "expert beside decode": 3.0,
            "decode beside expert": 2.0,
        },
    )
    asked = [request(0, "M"), request(1, "F")]
    events, end = execute(asked, order(asked, machine, 1), machine, 1)
    # at 6.25, when 5 s are read, 6.25 / 2 of 6 s are computed; the other 2.875 take 8.625; by then
    # 4.3125 of 5 s are decoded, and the rest is alone
    assert [(e.kind, e.expert, e.start, e.end) for e in events] == [
        ("read", 0, 0, 6.25),
        ("expert", 1, 0, 14.875),
        ("decode", 0, 6.25, 15.5625),
        ("wait", -1, 14.875, 15.5625),
        ("expert", 0, 15.5625, 21.5625),
    ]
    assert end == 21.5625


@settings(max_examples=150, deadline=None)
@given(
    requests(),
    machines,
    st.integers(1, 3),
    st.fixed_dictionaries(
        {
            f"{a} beside {b}": st.floats(0.5, 4)
            for a, b in permutations(("read", "decode", "expert"), 2)
        },
        optional={
            f"{a} beside {b} and {c}": st.floats(0.5, 4)
            for b, c, a in permutations(("decode", "expert", "read"))
            if b < c
        },
    ),
)
def test_slowed_down_everybody_does_the_work_that_there_is(asked, machine, workers, beside):
    """The rates of each event, added up between all moments at which anything begins or ends, are
    its work alone. What two others together do to it is their factors' product only where it was
    not measured."""
    machine = replace(machine, beside=beside)
    events, end = execute(asked, order(asked, machine, workers), machine, workers, layer=2)
    check(events, asked, workers, 0.0, end)
    tokens = {r.key.expert: r.tokens for r in asked}
    alone = {
        "read E": machine.e_read,
        "read SM": machine.sm_read,
        "read": machine.e_read + machine.sm_read,
        "decompress": machine.decompress,
        "recover": machine.recover,
        "decode": machine.decode_at_once,
    }
    kind = {"disk": "read", "compute": "expert"}
    events = [event for event in events if event.kind != "wait"]
    moments = sorted({moment for event in events for moment in (event.start, event.end)})
    for event in events:
        done = 0.0
        for a, b in zip(moments, moments[1:]):
            if event.start <= a and b <= event.end:
                others = sorted(
                    kind.get(other.resource, "decode")
                    for other in events
                    if other is not event and other.start <= a and b <= other.end
                )
                what = f"{kind.get(event.resource, 'decode')} beside "
                done += (b - a) / (
                    beside.get(what + " and ".join(others))
                    or prod(beside.get(what + other, 1.0) for other in others)
                )
        wanted = (
            machine.expert(tokens[event.expert]) if event.kind == "expert" else alone[event.kind]
        )
        assert done == pytest.approx(wanted, abs=1e-9)


def test_one_tokens_experts_are_computed_by_one_thread_while_others_are_loaded():
    machine = replace(UNIT, one_thread=7.0)
    for states, tokens, expected in (
        ("MF", 1, [(1, 0, 7), (0, 10, 17)]),
        ("FF", 1, [(0, 0, 6), (1, 6, 12)]),
        ("MF", 2, [(1, 0, 7), (0, 10, 16)]),
    ):
        asked = [request(0, states[0]), request(1, states[1], tokens=tokens)]
        events, _ = execute(asked, order(asked, machine, 1), machine, 1)
        assert [(e.expert, e.start, e.end) for e in events if e.kind == "expert"] == expected


def test_beside_a_disk_that_is_waited_for_all_threads_compute():
    machine = replace(UNIT, one_thread=7.0)
    simulated = SimulatedMachine(machine, 1, dict.fromkeys(KINDS, 8))
    for layer in range(3):
        asked = [request(expert, "M", layer=layer) for expert in range(2)]
        simulated.queue.demand(simulated.begin(layer, asked), order(asked, machine, 1))
        simulated.run()
    took = [e.end - e.start for e in simulated.timeline() if e.kind == "expert"]
    assert took == [
        7.0,
        7.0,
        6.0,
        6.0,
        6.0,
        6.0,
    ]  # nothing has been waited for before the first layer


def test_experts_in_memory_are_computed_in_one_call_where_the_executor_does():
    machine = replace(
        UNIT, together=((3, 10.0),)
    )  # one takes 6, so each further one 2, up to three
    for states, tokens, expected in (
        ("FFFM", 1, [(-1, 0, 10), (3, 10, 16)]),
        ("FFMM", 1, [(-1, 0, 8), (2, 10, 16)]),
        ("FMMM", 1, [(0, 0, 6)]),
        ("FFFF", 1, [(-1, 0, 10)]),
        ("FF", 2, [(-1, 0, 14)]),
    ):
        asked = [request(i, state, tokens=tokens) for i, state in enumerate(states)]
        events, _ = execute(asked, order(asked, machine, 1), machine, 1)
        found = [(e.expert, e.start, e.end) for e in events if e.kind == "expert"]
        assert found[: len(expected)] == expected
        assert machine.at_once(asked[:1]) == machine.expert(tokens)


def test_threads_wake_up_before_an_expert_that_is_waited_for():
    """Read by 2, decoded by 4, computed 2 s later, for 6 s; what comes meanwhile has not been
    waited for."""
    machine = replace(UNIT, handover=2.0, e_read=1.0, sm_read=1.0, decompress=1.0)
    asked = [request(0, "M"), request(1, "M"), request(2, "F")]
    events, end = execute(asked, naive_order(asked), machine, 1)
    found = {e.expert: (e.start, e.end) for e in events if e.kind == "expert"}
    assert found == {2: (0, 6), 0: (6, 12), 1: (12, 18)} and end == 18  # 0 was there by 4, 1 by 6
    events, end = execute(asked[:1], naive_order(asked[:1]), machine, 1)
    assert [(e.kind, e.start, e.end) for e in events if e.resource == "compute"] == [
        ("wait", 0, 6),
        ("expert", 6, 12),
    ]


def test_nothing_to_execute():
    assert execute([], order([], UNIT, 1), UNIT, 1, start=3.0) == ([], 3.0)


def test_errors():
    asked = [request(0, "M"), request(1, "F")]
    plan = order(asked, UNIT, 1)
    with pytest.raises(ValueError, match="0 workers"):
        execute(asked, plan, UNIT, 0)
    with pytest.raises(ValueError, match="the requests leave"):
        execute(asked[1:], plan, UNIT, 1)
