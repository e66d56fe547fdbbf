"""All-experts, selective, blockwise and the SDK's rule give what a loop over tokens gives, and
count what they do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import models
from moelab.base.registry import make
from moelab.checkpoint.opening import open_checkpoint
from moelab.experts.executor import Sorted
from moelab.static.blockwise import SHARDINGS, Blockwise
from moelab.static.neuron import (
    AllExperts,
    NeuronRule,
    neuron_choice,
)
from tests.depth import in_turn
from tests.experts.toy import LAYOUTS, make_experts, make_routing, naive
from tests.models import tiny

H, I = 12, 10


@st.composite
def cases(draw, most_tokens=40, most_experts=24):
    """(x, ids, weights, experts) of any shape, skew and layout; some choices are "no expert"."""
    E = draw(st.integers(1, most_experts))
    K = draw(st.integers(1, min(8, E)))
    T = draw(st.integers(0, most_tokens))
    seed = draw(st.integers(0, 2**16))
    ids, weights = make_routing(T, E, K, draw(st.sampled_from([0.0, 1.0, 4.0])), seed)
    if draw(st.booleans()):
        ids[torch.rand(T, K, generator=torch.Generator().manual_seed(seed)) < 0.2] = E
    if draw(st.integers(0, 4)) == 0:
        ids[:, 0] = draw(st.integers(0, E - 1))  # one expert hot, perhaps twice for a token
    experts = make_experts(E, H, I, draw(st.sampled_from(sorted(LAYOUTS))), seed=seed)
    return torch.randn(T, H, generator=torch.Generator().manual_seed(seed)), ids, weights, experts


def check(executor, x, ids, weights, experts):
    """Equal to the oracle, and every routed choice executed."""
    got = executor(x, ids, weights, experts)
    assert got.dtype == x.dtype
    torch.testing.assert_close(got.double(), naive(x, ids, weights, experts), rtol=2e-4, atol=2e-5)
    tally = executor.tally
    assert tally.routed == tally.executed == int((ids < experts.num_experts).sum()) <= tally.slots
    return tally


@given(cases(), st.sampled_from([1, 4, 16, 64]), st.sampled_from([0.8, 1.0]), st.integers(1, 4))
def test_all_are_lossless_and_compute_what_they_say(case, B, alpha, batch):
    T, experts = len(case[0]), case[3]
    for skip in (True, False):
        check(Blockwise(B, skip_blocks=skip), *case)
    for sharding in SHARDINGS:
        check(Blockwise(B, sharding=sharding), *case)
    assert check(AllExperts(), *case).slots == T * experts.num_experts
    rule = NeuronRule(block_size=B, alpha=alpha, batch=batch)
    check(rule, *case)
    assert sum(rule.chosen.values()) == 1


@given(cases())
def test_selective_loads_each_needed_expert_once(case):
    x, ids, weights, experts = case
    fetched = []
    plain = experts.weights
    experts.weights = lambda e: fetched.append(e) or plain(e)
    assert check(make("executor", "selective"), *case).padded_fraction == 0
    unique = {e for row in ids.tolist() for e in row if e < experts.num_experts}
    assert sorted(fetched) == sorted(unique)


def test_what_is_not_routed_is_masked_and_not_multiplied_by_zero():
    """An expert that overflows for tokens that did not choose it must not make them NaN."""
    experts = make_experts(2, 4, 4)
    experts.module.gate_up_proj[1] = 1e30
    x, ids, weights = torch.ones(3, 4), torch.tensor([[0], [0], [0]]), torch.ones(3, 1)
    got = AllExperts()(x, ids, weights, experts)
    assert got.isfinite().all()
    torch.testing.assert_close(got, Sorted()(x, ids, weights, experts))


def test_a_token_may_choose_an_expert_twice():
    experts, x = make_experts(3, 4, 4), torch.randn(2, 4)
    ids, weights = torch.tensor([[1, 1], [2, 1]]), torch.tensor([[0.25, 0.5], [0.5, 0.5]])
    for kind in (AllExperts, Sorted, Blockwise, NeuronRule):
        check(kind(), x, ids, weights, experts)


@pytest.mark.parametrize(
    "T, K, E, B, factor, decode, expected",
    [
        (1, 8, 128, 512, None, True, "selective"),
        (16, 8, 128, 512, None, True, "all_experts"),
        (15, 8, 128, 512, None, True, "selective"),
        (1, 8, 128, 512, 1.0, True, "selective"),
        (15, 8, 128, 512, None, False, "selective"),
        (16, 8, 128, 512, None, False, "all_experts"),
        (63, 8, 128, 512, None, False, "all_experts"),
        (64, 8, 128, 512, None, False, "blockwise"),
        (2, 8, 128, 512, 1.0, False, "capacity"),
        (64, 8, 128, 512, 16.0, False, "blockwise"),
        (600, 1, 4, 512, 3.9, False, "capacity"),
        (2, 1, 2, 512, None, False, "all_experts"),
    ],
)
def test_the_sdks_rule(T, K, E, B, factor, decode, expected):
    assert neuron_choice(T, K, E, decode=decode, block_size=B, capacity_factor=factor) == expected


def test_the_rule_with_a_capacity_factor_drops_in_prompts_only():
    experts = make_experts(8, 4, 4)
    ids = torch.zeros(40, 1, dtype=torch.long)
    executor = NeuronRule(capacity_factor=1.0)
    assert not executor.lossless and NeuronRule().lossless
    executor(torch.randn(40, 4), ids, torch.ones(40, 1), experts)
    assert (executor.tally.routed, executor.tally.executed) == (40, 5)
    executor(torch.randn(1, 4), ids[:1], torch.ones(1, 1), experts)
    assert (executor.tally.routed, executor.tally.executed) == (41, 6)
    assert executor.chosen == {"capacity": 1, "selective": 1}


@pytest.mark.parametrize(
    "name, opened",
    in_turn(
        ["llama4_text", "switch_transformers", "gpt_oss", "deepseek_v3"], ["resident", "external"]
    ),
)
def test_every_architecture_computes_what_it_computes_itself(name, opened, tmp_path):
    tokens = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": tokens} | (
        {"decoder_input_ids": tokens} if name == "switch_transformers" else {}
    )
    model = open_checkpoint(tiny.save(name, tmp_path), experts=opened)
    executors = [
        AllExperts(),
        Sorted(),
        NeuronRule(block_size=16),
        Blockwise(4),
        Blockwise(4, skip_blocks=False),
        *(Blockwise(4, sharding=of) for of in ("I", "block")),
    ]
    with torch.no_grad():
        expected = model(**inputs).logits
        for executor in executors:
            models.plug(model, executor)
            torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
            assert executor.tally.routed == executor.tally.executed > 0
