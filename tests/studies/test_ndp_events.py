"""The event simulation and the closed form: by hand, against each other, and what must be
conserved."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from moelab.base.specs import MoESpec
from moelab.ndp.closed_form import layer_seconds
from moelab.ndp.costs import ACTIVATION_BYTES
from moelab.ndp.hardware import MAPPINGS, hardware
from moelab.ndp.plans import make_plan
from moelab.ndp.routing import simulated_routing
from moelab.ndp.simulation import NDPRun
from moelab.ndp.systems import SYSTEMS
from notebooks.studies.ndp_events import simulate_layer
from tests.ndp import toy
from tests.timelines import check as impossible


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


def check(ids, plan, costs, events):
    """A simulated layer serves the routing ids [S, K] (E for none): every expert once, bytes as
    formulas."""
    spec, step = costs.spec, plan.step
    tokens = Counter(e for row in ids.tolist() for e in row if e < spec.E)
    assert tokens == Counter(dict(zip(step.experts.tolist(), step.tokens.tolist())))
    done, sent = defaultdict(float), Counter()
    whole = {"gpu": costs.gpu, "host": costs.cpu}
    for event in events:
        sent[event.kind] += event.bytes
        if event.kind == "expert":
            time = float(whole.get(event.resource, costs.unit)(tokens[event.expert]))
            done[event.expert] += (event.end - event.start) / time
    assert all(abs(done[e] - 1) < 1e-6 for e in tokens | done)
    assert impossible(e for e in events if e.kind != "wait") == []
    moved = sum(plan.moved.tolist()) * spec.expert_bytes
    assert abs(sent["read weights"] - moved) <= len(step)  # a byte of rounding an expert
    held = [
        {e for e, share in zip(step.experts.tolist(), column.tolist()) if share > 0}
        for column in (*plan.units.T, plan.host)
    ]  # experts of which each unit and the host has a part
    messages = [sum(not its.isdisjoint(row) for row in ids.tolist()) for its in held]
    least = (max(messages) if plan.broadcast else sum(messages)) + sum(messages)
    crossed = sent["read activations"] / (ACTIVATION_BYTES * costs.spec.H)
    assert crossed >= least
    if len(ids) == 1 or plan.broadcast and (plan.units > 0).all():
        assert crossed == least


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_lost_in_random_configurations(seed):
    """Models of one layer, machines, systems and routings; the closed form is exact where one side
    is alone, or one token and no weights are on the link."""
    rng = random.Random(seed)
    E = rng.randint(1, 24)
    size = dict(gated=rng.random() < 0.8, heads=8, kv_heads=2, head_dim=64, vocab=1000)
    H, I, K = 64 * rng.randint(1, 64), 32 * rng.randint(1, 200), rng.randint(1, min(E, 8))
    spec = MoESpec("random", "random", 1, (0,), E, K, H, I, **size)
    machine = hardware(
        rng.randint(1, 16),
        unit=rng.choice(("ndp-dimm-ddr4", "lpddr-ndp", "hbm-pim")),
        link_gbs=rng.choice([31.5, 63.0, 121.0]),
        mapping=rng.choice(MAPPINGS),
        shared_dram=rng.random() < 0.5,
        latency_us=rng.choice((0, 3)),
    )
    routing = simulated_routing(
        spec, seed, rng.randint(2, 40), rng.randint(1, 4), rng.choice((0, 0.5, 1.5))
    )
    routing.decode[rng.random() < 0.1] = E  # now and then a token without experts
    for system in SYSTEMS.values():
        run = NDPRun(machine, system, routing)
        steps = [(routing.prefill[:, 0], run.prefill_step(0, routing.counts()[0]))]
        steps += [(ids, run.decode_step(0, ids[0])) for ids in routing.decode]
        for ids, step in steps:
            plan = run.plan(step)
            seconds, events = simulate_layer(plan, run.costs)
            check(ids, plan, run.costs, events)
            if len(step):
                ratio = seconds / layer_seconds(plan, run.costs)
                alone = not (plan.receivers.any() and (plan.moved.any() or plan.step.S > 1))
                assert abs(ratio - 1) < 1e-9 if alone else ratio > 0.9
