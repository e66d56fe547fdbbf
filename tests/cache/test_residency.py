"""Invariants of the pools under any sequence of steps, and ZipMoE's dispatch rule against a naive
one."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import ExpertKey, State
from moelab.cache.policies import POLICIES, Belady
from moelab.cache.pools import HIERARCHY
from moelab.cache.residency import Pools, Residency

L, E = 3, 6
TOKENS = st.dictionaries(st.integers(0, E - 1), st.integers(1, 4), min_size=1, max_size=E)
STEPS = st.lists(st.tuples(st.integers(0, L - 1), TOKENS), max_size=50)
POOLS = st.builds(Pools, *[st.integers(0, 5)] * 4)
LEVEL = {state: level for level, state in enumerate((State.MISSED, *reversed(HIERARCHY)))}


def contents(residency):
    return {state: set(residency.resident(state)) for state in HIERARCHY}


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("policy", list(POLICIES))
@given(STEPS, POOLS, st.sampled_from([None, 0, 2, 100]))
def test_invariants(policy, scope, steps, pools, margin):
    residency = Residency(
        L, E, pools, Belady(steps) if policy == "belady" else policy, scope, margin
    )
    totals = dict.fromkeys(("requests", "hits", "evicted"), 0)
    for layer, tokens in steps:
        before = contents(residency)
        step = residency.begin(layer, tokens)
        after = contents(residency)
        for state in HIERARCHY:  # capacities hold, in every scope
            if scope == "model":
                assert len(after[state]) <= pools[state]
            else:
                assert all(
                    sum(key.layer == of for key in after[state]) <= pools[state] for of in range(L)
                )
        every = [key for state in HIERARCHY for key in after[state]]
        assert len(every) == len(set(every))  # no key in two pools

        used = {request.key for request in step.requests}
        assert [request.key for request in step.requests] == sorted(
            ExpertKey(layer, expert) for expert in tokens
        )
        for request in step.requests:
            assert request.tokens == tokens[request.key.expert]
            was = next((state for state in HIERARCHY if request.key in before[state]), State.MISSED)
            assert request.state is was and residency.state(request.key) is request.keep
            assert request.keep is State.MISSED or LEVEL[request.keep] >= LEVEL[was]  # only upward
        for key in step.evicted:  # pinned experts never leave for others
            assert key not in used and residency.state(key) is State.MISSED
            assert any(key in before[state] for state in HIERARCHY)
        for state in HIERARCHY:  # nobody else moved
            assert before[state] - used - {*step.evicted} == after[state] - used
            # places are taken while the step runs: those who were there and stay or leave late, and
            # the newcomers
            held = {r.key for r in step.requests if state in (r.state, r.keep)} | (
                after[state] - used
            )
            assert scope == "layer" or len(held) <= pools[state]

        totals["requests"] += len(step.requests)
        totals["hits"] += sum(request.state is not State.MISSED for request in step.requests)
        totals["evicted"] += len(step.evicted) + sum(
            request.state is not State.MISSED and request.keep is State.MISSED
            for request in step.requests
        )
    counters = residency.counters
    assert counters.evictions == totals["evicted"]
    assert counters.requests == totals["requests"] and sum(counters.hits.values()) == totals["hits"]


@given(STEPS, POOLS, st.integers(0, 6), st.sampled_from(["model", "layer"]))
def test_dispatch_by_rank_and_eviction_by_frequency(steps, pools, margin, scope):
    """§3.4 by sorting all experts at every step."""
    residency, frequency = Residency(L, E, pools, "zipmoe", scope, margin), {}
    group = [state for state in HIERARCHY if pools[state]]
    for layer, tokens in steps:
        before = contents(residency)
        for expert, n in tokens.items():
            frequency[layer, expert] = frequency.get((layer, expert), 0) + n
        everyone = [
            ExpertKey(of, e) for of in range(L) for e in range(E) if scope == "model" or of == layer
        ]
        by_rank = sorted(everyone, key=lambda key: (-frequency.get(key, 0), key))
        step = residency.begin(layer, tokens)
        used = {request.key for request in step.requests}
        for request in step.requests:
            threshold, goal = margin, State.MISSED
            for state in group:
                threshold += pools[state]
                if by_rank.index(request.key) < threshold:
                    goal = state
                    break
            if goal is State.MISSED:
                assert request.keep is State.MISSED  # "evicted immediately after execution"
            elif LEVEL[goal] <= LEVEL[request.state]:
                assert request.keep is request.state  # never down
            else:
                offered = [s for s in group if LEVEL[request.state] < LEVEL[s] <= LEVEL[goal]]
                assert request.keep in (*offered, request.state)
                for state in offered:
                    if request.keep is state:
                        break
                    rivals = {r.key for r in step.requests if state in (r.state, r.keep)}
                    rivals |= {
                        key
                        for key in before[state] - used
                        if key in everyone and residency.state(key) is state
                    }  # refused: all who stay there rank higher
                    assert len(rivals) >= pools[state]
                    assert all(
                        by_rank.index(key) < by_rank.index(request.key)
                        for key in rivals
                        if key not in before[state] & used
                    )
        for victim in step.evicted:  # the fewest tokens of those who may leave
            state = next(state for state in HIERARCHY if victim in before[state])
            stayed = [
                key
                for key in before[state] - used
                if key in everyone and residency.state(key) is state
            ]
            assert all(by_rank.index(key) < by_rank.index(victim) for key in stayed)


TOKENS_IDS = st.lists(
    st.lists(st.sets(st.integers(0, E - 1), min_size=2, max_size=2), min_size=L, max_size=L),
    max_size=20,
)


@pytest.mark.parametrize("policy", list(POLICIES))
@given(TOKENS_IDS, st.integers(1, L * E - 1), st.integers(1, 5), st.integers(0, 2))
def test_a_token_is_admitted_as_a_gpu_does_it(policy, tokens, slots, spare, share):
    """Against a table and a list of free slots: the first `share` misses of a layer are fetched, and
    stay while a slot is free."""
    spare = min(spare, slots)
    steps = [(layer, dict.fromkeys(of, 1)) for token in tokens for layer, of in enumerate(token)]
    residency = Residency(
        L, E, Pools(F=slots), Belady(steps) if policy == "belady" else policy, spare=spare
    )
    table, free = {}, [*range(slots)]
    for token in tokens:
        residency.begin_forward("decode", token=True)
        given = free[:]
        assert residency.free == len(given)
        found, came = set(), {}
        for layer, ids in enumerate(token):
            misses = [e for e in sorted(ids) if (layer, e) not in table]
            step = residency.begin(layer, dict.fromkeys(ids, 1), {*misses[share:]})
            assert step.evicted == [] and [r.key.expert for r in step.away] == misses[share:]
            for request in step.requests:
                key = request.key
                if key.expert not in misses:
                    assert (request.state, request.keep) == (State.FULL, State.FULL)
                    found.add(key)
                    continue
                if given:
                    came[key] = given.pop(0)
                kept = State.FULL if key in came else State.MISSED
                assert (request.state, request.keep) == (State.MISSED, kept)
            assert all(r.state is r.keep is State.MISSED for r in step.away)
        table |= came
        evicted = residency.end_forward()
        others = table.keys() - found - came.keys()
        selective = policy in ("zipmoe", "next-use", "prompt", "belady")
        for key in evicted:
            assert key in others or not others or (selective and key in came)
            others.discard(key)
            del table[key]
        free = [n for n in range(slots) if n not in table.values()]
        assert spare // 4 <= len(free) and (not evicted or len(free) <= spare)
        assert {*residency.resident(State.FULL)} == table.keys()
    counters = residency.counters
    assert counters.requests == sum(len(of) for _, of in steps)
    assert counters.admissions - counters.evictions == len(table)


def test_a_prompt_leaves_the_spare_slots_free_and_a_cut_off_token_gives_them_back():
    residency = Residency(1, 9, Pools(F=4), "lru", spare=2)
    residency.begin_forward("prefill")
    evicted = residency.begin(0, dict.fromkeys(range(5), 1)).evicted
    assert evicted == [] and len(residency) == 2 and residency.end_forward() == []
    residency.begin_forward("decode", token=True)
    residency.begin(0, {7: 1, 8: 1, 6: 1})
    assert residency.free == 0 and len(residency) == 4
    residency.begin_forward("decode", token=True)  # nobody has ended the one before
    assert residency.free == 0
    residency.begin(0, {5: 1})
    assert len(residency.end_forward()) == 2 and len(residency) == 2
    residency.begin_forward("prefill")
    assert residency.free is None


def test_reset_and_clear():
    residency = Residency(1, 4, Pools(F=1))
    for expert in (0, 1, 0):
        residency.begin(0, {expert: 1})
    counters = residency.counters
    residency.reset_counters()
    assert (counters.misses, counters.evictions) == (3, 2)
    residency.begin(0, {0: 1})
    assert residency.counters.hits[State.FULL] == 1 and residency.counters.hit_rate() == 1
    residency.reset_counters()
    assert math.isnan(residency.counters.hit_rate())
    residency.clear()
    assert residency.begin(0, {0: 1}).requests[0].state is State.MISSED


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Residency(2, 4, Pools(F=1), "mru"), "there is no cache 'mru'"),
        (lambda: Residency(2, 4, Pools(F=1), scope="expert"), "whole 'model' or of each 'layer'"),
        (lambda: Residency(2, 4, Pools(F=1), margin=-1), "margin is -1"),
        (lambda: Residency(2, 4, Pools(F=1), spare=2), "2 spare slots of .* at most as many"),
        (lambda: Residency(2, 4, Pools(F=1, C=1), spare=1), "1 spare slots of .*one pool F"),
        (lambda: Residency(2, 4, Pools(F=2), scope="layer", spare=1), "spare slots of .*'layer'"),
        (lambda: Pools(S=-2), "pool S holds -2"),
        (lambda: Residency(2, 4, Pools(F=1)).begin(2, {0: 1}), "of 2 layers with 4 experts"),
        (lambda: Residency(2, 4, Pools(F=1)).begin(0, {4: 1}), "of 2 layers with 4 experts"),
    ],
)
def test_errors_are_for_people(make, words):
    with pytest.raises(ValueError, match=words):
        make()
