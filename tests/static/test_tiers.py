"""Tiers and groups against their definitions, written out naively, and the paper's own numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.static.tiers import Tiers, capacity_tiers, form_groups

counts_strategy = st.lists(st.integers(0, 1000), min_size=1, max_size=24).filter(any)


@given(
    counts_strategy,
    st.integers(1, 4000),
    st.sampled_from([16, 100, 256, 1024]),
    st.integers(1, 4),
    st.sampled_from(["topk", "paper"]),
    st.sampled_from([0.5, 1.0, 1.7]),
)
def test_every_expert_gets_the_smallest_level_that_holds_its_expected_load(
    counts, tokens, chunk, levels, rule, slack
):
    tokens = max(tokens, max(counts))  # an expert gets a token once at most
    (tiers,) = capacity_tiers([counts], tokens, chunk, levels=levels, rule=rule, slack=slack)
    assert (
        list(tiers.levels) == sorted(set(tiers.levels), reverse=True)
        and len(tiers.levels) <= levels
    )
    assert len(tiers.capacity) == len(counts)
    for count, capacity in zip(counts, tiers.capacity):
        assert capacity % 16 == 0 and capacity > 0 and capacity in tiers.levels
        expected = slack * count / tokens * chunk
        holding = [level for level in tiers.levels if level >= expected - 1e-6]
        assert capacity == (min(holding) if holding else max(tiers.levels))
    assert max(tiers.levels) <= -(-chunk // 16) * 16


def test_the_papers_example_and_the_factor_k_that_its_formula_lacks():
    """§4.1: B = 256, E = 8, r = 2 gives 2 · 256/8 = 64 tokens; with top-2 the busiest expert really
    gets 128."""
    counts = np.array(
        [512, 300, 300, 300, 200, 200, 136, 100]
    )  # 1024 tokens, top-2, mean 256, r = 2
    (paper,) = capacity_tiers([counts], 1024, 256, rule="paper")
    (ours,) = capacity_tiers([counts], 1024, 256)
    assert paper.levels[0] == 64 and paper.levels[-1] == 32 == 256 // 8
    assert ours.levels == (128, 96, 64)  # 64 · 2^(1, 1/2, 0): 90.5 rounds up to 96
    assert ours.capacity == (128, 96, 96, 96, 64, 64, 64, 64)
    assert set(paper.capacity[:4]) == {64}  # loads of 75 and more exceed all levels


@given(
    st.lists(
        st.tuples(st.sampled_from([16, 48, 128]), st.integers(0, 50)), min_size=1, max_size=40
    ),
    st.sampled_from([1, 2, 4, 8, 16]),
)
def test_groups_hold_every_expert_once_in_equal_tiers_hot_with_hot(experts, limit):
    capacity, counts = zip(*experts)
    tiers = Tiers(tuple(sorted(set(capacity), reverse=True)), capacity)
    groups = form_groups(tiers, counts, limit)
    assert sorted(e for group in groups for e in group.experts) == list(range(len(experts)))
    for group in groups:
        assert {capacity[e] for e in group.experts} == {group.capacity} and 1 <= len(
            group.experts
        ) <= limit
    for level in tiers.levels:  # no group is hotter than an earlier one of its tier
        of_level = [group for group in groups if group.capacity == level]
        flat = [counts[e] for group in of_level for e in group.experts]
        assert flat == sorted(flat, reverse=True)
        assert all(len(group.experts) == limit for group in of_level[:-1])


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: capacity_tiers([[1, 2]], 3, 256, rule="best"), "no rule 'best'"),
        (lambda: capacity_tiers([[1, 2]], 0, 256), "tokens=0"),
        (lambda: capacity_tiers([[1, 2]], 3, 256, slack=0), "slack=0"),
        (lambda: capacity_tiers([[1, 2], [0, 0]], 3, 256), "in every layer"),
        (lambda: capacity_tiers([[1, -2]], 3, 256), "not negative"),
    ],
)
def test_bad_input_is_told(call, told):
    with pytest.raises(ValueError, match=told):
        call()
