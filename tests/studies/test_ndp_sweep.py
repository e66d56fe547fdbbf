"""The sweep's averages against plain loops, and its names against the ledger's."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import numpy as np
import pytest

from moelab import claims
from moelab.ndp.prefetch import experts_that_fit
from moelab.ndp.simulation import NDPRun, simulate
from notebooks.studies.ndp_readings import Readings
from notebooks.studies.ndp_sweep import MODELS, paper_sweep, quantities


@pytest.fixture(scope="module")
def sweep():
    return paper_sweep(units=(2, 6), seeds=(0,), prompt=24, answer=8)


def test_speedups_are_ratios_over_what_both_support(sweep):
    found = sweep.speedups("NDP+TP", "MoNDE", "moe_decode", 0)
    assert set(found) == {(m, 6) for m in MODELS} | {("DeepSeek-MoE-16B", 2), ("Qwen3-30B-A3B", 2)}
    mine, other = (sweep.result("Qwen3-30B-A3B", 6, name) for name in ("NDP+TP", "MoNDE"))
    assert found["Qwen3-30B-A3B", 6] == pytest.approx(other.moe_decode / mine.moe_decode)
    assert quantities(sweep, 0)["decode NDP+TP"] == pytest.approx(mean(found.values()))
    assert sweep.result("Mixtral-8x7B", 2, "MoNDE") is None
    assert sweep.result("Mixtral-8x7B", 2, "Fiddler") is not None


def test_every_claim_about_times_is_computed(sweep):
    found = quantities(sweep, 0)
    asked = {name for of in claims.ledger() if of.source == "gpu-ndp" for name in of.metric[1:]}
    assert set(found) <= asked and len(found) == 13 + 2 + 3 * len(MODELS)


def test_assumptions_reach_hardware_and_systems():
    a = replace(Readings(), mapping="MOP4CLXOR", monde_rounding="ceil", limit="memory")
    assert a.hardware(2).unit_bandwidth == pytest.approx(96e9)
    assert a.hardware(2, link_gbs=31.5).link < a.hardware(2).link
    assert a.system("MoNDE").rounding == "ceil" and a.system("NDP+TP+PRE").prefetches == "memory"
    assert a.system("NDP+TP").prefetches == "none"
    assert a.system("NDP+TP+PRE, improved").prefetches == "pay"
    b = replace(Readings(), gpu_gb=17.0, shared_dram=True, cached="Fiddler")
    assert b.hardware(2).gpu_memory == pytest.approx(17e9) and b.hardware(2).shared_dram
    assert b.system("Fiddler").cached and not b.system("MoNDE").cached
    assert replace(b, cached="all").system("NDP+TP+LB+PRE").prefetches == "memory"


def test_gains_are_over_the_seeds_and_only_where_both_are_supported():
    names, size = ("MoNDE", "NDP+TP"), dict(prompt=16, answer=4)
    sweep = paper_sweep(models=MODELS[:2], units=(1, 2), systems=names, seeds=(0, 1), **size)
    results = [[sweep.result(MODELS[0], 2, name, s).moe_decode for name in names] for s in (0, 1)]
    ratios = [monde / ours for monde, ours in results]
    gain = sweep.gain(MODELS[0], 2, "NDP+TP", "MoNDE", "moe_decode")
    assert gain == pytest.approx((sum(ratios) / 2, min(ratios), max(ratios)))
    assert sweep.gain(MODELS[1], 1, "NDP+TP", "MoNDE", "moe_decode") is None  # 58 GB on one module
    every = sweep.speedups("NDP+TP", "MoNDE", "moe_decode", 0, sweep.units)
    assert set(every) == {(MODELS[0], 1), (MODELS[0], 2), (MODELS[1], 2)}
    assert set(sweep.speedups("NDP+TP", "MoNDE", "moe_decode", 0)) == {*every} - {(MODELS[0], 1)}


def test_fewest_and_most_modules_and_the_least_of_all_cells(sweep):
    """By plain loops over the cells that both support."""
    found = quantities(sweep, 0)

    def gain(model, N, over, what="moe_decode"):
        mine, other = (sweep.result(model, N, name) for name in ("NDP+TP+LB+PRE", over))
        return getattr(other, what) / getattr(mine, what) if mine and other else None

    for model in MODELS:
        gains = [x for N in (2, 6) if (x := gain(model, N, "NDP+TP"))]
        assert found[f"hybrid_fewest_{model}"] == pytest.approx(gains[0])
        assert found[f"hybrid_six_{model}"] == pytest.approx(gains[-1])
        ends = [x for N in (2, 6) if (x := gain(model, N, "MoNDE", "end_to_end"))]
        assert found[f"end_to_end_{model}"] == pytest.approx(mean(ends))
    every = [x for m in MODELS for N in (2, 6) if (x := gain(m, N, "NDP+TP+LB"))]
    assert found["prefetching_beside_balancing_least"] == pytest.approx(min(every))


def test_a_cached_expert_is_not_sent():
    """On demand with popular experts on the GPU, by hand: of K experts those that are not there
    cross the link."""
    assumed = replace(Readings(), cached="all")
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
    alone = simulate(machine, Readings().system("MoE-OnDemand"), routing)
    assert found.moe_prefill < alone.moe_prefill and found.moe_decode < alone.moe_decode
