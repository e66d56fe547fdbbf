"""The event simulation and the closed form: by hand, against each other, and what must be
conserved."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import Costs
from moelab.ndp.event_simulation import simulate_layer
from moelab.ndp.plans import make_plan
from tests.ndp import toy
from tests.ndp.conservation import conserve


def test_two_units_one_expert_each_by_hand():
    costs = toy.costs()
    a, t = costs.activation, float(costs.unit(1))
    seconds, events = simulate_layer(
        make_plan(toy.step([1, 1], homes=[0, 1]), 2), costs, layer=3, start=1.0
    )
    assert seconds == pytest.approx(
        2 * a + t + 2 * a
    )  # a token to each, both compute, one output after other
    found = [
        (e.resource, e.kind, e.layer, e.expert, round((e.start - 1) / a, 3), e.bytes)
        for e in events
    ]
    assert found[:3] == [
        ("link", "read activations", 3, -1, 0.0, 2048),
        ("unit 0", "expert", 3, 0, 2.0, 0),
        ("unit 1", "expert", 3, 1, 2.0, 0),
    ]
    assert [row[:2] for row in found[3:]] == [("link", "read activations")] * 2


def test_a_moved_expert_is_computed_piece_by_piece():
    costs = toy.costs(units=4)
    plan = make_plan(toy.step([1]), 4, moved=1.0, split=True, pieces=4)
    seconds, events = simulate_layer(plan, costs)
    assert (
        seconds
        == pytest.approx(costs.transfer() + float(costs.gpu(1)) / 4)
        == layer_seconds(plan, costs)
    )
    sent = [e for e in events if e.kind == "read weights"]
    assert len(sent) == 4 and sum(e.bytes for e in sent) == costs.spec.expert_bytes


def test_weights_wait_for_outputs():
    """Both outputs are ready during the first piece of weights and go before the second; the
    formula lets them slip in.

    One expert is sent in two pieces and a fifth of the other; the units do the rest. So the last
    piece is late by the two outputs, and with it the GPU, which computes it for a tenth of an
    expert's time."""
    costs = toy.costs(units=2)
    plan = make_plan(toy.step([1, 1]), 2, moved=np.array([1.0, 0.2]), split=True, pieces=2)
    formula = costs.activation + 1.2 * costs.transfer() + 0.1 * float(costs.gpu(1))
    assert layer_seconds(plan, costs) == pytest.approx(formula)
    assert simulate_layer(plan, costs)[0] == pytest.approx(
        formula + 2 * costs.activation, rel=1e-12
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(1, 5), st.sampled_from((1, 30)))
def test_shared_dram_is_read_no_faster_than_it_can(seed, split, N, S):
    """Whatever a unit computes and sends is read from its memory before the layer ends; both
    engines say so."""
    rng = np.random.default_rng(seed)
    costs = Costs(toy.spec(K=6), toy.machine(N, link=10 ** rng.uniform(9, 11.5), shared_dram=True))
    step = toy.step([1] * 6 if S == 1 else rng.integers(1, S, 6), rng.integers(0, N, 6), S=S)
    plan = make_plan(
        step, N, moved=rng.choice((0.0, 0.4, 1.0), 6), split=split, pieces=N if split else 1
    )
    home = np.full((6, N), 1 / N) if split else step.home[:, None] == np.arange(N)
    read = (home * costs.spec.expert_bytes).sum(0)[plan.receivers[:-1] > 0].max(initial=0)
    for seconds in (layer_seconds(plan, costs), simulate_layer(plan, costs)[0]):
        assert seconds >= read / costs.hardware.unit_bandwidth * (1 - 1e-9)
    free = Costs(costs.spec, replace(costs.hardware, shared_dram=False))
    assert layer_seconds(plan, costs) >= layer_seconds(plan, free) * (1 - 1e-12)


def test_nothing_is_lost_in_random_configurations():
    found = conserve(30, seed=7)
    assert found["problems"] == [] and found["layers"] > 60
    assert found["largest difference, exact plans"] < 1e-9
    assert (
        found["smallest, mixed"] > 0.98
    )  # weights that need not wait for outputs, as Eq. 2 has it
