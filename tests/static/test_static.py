"""Static capacities: exactly those are dropped that a naive loop drops; padded, nothing is; slots
are counted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import models
from moelab.checkpoint.opening import open_checkpoint
from moelab.static.static import ORDERS, CapacityFactor, Grouped, Saliency, Tiered, capacity_of
from moelab.static.tiers import Group
from tests.experts.toy import make_experts, make_routing, naive
from tests.models import tiny
from tests.static.test_neuron import cases


def kept_by_a_loop(ids, weights, capacity, order, saliency, seed):
    """Choices that stay, as a mask [T, K], expert by expert."""
    T, K = ids.shape
    keep, rng = torch.zeros(T, K, dtype=torch.bool), torch.Generator().manual_seed(seed)
    chosen = [
        [(t, k) for t in range(T) for k in range(K) if int(ids[t, k]) == e]
        for e in range(len(capacity))
    ]
    luck = iter(torch.rand(sum(map(len, chosen)), generator=rng).tolist())
    score = {
        "saliency": lambda t, k: float(saliency[t]),
        "strongest": lambda t, k: -float(saliency[t]),
        "router": lambda t, k: float(weights[t, k]),
        "token": lambda t, k: 0,
        "random": lambda t, k: next(luck),
    }[order]
    for C, mine in zip(capacity, chosen):
        ranked = sorted((-score(t, k), t, k) for t, k in mine)
        for _, t, k in ranked if T == 1 and C else ranked[:C]:
            keep[t, k] = True
    return keep


def without_dropped(ids, keep, E):
    return torch.where(keep, ids, E)


@st.composite
def static_cases(draw):
    """A case with capacities [E] (some 0), and saliency with ties."""
    x, ids, weights, experts = draw(cases(most_experts=12))
    E = experts.num_experts
    capacity = draw(st.lists(st.integers(0, 6), min_size=E, max_size=E))
    saliency = torch.tensor(
        draw(st.lists(st.integers(0, 5), min_size=len(x), max_size=len(x))), dtype=torch.float32
    )
    return x, ids, weights, experts, capacity, {0: saliency}


def partition(E, capacity, size):
    """Groups of up to `size` experts of equal capacity."""
    groups = []
    for C in sorted(set(capacity)):
        of = [e for e in range(E) if capacity[e] == C]
        groups += [Group(tuple(reversed(of[i : i + size])), C) for i in range(0, len(of), size)]
    return groups


@given(
    static_cases(),
    st.sampled_from(sorted(ORDERS)),
    st.integers(0, 3),
    st.sampled_from([None, 1, 3]),
)
def test_pruning_drops_whom_a_loop_drops(case, order, seed, group_size):
    x, ids, weights, experts, capacity, saliency = case
    keep = kept_by_a_loop(ids, weights, capacity, order, saliency[0], seed)
    options = {"order": order, "saliency": saliency, "seed": seed}
    executor = (
        Grouped([partition(len(capacity), capacity, group_size)], **options)
        if group_size
        else Tiered([capacity], **options)
    )
    got = executor(x, ids, weights, experts)
    expected = naive(x, without_dropped(ids, keep, experts.num_experts), weights, experts)
    torch.testing.assert_close(got.double(), expected, rtol=2e-4, atol=2e-5)
    tally = executor.tally
    assert not executor.lossless
    assert tally.routed == int((ids < experts.num_experts).sum())
    assert (tally.executed, tally.dropped) == (int(keep.sum()), tally.routed - int(keep.sum()))
    assert tally.slots >= tally.executed


@given(static_cases(), st.sampled_from([None, 1, 3]))
def test_padding_drops_nobody_and_its_slots_are_counted(case, group_size):
    x, ids, weights, experts, capacity, _ = case
    E = experts.num_experts
    groups = partition(E, capacity, group_size or 1)
    executor = Grouped([groups], "pad") if group_size else Tiered([capacity], "pad")
    got = executor(x, ids, weights, experts)
    torch.testing.assert_close(got.double(), naive(x, ids, weights, experts), rtol=2e-4, atol=2e-5)
    counts, slots = torch.bincount(ids.flatten(), minlength=E + 1).tolist(), 0
    for group in groups:
        most = max(counts[e] for e in group.experts)
        rows = math.ceil(most / group.capacity) * group.capacity if group.capacity else most
        slots += len(group.experts) * rows
    assert executor.lossless and executor.tally.dropped == 0
    assert executor.tally.slots == slots


@given(
    cases(),
    st.sampled_from([0.1, 0.5, 1.0, 1.25, 2.0, 30.0]),
    st.sampled_from(["token", "router", "random"]),
)
def test_the_capacity_factor_drops_the_last_of_its_order(case, factor, order):
    x, ids, weights, experts = case
    (T, K), E = ids.shape, experts.num_experts
    C = capacity_of(T, K, E, factor)
    keep = kept_by_a_loop(ids, weights, [C] * E, order, None, 0)
    executor = CapacityFactor(factor, order)
    got = executor(x, ids, weights, experts)
    torch.testing.assert_close(
        got.double(),
        naive(x, without_dropped(ids, keep, E), weights, experts),
        rtol=2e-4,
        atol=2e-5,
    )
    assert executor.tally.executed == int(keep.sum())
    distinct = all(len(set(row)) == K for row in ids.tolist())
    if distinct:
        assert executor.tally.slots == E * C and C <= T


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Tiered([[1]], "spill"), "prune, pad"),
        (lambda: Tiered([[1]], order="loudest"), "saliency, router"),
        (lambda: Tiered([[1]]), "pass saliency="),
        (lambda: Tiered([], "pad"), "each MoE layer"),
        (lambda: Tiered([[-1]], "pad"), "negative"),
        (lambda: Grouped([[Group((0, 2), 4)]], "pad"), "exactly once"),
        (lambda: Grouped([[Group((0, 1), 4), Group((1,), 4)]], "pad"), "exactly once"),
        (lambda: CapacityFactor(0), "above 0"),
    ],
)
def test_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_capacities_of_another_model_and_saliency_of_another_pass_are_refused():
    experts, x, (ids, weights) = make_experts(4, 6, 4), torch.randn(5, 6), make_routing(5, 4, 2)
    with pytest.raises(ValueError, match="calibrate this model"):
        Tiered([[1, 1]], "pad")(x, ids, weights, experts)
    with pytest.raises(ValueError, match="same forward pass"):
        Tiered([[1] * 4], saliency={0: torch.ones(3)})(x, ids, weights, experts)


def opened(tmp_path, name="qwen3_moe"):
    """(model, its MoE layers behind the seam)."""
    model = open_checkpoint(tiny.save(name, tmp_path / name))
    return model, models.plug(model)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "llama4_text", "deepseek_v3"])
def test_saliency_is_the_norm_of_the_attention_output(name, tmp_path):
    (model, layers), seen = opened(tmp_path, name), {}
    hooks = [
        model.get_submodule(layer.name.rpartition(".")[0]).self_attn.register_forward_hook(
            lambda module, args, output, i=layer.index: seen.__setitem__(i, output[0])
        )
        for layer in layers
    ]
    tokens = torch.randint(3, 90, (2, 7), generator=torch.Generator().manual_seed(0))
    with Saliency(model, layers) as saliency, torch.no_grad():
        model(tokens)
        for layer in layers:
            by_hand = [
                sum(float(v) ** 2 for v in row) ** 0.5 for row in seen[layer.index].reshape(14, -1)
            ]
            torch.testing.assert_close(
                saliency[layer.index], torch.tensor(by_hand), rtol=1e-5, atol=1e-6
            )
    for hook in hooks:
        hook.remove()


def test_padded_tiers_and_groups_give_the_models_own_tokens(tmp_path):
    model, layers = opened(tmp_path, "qwen2_moe")
    prompt = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    options = {
        "attention_mask": torch.ones_like(prompt),
        "max_new_tokens": 4,
        "do_sample": False,
        "eos_token_id": None,
    }
    expected = model.generate(prompt, **options)
    E, L = layers[0].experts.num_experts, len(layers)
    for executor in (
        Tiered([[3] * E] * L, "pad"),
        Grouped([[Group(tuple(range(E)), 2)]] * L, "pad"),
        CapacityFactor(100.0),
    ):
        models.plug(model, executor)
        assert torch.equal(model.generate(prompt, **options), expected)
        assert executor.tally.dropped == 0 and executor.tally.padded_fraction > 0


def test_a_model_without_attention_beside_its_experts(tmp_path):
    model, layers = opened(tmp_path, "switch_transformers")
    with pytest.raises(ValueError, match="no attention module named self_attn"):
        Saliency(model, layers)
