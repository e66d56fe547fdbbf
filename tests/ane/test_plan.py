"""Plans: every expert in one graph that fits, the systems as Table 2 has them, and counts equal to
a naive loop's."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import moelab.simulation.routing
from moelab import cards
from moelab.ane.plan import (
    FORMAT,
    ANEPlan,
    make_plan,
)
from moelab.ane.systems import (
    ATTENTION_GRAPHS,
    NO_EXPERT_GRAPHS,
    SYSTEMS,
    why_no_graph,
)
from moelab.base.specs import MoESpec
from notebooks.studies.ane_counts import by_layer, count
from notebooks.studies.ane_popularity import assumed_counts, assumed_loads
from notebooks.studies.ane_published import ABLATION
from notebooks.studies.chunks import loads_of_ids

PHI, QWEN = cards.load_model("Phi-3.5-MoE"), cards.load_model("Qwen3-30B-A3B")
SMALL = MoESpec("small", "test", 3, (0, 2), E=6, K=2, H=8, I=16, heads=2, kv_heads=1, head_dim=4)


def random_ids(tokens, seed=0, spec=SMALL):
    """[T, L, K]: K different experts for each token, some of them popular, a few "none"."""
    rng = np.random.default_rng(seed)
    popular = rng.gumbel(size=(tokens, spec.L, spec.E)) + np.linspace(2, 0, spec.E)
    ids = np.argsort(-popular, axis=2)[:, :, : spec.K]
    ids[rng.random(ids.shape) < 0.02] = spec.E
    return ids


def naive(plan, ids):
    """(executed, slots, launches) of each layer, token by token."""
    executed, slots, launches = ([0] * plan.spec.L for _ in range(3))
    for start in range(0, len(ids), plan.chunk):
        for l, layer in enumerate(plan.layers):
            came = [
                e for token in ids[start : start + plan.chunk] for e in token[l] if e < plan.spec.E
            ]
            for group in layer.groups:
                tokens = [came.count(e) for e in group.experts]
                if group.unit == "ane" and sum(tokens):
                    launches[l] += 1
                    slots[l] += group.capacity * len(tokens)
                    executed[l] += sum(min(n, group.capacity) for n in tokens)
                else:
                    slots[l] += sum(tokens)
                    executed[l] += sum(tokens)
    return executed, slots, launches


@pytest.mark.parametrize("system", SYSTEMS)
def test_the_account_is_a_naive_loops(system):
    ids, seen = random_ids(150, seed=1), random_ids(300)
    counts = loads_of_ids(torch.tensor(seen), len(seen), SMALL.E)[0].numpy()
    plan = make_plan(SMALL, counts, len(seen), 64, 2, system=system, slack=0.5, min_rows=12)
    loads = loads_of_ids(torch.tensor(ids), 64, SMALL.E).numpy()
    accounts, account = by_layer(plan, loads), count(plan, loads)
    for name, theirs in zip(("executed", "slots", "launches"), naive(plan, ids)):
        assert [getattr(of, name) for of in accounts] == theirs
        assert getattr(account, name) == sum(theirs)
    assert [of.routed for of in accounts] == [(ids[:, l] < SMALL.E).sum() for l in range(SMALL.L)]
    assert account.drop_rate == pytest.approx(1 - account.executed / account.routed)
    assert account.padded_fraction == pytest.approx(1 - account.executed / account.slots)


@given(
    st.sampled_from(sorted(SYSTEMS)),
    st.sampled_from([16, 50, 256]),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(500, 5000),
    st.floats(0, 0.6),
    st.floats(0, 40),
    st.integers(0, 1000),
)
def test_every_expert_once_in_equal_tiers_within_the_limit(
    system, chunk, size, limit, cold, rows, seed
):
    counts = np.random.default_rng(seed).integers(0, 90, (SMALL.L, SMALL.E)) + 1
    plan = make_plan(
        SMALL,
        counts,
        300,
        chunk,
        size,
        max_graph_mb=limit / 1e6,
        system=system,
        cold_share=cold,
        min_rows=rows,
    )
    for layer in plan.layers:
        assert sorted(e for group in layer.groups for e in group.experts) == list(range(SMALL.E))
        assert set(layer.groups) == set(layer.on("ane")) | set(layer.on("cpu"))
        for group in layer.groups:
            assert {layer.tiers.capacity[e] for e in group.experts} == {group.capacity}
            assert group.capacity % 16 == 0 and len(group.experts) <= size
            assert group.weight_bytes == len(group.experts) * SMALL.expert_params * 2
        for group in layer.on("ane"):
            assert group.weight_bytes <= limit
    assert plan == ANEPlan.from_dict(json.loads(json.dumps(plan.to_dict())))


# ---- systems


def phi_plan(system="npumoe", chunk=256, **options):
    counts, tokens = assumed_counts(PHI, chunk)
    return make_plan(PHI, counts, tokens, chunk, system=system, **options)


def test_each_step_of_the_ablation_adds_one_thing():
    base, tiers, groups, everything = (phi_plan(system) for system in ABLATION)
    assert base.launches == tiers.launches == PHI.L * PHI.E  # one graph an expert
    assert len({g.capacity for layer in base.layers for g in layer.groups}) == 1
    assert tiers.slots < base.slots
    assert groups.slots == tiers.slots and groups.launches < tiers.launches / 3
    assert everything.slots < groups.slots and any(layer.on("cpu") for layer in everything.layers)
    assert not any(layer.on("cpu") for plan in (base, tiers, groups) for layer in plan.layers)


def test_what_does_not_fit_goes_to_the_cpu_and_says_why():
    plan = phi_plan(max_graph_mb=100)
    assert not any(layer.on("ane") for layer in plan.layers)
    assert "157 MB of weights" in plan.problems[0] and "100 MB" in plan.problems[0]
    assert (
        phi_plan(max_graph_mb=100, bytes_per_weight=1)
        .problems[0]
        .startswith("groups of 1 instead of 8")
    )
    wide = MoESpec(
        "wide", "test", 1, (0,), E=4, K=1, H=64, I=20000, heads=2, kv_heads=2, head_dim=32
    )
    plan = make_plan(wide, np.ones((1, 4)), 4)
    assert "20,000 input channels" in plan.problems[0] and not plan.layers[0].on("ane")


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: make_plan(SMALL, np.ones((2, 6)), 6, system="gpu"), "no system 'gpu'"),
        (lambda: make_plan(SMALL, np.ones((2, 5)), 6), "2 MoE layers of 6 experts"),
        (lambda: ANEPlan.from_dict({"format": "else"}), "make_plan"),
        (
            lambda: count(make_plan(SMALL, np.ones((2, 6)), 6, 16), np.ones((1, 2, 5), int)),
            "not chunks by 2 layers",
        ),
        (
            lambda: count(make_plan(SMALL, np.ones((2, 6)), 6, 16), np.full((1, 2, 6), 17)),
            "17 tokens in a chunk of 16",
        ),
        (lambda: assumed_loads(SMALL, 16, skew="wild"), "no skew 'wild'"),
        (
            lambda: make_plan(SMALL, np.ones((2, 6)), 6, bytes_per_weight=0),
            "bytes_per_weight 0, .* positive",
        ),
        (lambda: make_plan(SMALL, np.ones((2, 6)), 6, group_size=0), "group_size 0; .* positive"),
        (lambda: make_plan(SMALL, np.ones((2, 6)), 6, slack=-1), "slack=-1"),
        (lambda: make_plan(SMALL, np.ones((2, 6)), 0), "tokens=0"),
        (lambda: ANEPlan.from_dict([]), "'list'; make it again"),
        (lambda: ANEPlan.from_dict({"format": FORMAT}), "the plan lacks chunk, layers"),
    ],
)
def test_bad_input_is_told(call, told):
    with pytest.raises(ValueError, match=told):
        call()


def test_fixed_capacities_and_a_bound_on_graphs():
    """By loops: the smallest capacity that holds an expert's expected load, and the hottest
    graphs."""
    counts, tokens = assumed_counts(PHI)
    plan = make_plan(PHI, counts, tokens, capacities=(64, 32, 128), cold_share=0, min_rows=0)
    for row, layer in zip(counts * (256 / tokens), plan.layers):
        for load, capacity in zip(row, layer.tiers.capacity):
            assert capacity == next((C for C in (32, 64, 128) if load <= C), 128)
    few = make_plan(
        PHI, counts, tokens, capacities=(64, 32, 128), cold_share=0, min_rows=0, max_graphs=10
    )
    expected = sorted((group.expected for group in plan.graphs), reverse=True)
    assert sorted((group.expected for group in few.graphs), reverse=True) == expected[:10]
    assert [len(of.groups) for of in few.layers] == [len(of.groups) for of in plan.layers]
    assert make_plan(PHI, counts, tokens, max_graphs=10**6) == make_plan(PHI, counts, tokens)
    with pytest.raises(ValueError, match="multiple of 16"):
        make_plan(PHI, counts, tokens, capacities=(32, 40))


# ---- operators


@pytest.mark.parametrize("card", cards.MODELS)
def test_what_has_no_graph_is_planned_for_the_cpu_and_says_why(card):
    spec = cards.load_model(card)
    plan = make_plan(spec, *assumed_counts(spec, chunks=2), max_graph_mb=1e6)
    attention, experts = (
        spec.model_type in ATTENTION_GRAPHS,
        spec.model_type not in NO_EXPERT_GRAPHS,
    )
    assert {layer.attention for layer in plan.layers} == {"ane" if attention else "cpu"}
    assert any(layer.on("ane") for layer in plan.layers) == experts
    assert [
        word
        for word in ("experts on", "attention on")
        if any(p.startswith(word) for p in plan.problems)
    ] == (["experts on"] * (not experts) + ["attention on"] * (not attention))
    assert (why_no_graph("attention", spec.model_type) == "") == attention


@pytest.mark.parametrize("card, machine", [("Phi-3.5-MoE", 192e9), ("Qwen3-30B-A3B", 96e9)])
def test_the_papers_models_fit_their_macs(card, machine):
    """PhiMoE has 83.75 GB, Qwen3 28.64 G parameters in 16 bits (§5.1). All experts fit on the CPU
    besides, or, where routing is even and almost all have graphs, those without."""
    spec = cards.load_model(card)
    drawn = moelab.simulation.routing.routing_of(spec)[0].trace(spec, [1024]).counts()
    skewed, even = make_plan(spec, drawn, 1024), make_plan(spec, drawn * 0 + 1, spec.E // spec.K)
    everything = skewed.memory(experts=spec.experts_bytes)
    assert sum(skewed.memory().values()) < sum(everything.values()) < machine
    assert sum(even.memory().values()) < machine
    for plan in (skewed, even):
        on_ane = sum(len(group.experts) for group in plan.graphs) * spec.expert_bytes
        assert plan.memory()["experts on the CPU"] == spec.experts_bytes - on_ane
    weights = everything["experts on the CPU"] + everything["other weights"]
    total = cards.load_card(card)["figures"]["total_params"]["value"]
    assert weights == pytest.approx(2 * total, rel=0.015)
    assert even.memory(8192)["KV cache"] == 4 * even.memory()["KV cache"]
