"""Planning against the paper's loops written out, enumeration of all steps, and what must hold of
any plan."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import ExpertKey, State
from moelab.cache.pools import Pools
from moelab.cache.residency import Request
from moelab.simulation.costs import Delays
from moelab.zipmoe.affinity import default_order
from moelab.zipmoe.planning import (
    makespan,
    plans,
    reading,
)
from moelab.zipmoe.selection import selection_probabilities
from notebooks.studies.optimal_schedule import execute

SIZES = (12, 6, 2)  # bytes of full tensors, SM-chunks, E-chunks


def Seconds(e_read=1.0, sm_read=3.0, decompress=2.0, recover=0.5, compute=1.5):
    return Delays(e_read, sm_read, decompress, recover, 0.0, compute)


@st.composite
def layers(draw, most=7):
    """(f, k) counted in steps of k experts each, by rank."""
    E = draw(st.integers(1, most))
    k = draw(st.integers(1, min(E, 3)))
    steps = draw(st.lists(st.permutations(range(E)).map(lambda p: p[:k]), min_size=1, max_size=9))
    return np.sort(np.bincount(np.concatenate(steps), minlength=E) / len(steps))[::-1], k


# nothing, or a millisecond and more: beside the tolerances less is nothing, and then a tie is a
# matter of opinion
seconds = st.just(0.0) | st.floats(1e-3, 10)
delays = st.builds(Seconds, seconds, seconds, seconds, seconds, seconds)


def algorithm_2(q):
    hits = np.zeros(len(q) + 1)
    hits[0] = 1
    for chance in q:
        for h in range(len(q), 0, -1):
            hits[h] = hits[h] * (1 - chance) + hits[h - 1] * chance
        hits[0] *= 1 - chance
    return hits


def algorithm_4(f, budget, k, estimate, step, pools="FCSE"):
    """[(ratios, sizes, cost)] of every configuration, by four loops over hits."""
    q, parts, found = selection_probabilities(f)[0], round(1 / step), []
    sizes = dict(zip("FCSE", (SIZES[0], SIZES[1] + SIZES[2], SIZES[1], SIZES[2])))
    for ratio in itertools.product(range(parts + 1), repeat=4):
        if sum(ratio) != parts or any(r and p not in pools for r, p in zip(ratio, "FCSE")):
            continue
        held, u, hits = [], 0, []
        for r, p in zip(ratio, "FCSE"):
            held.append(min(r * budget // (parts * sizes[p]), len(f) - u))
            hits.append(algorithm_2(q[u : u + held[-1]]))
            u += held[-1]
        missed, everything, cost = algorithm_2(q[u:]), algorithm_2(q), 0.0
        for h in itertools.product(*(range(S + 1) for S in held)):
            rest = k - sum(h)
            if 0 <= rest < len(missed):
                cost += (
                    estimate(h)
                    * missed[rest]
                    / everything[k]
                    * math.prod(d[i] for d, i in zip(hits, h))
                )
        found.append((tuple(r / parts for r in ratio), tuple(held), cost))
    return found


@given(
    layers(),
    delays,
    st.integers(1, 4),
    st.integers(2, 90),
    st.sampled_from(["FCSE", "FC", "SE", "F", "CE"]),
)
def test_a_plan_equals_the_four_loops(layer, seconds, workers, budget, pools):
    (f, k), step = layer, 0.25

    def estimate(h):
        return float(makespan(np.array([h]), k, seconds, workers)[0])

    truth = algorithm_4(f, budget, k, estimate, step, pools)
    ours = plans(f, budget, SIZES, seconds, workers, pools, parts=4)
    costs = {Pools(*held): cost for _, held, cost in truth}
    assert {c.pools: pytest.approx(c.seconds, rel=1e-12, abs=1e-12) for c in ours} == costs
    best = min(costs.values())
    assert ours[0].seconds == pytest.approx(best, rel=1e-9, abs=1e-12)
    equals = [(ratios, held) for ratios, held, cost in truth if cost <= best * (1 + 1e-10) + 1e-12]
    if best > 0:
        assert ours[0].pools == Pools(*max(equals)[1])  # ties: most in F, then C, then S
    assert all(c.pools.nbytes(*SIZES) <= budget for c in ours)
    times = [c.seconds for c in ours]
    assert times == pytest.approx(sorted(times), rel=1e-8)


def plan(*how, **options):
    return plans(*how, **options)[0]


def simulated(states, d, workers):
    asked = [Request(ExpertKey(0, i), 1, State(s), State.MISSED) for i, s in enumerate(states)]
    events, end = execute(asked, default_order(asked, d, workers), d, workers)
    return sum(event.end - event.start for event in events if event.resource == "disk"), end


@given(st.text("FCSEM", max_size=6), delays, st.integers(1, 3))
def test_reading_equals_the_simulators_and_no_schedule_of_it_is_shorter(states, d, workers):
    hits, k = np.array([[states.count(s) for s in "FCSE"]]), len(states)
    read, end = simulated(states, d, workers)
    assert reading(hits, k, d)[0] == pytest.approx(read)
    assert k == 0 or makespan(hits, k, d, workers)[0] <= end + 1e-9


F, K = np.array([0.9, 0.8, 0.6, 0.4, 0.2, 0.1]), 3


def test_more_memory_and_more_pools_are_never_slower_and_all_of_it_leaves_computing():
    times = [plan(F, budget, SIZES, Seconds(), 2).seconds for budget in range(2, 73, 10)]
    assert times == sorted(times, reverse=True)
    assert plan(F, 72, SIZES, Seconds(), 2).seconds == pytest.approx(K * 1.5)
    assert plan(F, 72, SIZES, Seconds(), 2).pools == Pools(F=6)
    for budget in (24, 36):
        assert plan(F, budget, SIZES, Seconds(), 2).seconds <= min(
            plan(F, budget, SIZES, Seconds(), 2, pools).seconds for pools in "FCSE"
        )


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"pools": "FX"}, "FCSE"),
        ({"pools": ""}, "FCSE"),
        ({"sizes": (12, 0, 2)}, "can be FCE"),
    ],
)
def test_errors_say_what_to_do(changes, words):
    arguments = {
        "f": F,
        "budget_bytes": 36,
        "sizes": SIZES,
        "delays": Seconds(),
        "workers": 2,
    }
    with pytest.raises(ValueError, match=words):
        plan(**{**arguments, **changes})
