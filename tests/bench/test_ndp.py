"""What notebook 07 counts: sums over small results by hand, and small runs."""

import math
from dataclasses import replace

import numpy as np
import pytest

import moelab
from moelab.bench import ndp
from moelab.ndp.costs import Costs, NotSupported
from moelab.ndp.hardware import VARIANTS
from moelab.ndp.prefetch import experts_that_fit
from moelab.ndp.routing import recorded_routing
from moelab.ndp.simulation import NDPRun, simulate
from moelab.ndp.sweep import MODELS, Assumptions, Sweep, paper_sweep
from moelab.specs import Event

LITERAL, BETTER = ndp.OURS[-1], ndp.OURS[-1] + ", improved"
ASSUMED = Assumptions()


def test_a_step_is_measured_by_its_events():
    events = [Event("gpu", "other", 0, -1, 0.0, 1.0), Event("unit 1", "expert", 0, 3, 1.0, 4.0)]
    found = ndp.step_figures(events, [(0.0, 4.0, 1, "decode")], N=2)
    assert found == {"seconds": 4.0, "gpu": 0.25, "link": 0.0, "modules": 0.375, "least": 0.0}


def test_the_design_space_ends_where_the_experts_fit():
    space = ndp.design_space((1, 6), ASSUMED)
    paper = next(iter(VARIANTS))
    assert math.isnan(space[MODELS[3]][paper][1]) and space[MODELS[3]][paper][6] > 0
    # on demand, a slower link costs its K experts a layer: 2 experts × 32 layers × 3 · 4096 · 14336
    # weights
    demand = ndp.design_space((6,), ASSUMED, "MoE-OnDemand")[MODELS[3]]
    sent = 2 * 32 * 3 * 4096 * 14336 * 2
    link = 0.85 * 32e9 * 128 / 130  # PCIe 4, of which 0.85 are reached
    assert demand["PCIe 4"][6] - demand[paper][6] == pytest.approx(sent / (2 * link), rel=1e-6)


def test_an_offloaded_generation_is_simulated_on_hypothetical_hardware(tmp_path):
    """Record what an offloaded model routes, and time it: on demand by hand, K experts a layer and
    token."""
    model = moelab.open_model(moelab.convert(None, tmp_path / "store", codec="raw"), memory="50%")
    trace = moelab.record(
        model, ["def add(a, b):\n", "import os\n"], max_new_tokens=4, min_new_tokens=4
    )
    model.moelab.close()
    spec, routing = trace.spec, recorded_routing(trace, 1)
    assert len(routing.decode) == 3
    taken = ndp.decode_times(routing, {"a": "MoE-OnDemand", "b": "NDP+TP"}, ASSUMED, N=4)
    costs = Costs(spec, ASSUMED.hardware(4))
    assert taken["a"] == pytest.approx(
        3 * spec.L * (spec.K * costs.transfer() + float(costs.gpu(1)))
    )
    assert set(taken) == {"a", "b"} and taken["b"] > 0


def test_cut_experts_compute_the_same():
    found = ndp.tensor_parallel_error(None, [5, 6, 7, 8], (1, 5))
    assert set(found) == {1, 5} and all(0 <= error < 1e-4 for error in found.values())
    external = ndp.tensor_parallel_error(None, [5, 6, 7, 8], (5,), "external")
    assert external[5] == pytest.approx(found[5], abs=1e-6)


def test_one_layer_by_both_engines():
    routing = ASSUMED.routing(MODELS[1], 0, 16, 8)
    found = ndp.one_layer(ASSUMED.hardware(4), ASSUMED.system("NDP+TP"), routing)
    assert found.seconds == pytest.approx(found.closed[0], rel=0.01) and len(found.closed) == 8
    assert found.seconds == pytest.approx(max(event.end for event in found.events))
    with pytest.raises(NotSupported):
        ndp.one_layer(ASSUMED.hardware(1), ASSUMED.system("NDP+TP"), routing)


def test_a_cached_expert_is_not_sent():
    """On demand with popular experts on the GPU, by hand: of K experts those that are not there
    cross the link."""
    assumed = replace(ASSUMED, cached="all")
    routing, machine = assumed.routing(MODELS[1], 0, 16, 8), assumed.hardware(2)
    run = NDPRun(machine, assumed.system("MoE-OnDemand"), routing)
    costs, seconds = run.costs, 0.0
    assert run.x == experts_that_fit(costs, 24) > 8
    for ids in routing.decode:
        for layer, chosen in enumerate(ids):
            popular = np.argsort(-routing.history[layer], kind="stable")[: run.x]
            sent = len(set(chosen.tolist()) - set(popular.tolist()))
            seconds += sent * costs.transfer() + (1 if sent else len(chosen)) * float(costs.gpu(1))
    found = simulate(machine, assumed.system("MoE-OnDemand"), routing)
    assert found.moe_decode == pytest.approx(seconds) and found.intermediate == 0
    alone = simulate(machine, ASSUMED.system("MoE-OnDemand"), routing)
    assert found.moe_prefill < alone.moe_prefill and found.moe_decode < alone.moe_decode


def test_equal_memory_helps_the_others_more():
    found = ndp.means(Sweep(ASSUMED), units=(3,), prompt=8, answer=8)
    assert set(found) == {"MoE-OnDemand", "Fiddler", "MoNDE"}
    assert all(
        of["equal memory: mean"] < of["the paper: mean"]
        for name, of in found.items()
        if name != "MoNDE"
    )


def test_balancing_adds_nothing_where_dram_is_shared():
    sizes = dict(units=(2,), prompt=4, answer=4)
    swept = paper_sweep(ASSUMED, seeds=(0,), **sizes)
    found = ndp.dram(swept, Sweep(ndp.physical(ASSUMED)), **sizes)
    assert found["NDP+TP+LB"]["shared"] == pytest.approx(found["NDP+TP"]["shared"], rel=1e-12)
    assert found["NDP+TP+LB, improved"]["shared"] == pytest.approx(
        found["NDP+TP"]["shared"], rel=1e-12
    )
    assert found["NDP+TP+LB"]["free"] > found["NDP+TP"]["free"] * 1.01
    assert (
        found["NDP+TP+PRE"]["shared"] > found["NDP+TP"]["shared"] * 1.05
    )  # what is on the GPU is not read
