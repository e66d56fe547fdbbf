"""Blocks: the mapping, and what is loaded for them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.static.blockwise import Blockwise, Loads, block_map, blocks_by_code
from tests.static.test_neuron import cases


def mapped_by_a_loop(ids, E, B):
    """[(expert, [(token, choice), …])] block by block, filled in order."""
    found = []
    for e in range(E):
        chosen = [
            (t, k) for t, row in enumerate(ids.tolist()) for k, of in enumerate(row) if of == e
        ]
        found += [(e, chosen[i : i + B]) for i in range(0, len(chosen), B)]
    return found


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 12))
def test_the_block_mapping_is_that_of_a_loop(case, B):
    _, ids, _, experts = case
    E, (T, K) = experts.num_experts, ids.shape
    m, expected = block_map(ids, E, B), mapped_by_a_loop(ids, E, B)
    assert m.tokens.shape == m.choices.shape == (len(m.block_to_expert), B)
    provisioned = blocks_by_code(T, K, E, B) if T else 0
    assert len(m.block_to_expert) == provisioned >= len(expected)
    assert m.live.tolist() == [True] * len(expected) + [False] * (len(m.live) - len(expected))
    for b, (e, chosen) in enumerate(expected):
        assert int(m.block_to_expert[b]) == e
        padded = chosen + [(-1, -1)] * (B - len(chosen))
        assert list(zip(m.tokens[b].tolist(), m.choices[b].tolist())) == padded
    assert (m.block_to_expert[len(expected) :] == E - 1).all()


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(1, 6))
def test_loads_are_those_of_a_walk_over_the_blocks(case, B):
    x, ids, weights, experts = case
    executor = Blockwise(B)
    executor(x, ids, weights, experts)
    walked = [e for e, _ in mapped_by_a_loop(ids, experts.num_experts, B)]
    loads = len(set(walked))
    assert executor.weight_loads == Loads(loads, len(walked) - loads)
    assert executor.row_loads.loaded == executor.tally.executed
    assert executor.row_loads.loaded + executor.row_loads.skipped == executor.tally.slots


def test_a_block_holds_at_least_one_token():
    with pytest.raises(ValueError, match="at least 1"):
        Blockwise(0)
