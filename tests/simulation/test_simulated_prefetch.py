"""Fetching ahead in simulated time: against closed forms, exact byte counts, conservation of work,
and the engine."""

import random
from collections import Counter, defaultdict
from dataclasses import asdict
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.cache.cross_token import CrossToken
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.offloading.load_queue import PIECE
from moelab.offloading.offload import offload
from moelab.offloading.prefetch_gate import PrefetchGate
from moelab.offloading.requests import Delays
from moelab.registry import make
from moelab.simulation.execution import execute
from moelab.simulation.simulator import flat, simulate
from moelab.specs import State
from moelab.speculate import Speculation
from moelab.zipmoe.affinity import default_order
from tests.offloading.test_offload import DELAYS, generate
from tests.timelines import check

seconds = st.integers(0, 4).map(float) | st.floats(0.01, 4)
machines = st.builds(
    Delays,
    e_read=seconds,
    sm_read=seconds,
    decompress=seconds,
    recover=seconds,
    expert_base=seconds,
    expert_token=seconds,
    e_bytes=st.just(3),
    sm_bytes=st.just(5),
)


class Always(PrefetchGate):
    """Fetches whatever is guessed."""

    def __init__(self):
        super().__init__(trials=False)

    def pays(self, of, rank):
        return True


@st.composite
def runs(draw):
    """(L, E, steps, forwards, predictions, pools, options); predictions are right, wrong, both,
    repeated, of no such expert."""
    L, E, chance = draw(st.integers(1, 4)), draw(st.integers(2, 9)), draw(st.randoms())
    steps = [
        [
            (
                layer,
                {
                    e: chance.randint(1, 3)
                    for e in chance.sample(range(E), chance.randint(0, min(E, 4)))
                },
            )
            for layer in range(L)
        ]
        for _ in range(draw(st.integers(1, 5)))
    ]
    predictions = [
        [
            (
                layer,
                [chance.randint(0, E) for _ in range(chance.randint(0, 4))]
                + list(experts)[: chance.randint(0, 4)],
            )
            for layer, experts in forward
        ]
        for forward in steps
    ]
    options = {
        "workers": draw(st.integers(1, 3)),
        "staging": draw(st.none() | st.integers(1, 3)),
        "other": (draw(seconds), 0.0),
        "head": (draw(seconds), 0.0),
        "start": draw(st.sampled_from([0.0, 7.3])),
    }
    pools = draw(
        st.sampled_from([Pools(F=5), Pools(F=2, C=2, S=1, E=2), Pools(C=3, S=3, E=3), Pools()])
    )
    return L, E, steps, [(1, "decode")] * len(steps), predictions, pools, options


@settings(deadline=None)
@given(runs(), machines)
def test_without_guesses_layers_are_executed_one_by_one(run, machine):
    L, E, steps, forwards, predictions, pools, options = run
    options |= {"staging": None}  # as `execute` has slots for all
    asked, events, now = Residency(L, E, pools), [], options["start"]
    for forward in steps:
        for layer, experts in forward:
            now += options["other"][0]
            requests = asked.begin(layer, experts).requests
            plan = default_order(requests, machine, options["workers"])
            found, now = execute(requests, plan, machine, options["workers"], now, layer)
            events += found
        now += options["head"][0]
    for more in ({}, {"ahead": 3}, {"ahead": 0, "predictions": predictions}):
        played = simulate(steps, forwards, Residency(L, E, pools), machine, **options, **more)
        assert [event for event in played.events if event.kind != "other"] == events
        assert played.forwards[-1].end == now and not any(asdict(played.fetched).values())


@settings(deadline=None, max_examples=150)
@given(
    runs(),
    machines,
    st.integers(1, 5),
    st.integers(1, 3),
    st.sampled_from([PrefetchGate, Always]),
    st.sampled_from([1, 3, PIECE]),
    st.booleans(),
)
def test_guesses_decide_nothing_and_every_byte_is_accounted_for(
    run, machine, ahead, distance, gate, piece, across
):
    L, E, steps, forwards, predictions, pools, options = run
    alone = Residency(L, E, pools)
    decisions = [alone.begin(*step) for step in flat(steps)]
    inside = Residency(L, E, pools)
    with mock.patch("moelab.offloading.load_queue.PIECE", piece):
        played = simulate(
            steps,
            forwards,
            inside,
            machine,
            **options,
            predictions=predictions,
            ahead=ahead,
            distance=distance,
            gate=gate(),
            across=CrossToken(E) if across else None,
        )
    assert played.counters == alone.counters
    assert {state: inside.resident(state) for state in State} == {
        state: alone.resident(state) for state in State
    }
    assert check(played.events) == []
    computed = Counter(
        (event.layer, event.expert) for event in played.events if event.kind == "expert"
    )
    assert computed == Counter(
        (layer, expert) for layer, experts in flat(steps) for expert in experts
    )
    demanded = sum(
        (not r.state.has_e) * machine.e_bytes + (not r.state.has_sm) * machine.sm_bytes
        for step in decisions
        for r in step.requests
        if r.state is not State.FULL
    )
    fetched, found = played.fetched, played.metrics()
    assert found.prefetched == asdict(fetched)
    assert found.read_bytes == demanded + fetched.wasted
    assert 0 <= fetched.wasted <= fetched.nbytes <= found.read_bytes
    assert 0 <= fetched.early <= fetched.used <= fetched.begun
    # a layer is computed in one piece, after its "other" and before the next one's
    compute = [
        event for event in played.events if event.resource == "compute" and event.end > event.start
    ]
    clock = options["start"]
    for event in sorted(compute, key=lambda event: event.start):
        assert event.start == pytest.approx(clock)
        clock = event.end
    assert clock == pytest.approx(played.forwards[-1].end)


@settings(deadline=None, max_examples=150)
@given(
    st.integers(2, 5),
    st.integers(1, 4),
    st.floats(0.1, 5),
    st.floats(0.1, 5),
    st.floats(0, 9),
    st.integers(1, 3),
)
def test_perfect_guesses_by_a_closed_form(L, K, read, compute, other, tokens):
    """Nothing to decode and nothing kept: the first layer's experts come one after another, and
    every further layer takes the longer of copying and computing: what eq. (1) says can be hidden
    is hidden."""
    machine = Delays(read / 3, read * 2 / 3, 0, 0, compute, 0, e_bytes=1, sm_bytes=2)
    steps = [[(layer, dict.fromkeys(range(K), 1)) for layer in range(L)]] * tokens

    def tpot(**more):
        return (
            simulate(
                steps,
                [(1, "decode")] * tokens,
                Residency(L, K, Pools()),
                machine,
                other=(other, 0.0),
                **more,
            )
            .metrics()
            .tpot
        )

    first = other + max(K * read + compute, read + K * compute)
    assert tpot() == pytest.approx(L * first)
    assert tpot(predictions=steps, ahead=K, gate=Always()) == pytest.approx(
        first + (L - 1) * max(K * read, other + K * compute)
    )


def test_copying_takes_as_long_as_computing_or_computing_nothing():
    steps = [[(layer, {0: 1, 1: 1}) for layer in range(3)]]
    for machine, other, demand, guessed in (
        (Delays(1, 1, 0, 0, 1, 0, e_bytes=1), 2, 3 * 7, 7 + 2 * 4),
        (Delays(1, 1, 0, 0, 0, 0, e_bytes=1), 0, 3 * 4, 3 * 4),
    ):
        for predictions, took in ((None, demand), (steps, guessed)):
            played = simulate(
                steps,
                [(1, "decode")],
                Residency(3, 2, Pools()),
                machine,
                other=(other, 0.0),
                predictions=predictions,
                ahead=2,
                gate=Always(),
            )
            assert played.forwards[0].end == took
            assert (played.fetched.used, played.fetched.wasted) == (
                0 if predictions is None else 4,
                0,
            )


def test_a_read_under_way_is_not_interrupted_and_the_layer_waits_for_it():
    """By hand: nothing else to do, "other" takes 3 s, a read 2 s, an expert 1 s; expert 5 is
    guessed, 0 needed."""
    steps, predictions = [[(0, {0: 1}), (1, {0: 1})]], [[(1, [5, 6, 7])]]
    machine = Delays(2, 0, 0, 0, 1, 0, e_bytes=1)
    played = simulate(
        steps,
        [(1, "decode")],
        Residency(2, 8, Pools()),
        machine,
        other=(3.0, 0.0),
        predictions=predictions,
        ahead=2,
        gate=Always(),
    )
    reads = [(e.layer, e.expert, e.start, e.end) for e in played.events if e.resource == "disk"]
    # while layer 0 computes (5–6) and layer 1 attends (6–9), two are fetched, and no third: there
    # is no room for it
    assert reads == [(0, 0, 3, 5), (1, 5, 5, 7), (1, 6, 7, 9), (1, 0, 9, 11)]
    assert asdict(played.fetched) == {"begun": 2, "used": 0, "early": 0, "nbytes": 2, "wasted": 2}
    played = simulate(
        steps,
        [(1, "decode")],
        Residency(2, 8, Pools()),
        machine,
        other=(2.0, 0.0),
        predictions=predictions,
        ahead=2,
        gate=Always(),
    )
    reads = [(e.layer, e.expert, e.start, e.end) for e in played.events if e.resource == "disk"]
    assert reads == [
        (0, 0, 2, 4),
        (1, 5, 4, 6),
        (1, 6, 6, 8),
        (1, 0, 8, 10),
    ]  # layer 1 comes at 7 and waits
    assert played.forwards[0].end == 11


def test_a_demand_overtakes_a_prefetch_between_two_pieces():
    """By hand: "other" takes 1.5 s, a read 4 s in pieces of 1 s, an expert 1 s; expert 5 is
    guessed, then 0 demanded."""
    machine = Delays(4, 0, 0, 0, 1, 0, e_bytes=8)

    def play(guess, wanted):
        with mock.patch("moelab.offloading.load_queue.PIECE", 2):
            played = simulate(
                [[(0, {0: 1}), (1, wanted)]],
                [(1, "decode")],
                Residency(2, 8, Pools()),
                machine,
                other=(1.5, 0.0),
                predictions=[[(1, guess)]],
                ahead=2,
                gate=Always(),
            )
        assert check(played.events) == []
        return [
            (e.expert, e.start, e.end, e.bytes)
            for e in played.events
            if e.resource == "disk" and e.layer
        ], played

    # layer 0 is read until 5.5 and computed until 6.5; layer 1 comes at 8.0
    wrong, played = play([5], {0: 1})
    assert wrong == [(5, 5.5, 6.5, 2), (5, 6.5, 7.5, 2), (5, 7.5, 8.5, 2), (0, 8.5, 12.5, 8)]
    assert asdict(played.fetched) == {"begun": 1, "used": 0, "early": 0, "nbytes": 6, "wasted": 6}
    right, played = play([5], {5: 1})
    assert [(e, start) for e, start, *_ in right] == [(5, 5.5), (5, 6.5), (5, 7.5), (5, 8.5)]
    assert asdict(played.fetched) == {"begun": 1, "used": 1, "early": 0, "nbytes": 8, "wasted": 0}
    two, played = play([5, 3], {0: 1, 5: 1})
    assert [(e, start) for e, start, *_ in two] == [
        (5, 5.5),
        (5, 6.5),
        (5, 7.5),
        (5, 8.5),
        (0, 9.5),
    ]


def test_what_is_wanted_two_layers_on_waits_for_what_is_wanted_now():
    """By hand: expert 5 is read for layer 2 in pieces of 1 s when layer 1 comes and demands expert
    0: 5 goes on after."""
    steps, machine = [[(0, {0: 1}), (1, {0: 1}), (2, {5: 1})]], Delays(4, 0, 0, 0, 1, 0, e_bytes=8)
    with mock.patch("moelab.offloading.load_queue.PIECE", 2):
        played = simulate(
            steps,
            [(1, "decode")],
            Residency(3, 8, Pools()),
            machine,
            other=(1.5, 0.0),
            predictions=[[(2, [5])]],
            ahead=2,
            distance=2,
            gate=Always(),
        )
    reads = [(e.expert, e.start, e.end) for e in played.events if e.resource == "disk" and e.layer]
    assert reads == [(5, 5.5, 6.5), (5, 6.5, 7.5), (5, 7.5, 8.5), (0, 8.5, 12.5), (5, 12.5, 13.5)]


def test_the_next_tokens_first_experts_are_read_while_the_head_computes():
    """One token after another wants the same: without a prediction layer 0 reads 2 s, which the
    head hides."""
    steps = [[(0, {token % 2: 1}), (1, {0: 1})] for token in range(40)]
    machine = Delays(2, 0, 0, 0, 1, 0, e_bytes=8)

    def play(across):
        return simulate(
            steps,
            [(1, "decode")] * 40,
            Residency(2, 8, Pools()),
            machine,
            head=(3.0, 0.0),
            predictions=[()] * 40,
            ahead=1,
            gate=Always(),
            across=across,
        )

    alone, guessed = play(None), play(CrossToken(8))
    assert (
        alone.tpot == 3 + 2 * 3
        and guessed.forwards[-1].end - guessed.forwards[-1].start == 3 + 3 + 1
    )
    assert guessed.counters == alone.counters


@settings(deadline=None, max_examples=150)
@given(runs(), machines, st.sampled_from([1, 2]))
def test_the_disk_never_rests_while_something_is_wanted(run, machine, distance):
    """With room for everything, a read begins when the one before it ends, or when its layer comes,
    or is announced."""
    L, E, steps, forwards, predictions, _, options = run
    options |= {"staging": None, "other": (1.5, 0.0)}
    played = simulate(
        steps,
        forwards,
        Residency(L, E, Pools()),
        machine,
        **options,
        predictions=predictions,
        ahead=99,
        distance=distance,
        gate=Always(),
    )
    came = defaultdict(list)
    for event in played.events:
        if event.kind == "other" and event.layer >= 0:
            came[event.layer].append(event.end)
    free = -1.0
    for event in (event for event in played.events if event.resource == "disk"):
        if event.start > free:
            assert event.start in came[event.layer] or event.start in came[event.layer - distance]
        free = event.end


def test_a_bad_guesser_is_ignored_and_a_good_one_is_not():
    """The engine's own rule: the disk is slow, so that only good predictions pass; it is learnt
    while the run goes on."""
    draw = random.Random(0)
    steps = [
        [(layer, dict.fromkeys(draw.sample(range(8), 2), 1)) for layer in range(3)]
        for _ in range(120)
    ]
    wrong = [
        [(layer, [e for e in range(8) if e not in experts][:2]) for layer, experts in forward]
        for forward in steps
    ]
    machine = Delays(1.0, 1.0, 0, 0, 0.1, 0, e_bytes=1, sm_bytes=1)

    def play(predictions, steps=steps, **more):
        return simulate(
            steps,
            [(1, "decode")] * len(steps),
            Residency(3, 8, Pools(F=4)),
            machine,
            other=(0.5, 0.0),
            predictions=predictions,
            ahead=2,
            **more,
        )

    gate = PrefetchGate()
    learnt, right = play(wrong, gate=gate), play(steps)
    assert learnt.fetched.used == 0 and right.fetched.wasted == 0 and right.fetched.used > 150
    # before its first read, a new run doesn't know what a read takes, and fetches
    assert play(wrong[:20], steps[:20], gate=gate).fetched.begun <= 2
    demand = play(None)
    assert right.forwards[-1].end < 0.95 * demand.forwards[-1].end
    assert demand.forwards[-1].end <= learnt.forwards[-1].end < 1.03 * demand.forwards[-1].end
    assert play(wrong, gate=Always()).forwards[-1].end > learnt.forwards[-1].end


@pytest.mark.parametrize("mode", ["hint", "speculative"])
def test_the_engines_decisions_on_the_engines_steps_and_guesses(qwen, mode):
    offloaded = offload(
        qwen[1], "10MB", plan=Pools(2, 3, 2, 4), cache="zipmoe", ahead=4, staging=3, delays=DELAYS
    )
    offloading, told = offloaded.moelab, []
    prefetch = offloading.engine.prefetch

    def announced(layer, ids):
        told.append(
            (len(offloading.steps) - 1, layer, list(dict.fromkeys(ids.T.reshape(-1).tolist())))
        )
        prefetch(layer, ids)

    offloading.engine.prefetch = announced
    with (
        offloading,
        Speculation(offloaded, make("predictor", "router", offloaded), mode),
        torch.inference_mode(),
    ):
        generate(offloaded, batch=1, new=8)
        found = offloading.metrics()
        predictions = [
            [(layer, experts) for at, layer, experts in told if at == n]
            for n in range(len(offloading.steps))
        ]
        played = simulate(
            offloading.steps,
            offloading.forwards,
            Residency(2, 8, Pools(2, 3, 2, 4), "zipmoe"),
            DELAYS,
            staging=3,
            predictions=predictions,
            ahead=4,
            other=(1e-3, 0.0),
        )
    assert any(predictions) and found.prefetched["begun"] and played.fetched.begun
    assert all(
        getattr(found, name) == getattr(played.metrics(), name)
        for name in ("hits", "misses", "evictions", "rereads")
    )


def test_errors():
    steps, forwards = [[(0, {0: 1})]], [(1, "decode")]
    with pytest.raises(
        ValueError, match="1 forwards are to be played, but there are predictions for 2"
    ):
        simulate(steps, forwards, Residency(1, 2, Pools()), DELAYS, predictions=[[], []], ahead=1)
    with pytest.raises(ValueError, match="the distance is 0"):
        simulate(
            steps,
            forwards,
            Residency(1, 2, Pools()),
            DELAYS,
            predictions=steps,
            ahead=1,
            distance=0,
        )
    with pytest.raises(ValueError, match="ahead is -1"):
        simulate(steps, forwards, Residency(1, 2, Pools()), DELAYS, predictions=steps, ahead=-1)
    with pytest.raises(ValueError, match="staging is 0"):
        simulate(steps, forwards, Residency(1, 2, Pools()), DELAYS, staging=0)
