"""Tokens that a GPU runs alone: the simulator against the device's rules in a naive loop, its clock
against a closed form, and a replay of what was recorded."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab import cards
from moelab.base.specs import ExpertKey, MoESpec, State
from moelab.cache.residency import Pools, Residency
from moelab.offloading.hybrid import Balance, Rates
from moelab.offloading.metrics import Forward
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.simulator import Prefetching, replay, simulate
from moelab.simulation.traced import as_opened
from tests.timelines import check

L, E, K = 3, 7, 2
SIZES = tuple(((64 * (1 + layer), 0),) * E for layer in range(L))
SPEC = MoESpec("tiny", "tiny", L, tuple(range(L)), E, K, H=16, I=8)
READ, EXPERT, FAR, OTHER, HEAD, TRIP = 1 / 128, 0.25, 0.75, 2.0, 3.0, 0.125
MACHINE = Machine(
    Delays(128 * READ, 0, 0, 0, EXPERT, 0, e_bytes=128, experts_bytes=SIZES),
    other=(OTHER, 0.0),
    head=(HEAD, 0.0),
    decide=(99.0, 99.0),
    handover=99.0,
    far=(FAR, 0.0),
    trip=TRIP,
)
TOKEN = (1, "decode", 0, 0, None, None, "token", 7.0)
whole = st.integers(0, 8).map(float)
tokens = st.lists(
    st.lists(st.lists(st.integers(0, E - 1), min_size=K, max_size=K, unique=True), min_size=L, max_size=L),
    min_size=1,
    max_size=12,
)  # fmt: skip
rating = st.builds(
    lambda link, near, far, trip: Rates((0.0, link / 64), (near, 0.0), (far, 0.0), trip),
    *[whole] * 4,
)


def of_a_gpu(ids, slots, spare, rates, wished):
    """What a table, free slots and a counter do with ids [T][L][K], and an LRU list between tokens:
    of each token, (fetched, away), of each layer; its seconds; the table in the end; how many were
    admitted and evicted; of each token, who comes beside it, of those that were wished."""
    table, recent, told, counts = {}, [], [], [0, 0]
    usual, coming, beside = spare, [], []
    for token, of, wish in zip(ids, rates, wished, strict=True):
        free = slots - len(table) - len(coming)
        taken, left = {*coming}, set()
        beside.append(coming)
        used, layers, seconds = set(), [], HEAD
        for layer, chosen in enumerate(token):
            misses = [e for e in sorted(chosen) if (layer, e) not in table]
            hits = len(chosen) - len(misses)
            nbytes = SIZES[layer][0][0]

            def cost(n, misses=misses, nbytes=nbytes, of=of):
                away = len(misses) - n
                here = n * of.link[1] * nbytes + (K - away) * of.near[0]
                return max(here, (away > 0) * of.trip + away * of.far[0])

            share = min(range(len(misses) + 1), key=cost)
            fetched, away = misses[:share], misses[share:]
            for e in fetched:
                if free:
                    free -= 1
                    table[layer, e] = True
                    counts[0] += 1
                    taken.add((layer, e))
            left |= {(layer, e) for e in misses if (layer, e) not in table}
            used |= {(layer, e) for e in chosen}
            for e in sorted(chosen):
                if (layer, e) in recent:
                    recent.remove((layer, e))
                recent.append((layer, e))
            here = len(fetched) * nbytes * READ + (hits + len(fetched)) * EXPERT
            seconds += OTHER + max(here, bool(away) * TRIP + len(away) * FAR)
            layers.append((fetched, away))
        counts[0] += len({*coming} - table.keys())
        table |= dict.fromkeys(coming)
        used |= {*coming}
        usual += (len(taken) - usual) / 8
        while len(table) > slots - min(spare, max(spare // 4, math.ceil(1.5 * usual))):
            old = [key for key in recent if key in table]
            del table[([key for key in old if key not in used] or old)[0]]
            counts[1] += 1
        left -= {*coming}
        coming = [key for key in wish if key in left][: (slots - len(table)) // 2]
        told.append((layers, seconds))
    return told, {*table}, counts, beside


def by_layer(events, forward, resource):
    found = [[] for _ in range(L)]
    for event in events:
        if event.resource == resource and forward.start <= event.start < forward.end:
            found[event.layer].append(event.expert)
    return found


@given(tokens, st.integers(1, L * E - 1), st.integers(1, 6), st.data())
def test_decisions_are_the_gpus_and_times_add_up(ids, slots, spare, data):
    spare = min(spare, slots)
    rates = [data.draw(rating) for _ in ids]
    nobody = [()] * len(ids)
    expected, table, (admitted, evicted), _ = of_a_gpu(ids, slots, spare, rates, nobody)
    steps = [[(i, dict.fromkeys(of, 1)) for i, of in enumerate(token)] for token in ids]
    residency = Residency(L, E, Pools(F=slots), "lru", spare=spare)
    balance = Balance(SIZES, rates, K)
    played = simulate(steps, [TOKEN] * len(ids), residency, MACHINE, balance=balance)
    assert check(played.events) == []
    for one, (layers, seconds) in zip(played.forwards, expected, strict=True):
        assert by_layer(played.events, one, "link") == [fetched for fetched, _ in layers]
        assert by_layer(played.events, one, "host") == [away for _, away in layers]
        assert one.end - one.start == pytest.approx(seconds)
    counters = played.counters
    assert {*residency.resident(State.FULL)} == table
    assert (counters.admissions, counters.evictions) == (admitted, evicted)
    assert counters.away == sum(len(away) for layers, _ in expected for _, away in layers)
    found = played.metrics()
    assert found.paths == {"token": len(ids)} and found.python_per_layer is None
    assert found.link_bytes == sum(
        SIZES[i][0][0] * len(fetched)
        for layers, _ in expected
        for i, (fetched, _) in enumerate(layers)
    )

    run = EngineRun(
        EngineSettings(
            SPEC, Pools(F=slots), "lru", "model", 1, 4, 0, SIZES, 9, device="cuda", spare=spare
        ),
        residency,
    )
    run.steps, run.forwards, run.rates = steps, played.forwards, rates
    run.predictions = [[] for _ in steps]
    for event in played.events:
        run.timeline.add(event)
    again = replay(run) if found.link_bytes else replay(run, device=cards.load_device("rtx-4090"))
    if found.link_bytes:
        assert again.counters == counters
        for resource in ("link", "host"):
            for one, other in zip(played.forwards, again.forwards):
                assert by_layer(played.events, one, resource) == by_layer(
                    again.events, other, resource
                )
    assert check(again.events) == []


@given(tokens, st.integers(1, L * E - 1), st.integers(1, 6), st.randoms(), st.data())
def test_what_a_token_missed_comes_beside_the_next_one(ids, slots, spare, chance, data):
    spare = min(spare, slots)
    rates = [data.draw(rating) for _ in ids]
    wished = [
        [(i, e) for i, e in chance.sample(every, len(every)) if chance.random() < 0.8]
        for every in [[(i, e) for i in range(L) for e in range(E)]] * len(ids)
    ]
    *_, table, counts, beside = of_a_gpu(ids, slots, spare, rates, wished)
    steps = [[(i, dict.fromkeys(of, 1)) for i, of in enumerate(token)] for token in ids]
    residency = Residency(L, E, Pools(F=slots), "lru", spare=spare)
    played = simulate(
        steps,
        [TOKEN] * len(ids),
        residency,
        MACHINE,
        prefetching=Prefetching([[], *([(i, [e]) for i, e in of] for of in wished[:-1])], 0),
        balance=Balance(SIZES, rates, K),
    )
    assert check(played.events) == []
    assert {*residency.resident(State.FULL)} == table
    assert [played.counters.admissions, played.counters.evictions] == counts
    fetched = played.counters.misses - played.counters.away
    copied = [event for event in played.events if event.resource == "link"]
    assert len(copied) == fetched + sum(map(len, beside))


def test_a_link_that_rests_brings_what_the_cpu_computes():
    """By the controller's own rule: where the CPU is given every miss, somebody comes after all."""
    steps = [[(i, {0: 1, 1 + t % 2: 1}) for i in range(L)] for t in range(12)]
    all_away = Rates((0.0, 9.0), (9.0, 0.0), (0.0, 0.0))
    hits = []
    for predictions in ([()] * 12, [None] * 12):
        residency = Residency(L, E, Pools(F=16), "lrfu", spare=4)
        played = simulate(
            steps,
            [TOKEN] * 12,
            residency,
            MACHINE,
            prefetching=Prefetching(predictions, 0),
            balance=Balance(SIZES, [all_away] * 12, K),
        )
        assert check(played.events) == []
        hits.append(played.hit_rate)
    assert hits[0] == 0 and hits[1] > 0.5


def test_a_prompt_goes_by_the_step_and_its_tokens_by_the_gpus_rule():
    steps = [[(0, dict.fromkeys(range(E), 2))], [(0, {1: 1, 6: 1})], [(0, {1: 1, 6: 1})]]
    residency = Residency(1, E, Pools(F=4), "lru", spare=2)
    passes = [(7, "prefill"), TOKEN, TOKEN]
    played = simulate(steps, passes, residency, replace(MACHINE, decide=(0.0, 0.0), handover=0.0))
    assert [*played.metrics().paths.items()] == [("token", 2)]
    assert residency.resident(State.FULL) == [ExpertKey(0, 1), ExpertKey(0, 6)]
    assert played.counters.admissions == 3 and played.counters.hits[State.FULL] == 3


def test_a_run_on_another_machine_keeps_its_own_rule():
    """Without a host that computes, every miss is fetched, whatever the card."""
    ids = [[[0, 1]] * L, [[2, 3]] * L, [[0, 3]] * L]
    steps = [[(i, dict.fromkeys(of, 1)) for i, of in enumerate(token)] for token in ids]
    settings = EngineSettings(
        SPEC, Pools(F=8), "lru", "model", 1, 4, 0, SIZES, 9, device="cuda", spare=3
    )
    run = EngineRun(settings, as_opened(settings))
    run.steps, run.forwards = steps, [Forward(0.0, 1.0, *TOKEN)] * 3
    run.predictions, run.rates = [[] for _ in steps], [None] * 3
    played = [replay(run, device=name) for name in ("rtx-4090", "rtx-a6000")]
    assert played[0].counters == played[1].counters and played[0].tpot != played[1].tpot
    assert not {event.resource for event in played[0].events} & {"disk", "host"}
