"""Each schedule's decision by hand, and the improved split against a fine grid of splits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.plans import make_plan, problem
from moelab.ndp.systems import GPUNDP, SYSTEMS, Fiddler, MoNDE, OnDemand
from notebooks.studies.ndp_readings import ReadMoNDE
from tests.ndp import toy


def test_on_demand_moves_everything():
    plan = OnDemand().plan(toy.step([3, 1, 1], S=3), toy.costs())
    assert plan.moved.tolist() == [1, 1, 1] and not plan.units.any() and not plan.host.any()
    costs = toy.costs()
    last = float(costs.gpu(1))
    assert layer_seconds(plan, costs) == pytest.approx(3 * costs.transfer() + last)


def test_fiddler_takes_the_quicker_way_for_each_expert():
    costs = toy.costs()
    n = 1 + int(
        np.searchsorted(
            costs.cpu(np.arange(1, 200)) > costs.transfer() + costs.gpu(np.arange(1, 200)), True
        )
    )
    assert 2 < n < 200
    plan = Fiddler().plan(toy.step([n, n - 1, 1], S=n), costs)
    assert plan.host.tolist() == [0, 1, 1] and plan.moved.tolist() == [1, 0, 0]


@pytest.mark.parametrize(
    "N, rounding, share", [(2, "round", 3), (2, "floor", 2), (6, "round", 1), (6, "ceil", 2)]
)
def test_monde_sends_the_bandwidth_ratio_of_the_most_popular(N, rounding, share):
    costs = Costs(toy.spec(E=16, K=8), toy.machine(N))  # link and unit equally fast: 8 / (1 + N)
    step = toy.step([1] * 8, homes=[i % N for i in range(8)])
    plan = ReadMoNDE(rounding=rounding).plan(step, costs)
    assert plan.moved.tolist() == [1] * share + [0] * (8 - share)
    assert not ReadMoNDE(rounding=rounding).plan(toy.step([5] * 8, S=9), costs).moved.any()
    load = np.bincount(step.home[share:], minlength=N)
    units_side = load.max() * float(costs.unit(1))
    gpu_side = share * costs.transfer() + float(costs.gpu(1))
    assert layer_seconds(plan, costs) == pytest.approx(max(units_side, gpu_side), rel=0.01)


def test_tensor_parallelism_divides_every_expert():
    costs = toy.costs(units=4)
    step = toy.step([1, 1], homes=[3, 3])
    split = layer_seconds(SYSTEMS["NDP+TP"].plan(step, costs), costs)
    whole = layer_seconds(MoNDE().plan(step, costs), costs)
    assert split == pytest.approx(2 * float(costs.unit(1)) / 4 + 5 * costs.activation)
    assert whole == pytest.approx(2 * float(costs.unit(1)) + 2 * costs.activation)


def test_literal_prefetching_runs_hits_on_the_gpu_and_misses_on_the_units():
    costs = toy.costs(units=2)
    plan = SYSTEMS["NDP+TP+LB+PRE"].plan(toy.step([1, 1], resident=[False, True]), costs)
    assert (
        plan.step.experts.tolist() == [1, 0]
        and plan.resident.tolist() == [1, 0]
        and not plan.moved.any()
    )
    without = SYSTEMS["NDP+TP+LB"].plan(toy.step([1, 1], resident=[False, True]), costs)
    assert not without.resident.any()


steps = st.integers(1, 6).flatmap(
    lambda A: st.tuples(
        st.lists(st.integers(1, 40), min_size=A, max_size=A).map(lambda n: sorted(n, reverse=True)),
        st.lists(st.integers(0, 3), min_size=A, max_size=A),
        st.lists(st.booleans(), min_size=A, max_size=A),
    )
)


@given(
    steps,
    st.sampled_from((1, 60)),
    st.sampled_from([n for n in SYSTEMS if n.endswith("improved") and "TP" in n]),
    st.floats(1e9, 1e11),
    st.floats(1e9, 1e11),
)
def test_improved_is_never_beaten_by_a_grid(drawn, S, name, link, unit):
    """The same family of splits, tried at 61 places."""
    tokens, homes, resident = drawn
    tokens = [1] * len(tokens) if S == 1 else tokens
    costs = Costs(toy.spec(K=6), toy.machine(4, link=link, unit_bandwidth=unit))
    step, better = toy.step(tokens, homes, resident, S), SYSTEMS[name]
    plan = better.plan(step, costs)
    found = layer_seconds(plan, costs)
    assert not problem(plan, step, 4, better.held)
    here = step.resident & better.prefetch
    order = np.concatenate([np.flatnonzero(here), np.flatnonzero(~here)])
    for u in np.linspace(0, len(tokens) if better.load_balance else here.sum(), 61):
        share = np.zeros(len(tokens))
        share[order] = np.clip(u - np.arange(len(tokens)), 0, 1)
        other = make_plan(step, 4, resident=share * here, moved=share * ~here, split=True, pieces=4)
        assert found <= layer_seconds(other, costs) * (1 + 1e-5)


@given(
    st.sampled_from([*sorted(SYSTEMS), ReadMoNDE(relieves="busiest"), ReadMoNDE(rounding="ceil")]),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
)
def test_steps_of_one_situation_take_equally_long(name, N, seed):
    rng, system = np.random.default_rng(seed), SYSTEMS.get(name, name)
    costs = Costs(toy.spec(K=4), toy.machine(N))
    homes, resident = rng.integers(0, N, (24, 4)), rng.random((24, 4)) < 0.4
    rows = system.situations(homes, resident, costs)
    times = [
        layer_seconds(system.plan(toy.step([1] * 4, h, r), costs), costs)
        for h, r in zip(homes, resident)
    ]
    for row in np.unique(rows, axis=0):
        same = np.array(times)[(rows == row).all(1)]
        assert np.ptp(same) <= 1e-4 * same.max()  # bisection ends somewhere in that range


@pytest.mark.parametrize(
    "system, field",
    [
        *((GPUNDP, field) for field in ("version", "limit", "eq2_tokens", "rounding")),
        *((ReadMoNDE, field) for field in ("rounding", "relieves", "prefill", "placement")),
    ],
)
def test_an_unknown_option_names_the_known_ones(system, field):
    known = getattr(system(), field)
    with pytest.raises(ValueError, match=f"no {field} 'wrong'.* There are: .*{known}"):
        system(**{field: "wrong"})
