"""The sweep's averages against plain loops, and its names against the ledger's."""

from __future__ import annotations

from dataclasses import replace
from statistics import mean

import numpy as np
import pytest

from moelab import claims
from moelab.ndp.prefetch import experts_that_fit
from moelab.ndp.simulation import NDPRun, simulate
from moelab.ndp.sweep import MODELS, Assumptions, paper_sweep, quantities


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
    assert set(found) <= asked and len(found) == 13


def test_assumptions_reach_hardware_and_systems():
    a = replace(
        Assumptions(), mapping="MOP4CLXOR", monde_rounding="ceil", limit="memory", rounding="ceil"
    )
    assert (
        a.hardware(2).unit_bandwidth == pytest.approx(96e9)
        and a.hardware(2, pcie=4).link < a.hardware(2).link
    )
    assert a.system("MoNDE").rounding == "ceil" and a.system("NDP+TP+PRE").prefetches == "memory"
    b = replace(
        Assumptions(),
        mapping="stated",
        gpu_gb=17.0,
        shared_dram=True,
        monde_prefill="share",
        cached="Fiddler",
    )
    assert (b.hardware(2).unit_bandwidth, b.hardware(2).gpu_memory) == pytest.approx(
        (102.4e9, 17e9)
    )
    assert b.hardware(2).shared_dram and b.system("MoNDE").prefill == "share"
    assert b.system("Fiddler").cached and not b.system("MoNDE").cached
    equal = replace(Assumptions(), cached="all")
    assert equal.system("MoNDE").cached and equal.system("NDP+TP+LB+PRE").prefetches == "memory"
    assert (
        Assumptions().system("NDP+TP+PRE").prefetches == "K"
        and a.system("NDP+TP").prefetches == "none"
    )
    assert a.system("NDP+TP+LB, improved") == Assumptions().system("NDP+TP+LB, improved").__class__(
        prefetch=False, version="improved", rounding="ceil", limit="pay"
    )


def test_gains_are_over_the_seeds_and_only_where_both_are_supported():
    sweep = paper_sweep(
        models=MODELS[:2],
        units=(1, 2),
        systems=("MoNDE", "NDP+TP"),
        seeds=(0, 1),
        prompt=16,
        answer=4,
    )
    ratios = [
        sweep.result(MODELS[0], 2, "MoNDE", s).moe_decode
        / sweep.result(MODELS[0], 2, "NDP+TP", s).moe_decode
        for s in (0, 1)
    ]
    gain = sweep.gain(MODELS[0], 2, "NDP+TP", "MoNDE", "moe_decode")
    assert gain == pytest.approx((sum(ratios) / 2, min(ratios), max(ratios)))
    assert sweep.gain(MODELS[1], 1, "NDP+TP", "MoNDE", "moe_decode") is None  # 58 GB on one module
    every = sweep.mean_gains("NDP+TP", "MoNDE", "moe_decode", averaged=False)
    assert (
        set(every) == {(MODELS[0], 1), (MODELS[0], 2), (MODELS[1], 2)}
        and every[MODELS[0], 2] == gain[0]
    )
    assert set(sweep.mean_gains("NDP+TP", "MoNDE", "moe_decode", MODELS[0])) == {(MODELS[0], 2)}
    assert (sweep.models, sweep.units) == (list(MODELS[:2]), [1, 2])


def test_a_cached_expert_is_not_sent():
    """On demand with popular experts on the GPU, by hand: of K experts those that are not there
    cross the link."""
    assumed = replace(Assumptions(), cached="all")
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
    alone = simulate(machine, Assumptions().system("MoE-OnDemand"), routing)
    assert found.moe_prefill < alone.moe_prefill and found.moe_decode < alone.moe_decode


def test_balancing_adds_nothing_where_the_link_shares_the_modules_memory():
    names = ("MoNDE", "NDP+TP", "NDP+TP+LB", "NDP+TP+PRE", "NDP+TP+LB, improved")
    decode = {}
    for shared in (False, True):
        assumed = replace(Assumptions(), shared_dram=shared)
        swept = paper_sweep(assumed, systems=names, units=(2,), seeds=(0,), prompt=4, answer=4)
        of = quantities_of(swept, names)
        decode[shared] = {name: of[name] / of["NDP+TP"] for name in names}
    assert decode[True]["NDP+TP+LB"] == pytest.approx(1, rel=1e-12)
    assert decode[True]["NDP+TP+LB, improved"] == pytest.approx(1, rel=1e-12)
    assert decode[False]["NDP+TP+LB"] > 1.01
    assert decode[True]["NDP+TP+PRE"] > 1.05  # what is on the GPU is not read


def quantities_of(sweep, names):
    """Mean speedup of the experts' decode over MoNDE, by system."""
    return {name: mean(sweep.speedups(name, "MoNDE", "moe_decode", 0).values()) for name in names}
