"""One layer's step in simulated time: the rules that every step keeps, and clocks by hand."""

from collections import Counter
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import ExpertKey, State
from moelab.cache.residency import Step
from moelab.offloading.load_queue import HOLDS, KINDS, given_order
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.machine import SimulatedMachine
from moelab.zipmoe.affinity import naive_order, order
from notebooks.studies.optimal_schedule import execute
from tests.timelines import at_most
from tests.zipmoe.instances import Request, delays, requests

UNIT = Delays(
    e_read=2.0, sm_read=3.0, decompress=4.0, recover=1.0, expert_base=5.0, expert_token=1.0, N=1
)
#: whose experts are one tensor each
machines = delays.map(lambda machine: replace(machine, N=1))
TINY = 1e-9


def request(expert, state, keep="M", tokens=1):
    return Request(ExpertKey(0, expert), tokens, State(state), State(keep))


def limited(asked, plan, machine, workers, in_flight, start=0.0):
    """The step with so many slots beside those of pools that hold what is there before it, and what
    stays."""
    before, after = (
        (Counter(states) for states in zip(*((r.state, r.keep) for r in asked)))
        if asked
        else ({}, {})
    )
    slots = {
        kind: sum(max(before.get(s, 0), after.get(s, 0)) for s in State if kind in HOLDS[s])
        + in_flight
        for kind in KINDS
    }
    resident = ((r.key, r.state) for r in asked)
    played, step = (
        SimulatedMachine(Machine(machine, workers), slots, resident, 0, start),
        Step(2, asked, []),
    )
    played.begin(step)
    played.queue.begin(2, step.loads, [], played.ready, lambda _: plan)
    played.run()
    return played.timeline(), played.now


def check_expert(was, of):
    """The events of one expert, by kind: each part once, and in order."""
    run = of.pop("expert")
    if was is State.FULL:
        return not of
    read = {"E": -inf if was in "EC" else None, "SM": -inf if was in "SC" else None}
    for kind, parts in (("read", ("E", "SM")), ("read E", ("E",)), ("read SM", ("SM",))):
        for part in parts if kind in of else ():
            assert read[part] is None, "read though it was in memory"
            read[part] = of[kind].end
    if "decode" in of:
        assert not of.keys() & {"decompress", "recover"}
        return max(read.values()) <= of["decode"].start and of["decode"].end <= run.start
    assert read["E"] <= of["decompress"].start
    assert max(of["decompress"].end, read["SM"]) <= of["recover"].start
    return of["recover"].end <= run.start


@given(
    requests(),
    machines,
    st.integers(1, 5),
    st.none() | st.integers(1, 5),
    st.sampled_from([0.0, 12.5]),
    st.booleans(),
)
def test_a_step_keeps_the_graph_and_one_thing_at_a_time(
    asked, machine, workers, in_flight, start, naive
):
    plan = naive_order(asked) if naive else order(asked, machine, workers)
    if in_flight is None:
        events, end = execute(asked, plan, machine, workers, start, layer=2)
    else:
        events, end = limited(asked, plan, machine, workers, in_flight, start)
    assert [event.start for event in events] == sorted(event.start for event in events)
    by_resource = {}
    for event in events:
        assert start <= event.start and event.end <= end + TINY and event.layer == 2
        by_resource.setdefault(event.resource, []).append((event.start, event.end))
    assert by_resource.keys() <= {"disk", "compute", *(f"worker {i}" for i in range(workers))}
    assert all(at_most(spans, 1) for spans in by_resource.values())
    for r in asked:
        mine = [event for event in events if event.expert == r.key.expert]
        assert len({event.kind for event in mine}) == len(mine), "done twice"
        assert check_expert(r.state, {event.kind: event for event in mine})
    missing = [r for r in asked if r.state is not State.FULL]
    needed = sum(3 * (r.state not in "EC") + 5 * (r.state not in "SC") for r in missing)
    assert sum(event.bytes for event in events) == needed
    now = start
    for begin, stop in sorted(by_resource.get("compute", [])):  # busy, or says that it waits
        assert begin == pytest.approx(now)
        now = stop
    assert now == pytest.approx(end)


@pytest.mark.parametrize(
    "states, expected",
    [
        (
            "M",
            [("disk", "read E", 0, 0, 2), ("disk", "read SM", 0, 2, 5)]
            + [("worker 0", "decompress", 0, 2, 6), ("worker 0", "recover", 0, 6, 7)]
            + [("compute", "wait", -1, 0, 7), ("compute", "expert", 0, 7, 13)],
        ),
        (
            "E",
            [("disk", "read SM", 0, 0, 3), ("worker 0", "decompress", 0, 0, 4)]
            + [("compute", "wait", -1, 0, 5), ("worker 0", "recover", 0, 4, 5)]
            + [("compute", "expert", 0, 5, 11)],
        ),
        (
            "MF",
            [("compute", "expert", 1, 0, 6), ("compute", "wait", -1, 6, 7)]
            + [("disk", "read E", 0, 0, 2), ("disk", "read SM", 0, 2, 5)]
            + [("worker 0", "decompress", 0, 2, 6), ("worker 0", "recover", 0, 6, 7)]
            + [("compute", "expert", 0, 7, 13)],
        ),
    ],
)
def test_steps_by_hand(states, expected):
    """A missed expert; one whose exponents are there; one beside a hit, which is computed first."""
    asked = [request(i, state) for i, state in enumerate(states)]
    events, end = execute(asked, order(asked, UNIT, 1), UNIT, 1)
    found = [(e.resource, e.kind, e.expert, e.start, e.end) for e in events]
    assert sorted(found) == sorted(expected) and end == expected[-1][-1]


@pytest.mark.parametrize(
    "state, workers, order, end, pieces",
    [
        ("M", 1, order, 9.0, 2),  # decompressing 1–5, 5–9 beside reading SM, 1–4
        ("M", 3, order, 4.0, 8),  # eight shards by three, within SM’s reading
        ("M", 1, naive_order, 12.0, 2),  # in one read, nothing begins before 4
        ("M", 3, naive_order, 7.0, 8),  # eight shards by three
        ("C", 4, order, 2.0, 8),
        ("C", 2, order, 4.0, 5),  # the last tensor would leave a worker idle
        ("S", 8, order, 2.0, 8),
    ],
)
def test_a_lone_load_is_decoded_by_all_workers_while_it_is_read(state, workers, order, end, pieces):
    """Two tensors of four shards, each of them 4 s; recovery and computing take no time."""
    machine = Delays(1.0, 3.0, 8.0, 0.0, 0.0, 0.0, N=2, shards=4)
    asked = [request(0, state)]
    events, found = execute(asked, order(asked, machine, workers), machine, workers)
    assert found == end
    assert sum(event.kind in ("decode", "recover") for event in events) == pieces


def test_more_experts_in_a_block_than_slots_is_no_deadlock():
    asked, machine = [request(e, "M") for e in range(4)], replace(UNIT, decompress=0.5, recover=0.1)
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


def test_an_expert_that_is_waited_for_is_handed_over_and_hits_are_one_call():
    """Of hits computed at once; by hand."""
    machine = Machine(replace(UNIT, together=((2, 7.0),)), handover=0.5)
    asked = [request(0, "F", "F"), request(1, "F", "F"), request(2, "M")]
    played = SimulatedMachine(machine, dict.fromkeys(KINDS, 5), ((r.key, r.state) for r in asked))
    step = Step(0, asked, [])
    played.begin(step)
    played.queue.begin(0, step.loads, [], played.ready, given_order)
    played.run()
    compute = [tuple(e[1:6]) for e in played.timeline() if e.resource == "compute"]
    assert compute == [
        ("expert", 0, -1, 0, 7),
        ("wait", 0, -1, 7, 10.5),
        ("expert", 0, 2, 10.5, 16.5),
    ]


def test_an_order_of_other_experts_is_refused():
    with pytest.raises(ValueError, match="the order has experts"):
        execute([request(0, "M")], given_order([request(1, "M")]), UNIT, 1)


def test_a_gpu_recovers_while_planes_cross_its_link():
    """By hand: planes are in memory beside it and take 3 each; decompressing takes 4, joining 1."""
    far = replace(UNIT, e_read=0.0, sm_read=0.0, send=6.0)
    asked = [request(0, "M"), request(1, "M")]
    events, end = limited(asked, naive_order(asked), far, 1, 2)
    found = {
        what: [(e.expert, e.start, e.end) for e in events if e.resource == what]
        for what in ("link", "worker 0", "gpu")
    }
    assert found["link"] == [(0, 0, 3), (1, 3, 6), (0, 6, 9), (1, 9, 12)]
    assert found["worker 0"] == [(0, 0, 4), (1, 4, 8)]
    assert found["gpu"] == [(0, 9, 10), (1, 12, 13)]
    assert end == 10 + 2 * 6
    one, alone = [request(0, "M")], replace(far, send=0.0)
    assert limited(one, naive_order(one), far, 1, 1)[1] == 4 + 3 + 1 + 6
    assert limited(one, naive_order(one), alone, 1, 1)[1] == 4 + 1 + 6
