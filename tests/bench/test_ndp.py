"""The parts of the GPU-NDP bench: sums over small results by hand, and small runs."""

import math
from types import SimpleNamespace

import pytest
import torch

import moelab
from moelab.bench import ndp
from moelab.ndp.fit import FIT, HALVES, JUDGED
from moelab.ndp.costs import Costs, NotSupported
from moelab.ndp.hardware import VARIANTS
from moelab.ndp.routing import recorded_routing
from moelab.ndp.sweep import MODELS, Assumptions, Sweep, paper_sweep
from moelab.specs import Event
from moelab.viz import ndp_tables as tables

LITERAL, BETTER = ndp.OURS[-1], ndp.OURS[-1] + ", improved"
ASSUMED = Assumptions()


def result(**figures):
    return SimpleNamespace(**{"moe_prefill": 1.0, "moe_decode": 1.0, "end_to_end": 1.0} | figures)


def test_gains_pair_the_cells_that_both_have():
    cells = {("m", 2, LITERAL, 0): result(moe_decode=3.0), ("m", 2, BETTER, 0): result(moe_decode=2.0),
             ("m", 1, LITERAL, 0): None, ("m", 1, BETTER, 0): None}
    sweep = Sweep(ASSUMED, cells)
    assert ndp.gains(sweep) == {"moe_prefill": [1.0], "moe_decode": [1.5], "end_to_end": [1.0]}


def test_a_step_is_measured_by_its_events():
    events = [Event("gpu", "other", 0, -1, 0.0, 1.0), Event("unit 1", "expert", 0, 3, 1.0, 4.0)]
    found = ndp.step_figures(events, [(0.0, 4.0, 1, "decode")], N=2)
    assert found == {"seconds": 4.0, "gpu": 0.25, "link": 0.0, "modules": 0.375, "least": 0.0}


def test_what_moves_a_figure_most_comes_first():
    names = ndp.SHORT_ANSWERS[:2]
    table = {"as fitted": dict.fromkeys(names, 2.0), "zipf = 1": {names[0]: 2.0, names[1]: 1.0},
             "bias = 0": {names[0]: 2.2, names[1]: 2.0}}
    assert ndp.moved(table, names) == {"zipf = 1": pytest.approx(1.0), "bias = 0": pytest.approx(0.1)}


def test_agreement_counts_each_half():
    found = {name: (ndp.CLAIMS[name].value if isinstance(ndp.CLAIMS[name].value, float) else 0.9, 0, 0)
             for name in (*FIT, *JUDGED)}
    assert ndp.agreeing(found) == {half: len(names) for half, names in HALVES.items()}
    found[FIT[0]] = (9.0, 0, 0)
    assert ndp.agreeing(found)["fit"] == len(FIT) - 1
    assert ndp.published(found, ASSUMED)[FIT[0]]["agrees"] is False


def test_distances_are_per_cent():
    row = {f"{phase}: {what}": value for phase in ("prefill", "decode")
           for what, value in (("least", 1.0), ("mean", 1.1), ("most", 1.5))}
    assert ndp.distances({"TP": row})["decode"]["TP"] == pytest.approx((10, 0, 50))


def test_never_slower():
    found = {"a": [(1, 1.0), (2, 2.0)], "b": [(1, 1.0), (2, 3.0)]}
    assert ndp.never_slower(found, "a") and not ndp.never_slower(found, "b")


def test_the_design_space_ends_where_the_experts_fit():
    space = ndp.design_space((1, 6), ASSUMED)
    paper = next(iter(VARIANTS))
    assert math.isnan(space[MODELS[3]][paper][1]) and space[MODELS[3]][paper][6] > 0
    # on demand, a slower link costs its K experts a layer: 2 experts × 32 layers × 3 · 4096 · 14336 weights
    demand = ndp.design_space((6,), ASSUMED, "MoE-OnDemand")[MODELS[3]]
    sent = 2 * 32 * 3 * 4096 * 14336 * 2
    link = 0.85 * 32e9 * 128 / 130                                          # PCIe 4, of which 0.85 are reached
    assert demand["PCIe 4"][6] - demand[paper][6] == pytest.approx(sent / (2 * link), rel=1e-6)


def test_prompts_by_length_and_a_filled_memory():
    found = ndp.prefill_seconds(MODELS[3], {"demand": "MoE-OnDemand", "TP": "NDP+TP"}, (8, 64), ASSUMED)
    assert found["demand"][1][1] < 2 * found["demand"][0][1] and found["TP"][1][1] > 4 * found["TP"][0][1]
    sweep = paper_sweep(ASSUMED, MODELS[:1], (2,), (LITERAL,), (0,), 16, 8)
    assert ndp.filling(sweep, 0, 16, 8) > 0


def test_an_offloaded_generation_is_simulated_on_hypothetical_hardware(tmp_path):
    """Record what an offloaded model routes, and time it: on demand by hand, K experts a layer and token."""
    model = moelab.open_model(moelab.convert(None, tmp_path / "store", codec="raw"), memory="50%")
    trace = moelab.record(model, ["def add(a, b):\n", "import os\n"], max_new_tokens=4, min_new_tokens=4)
    model.moelab.close()
    spec, routing = trace.spec, recorded_routing(trace, 1)
    assert len(routing.decode) == 3
    taken = ndp.decode_times(routing, {"a": "MoE-OnDemand", "b": "NDP+TP"}, ASSUMED, N=4)
    costs = Costs(spec, ASSUMED.hardware(4))
    assert taken["a"] == pytest.approx(3 * spec.L * (spec.K * costs.transfer() + float(costs.gpu(1))))
    assert set(taken) == {"a", "b"} and taken["b"] > 0


def test_increments_are_ratios_of_levels():
    found = {name: (2.0, 2.0, 2.0) for name in (*FIT, *JUDGED)} | {"decode NDP+TP+LB": (2.2, 2.2, 2.2)}
    rows = {row["what a technique adds"]: row for row in tables.increments(found)}
    assert (rows["decode: +LB on +TP"]["paper"], rows["decode: +LB on +TP"]["ours"]) == ("+10.1%", "+10.0%")
    assert rows["decode: +PRE on +TP"]["paper"] == "+12.1%" and rows["decode: +LB on +TP+PRE"]["paper"] == "+8.1%"
    assert tables.recorded({"real": {"x": 3.0, "y": 1.5}}, "x")[1] == {"schedule": "y", "real, over x": "2.00×"}


def test_cut_experts_compute_the_same():
    model = moelab.open_model(None)
    before = [parameter.dtype for parameter in model.parameters()]
    found = ndp.tensor_parallel_error(model, [5, 6, 7, 8], (1, 5))
    assert set(found) == {1, 5} and all(0 <= error < 1e-4 for error in found.values())
    assert [parameter.dtype for parameter in model.parameters()] == before          # a copy was cut, not the model
    assert model(torch.tensor([[5, 6]])).logits.shape[1] == 2


def test_one_layer_by_both_engines():
    routing = ASSUMED.routing(MODELS[1], 0, 16, 8)
    found = ndp.one_layer(ASSUMED.hardware(4), ASSUMED.system("NDP+TP"), routing)
    assert found.seconds == pytest.approx(found.closed[0], rel=0.01) and len(found.closed) == 8
    assert found.seconds == pytest.approx(max(event.end for event in found.events))
    with pytest.raises(NotSupported):
        ndp.one_layer(ASSUMED.hardware(1), ASSUMED.system("NDP+TP"), routing)
