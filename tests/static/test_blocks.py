"""Blocks: the mapping, and what is loaded for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import open_model, using
from moelab.static.blockwise import SHARDINGS, Blockwise, block_map, blocks_by_code
from tests.models import tiny
from tests.static.test_neuron import H, I, cases


def mapped_by_a_loop(ids, E, B):
    """[(expert, [(token, choice), …])] block by block, filled in order."""
    found = []
    for e in range(E):
        chosen = [
            (t, k) for t, row in enumerate(ids.tolist()) for k, of in enumerate(row) if of == e
        ]
        found += [(e, chosen[i : i + B]) for i in range(0, len(chosen), B)]
    return found


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


@given(cases(), st.integers(1, 6))
def test_loads_are_those_of_a_walk_over_the_blocks(case, B):
    x, ids, weights, experts = case
    executor = Blockwise(B)
    executor(x, ids, weights, experts)
    walked = [e for e, _ in mapped_by_a_loop(ids, experts.num_experts, B)]
    assert executor.weight_loads == len(set(walked))
    assert executor.tally.slots == len(walked) * B


@given(cases(), st.integers(1, 6), st.sampled_from(SHARDINGS))
def test_what_two_cores_exchange_and_load(case, B, sharding):
    """Along H what is before the activation of each slot, along I each slot's output, by blocks one
    output; of blocks an expert's are loaded by each core that has any of them."""
    x, ids, weights, experts = case
    executor = Blockwise(B, sharding=sharding)
    executor(x, ids, weights, experts)
    walked = [e for e, _ in mapped_by_a_loop(ids, experts.num_experts, B)]
    wide = I * (2 if experts.has_gate else 1)
    slots = len(walked) * B
    assert executor.exchanged == {"H": slots * wide, "I": slots * H, "block": len(x) * H}[sharding]
    cores = [walked[::2], walked[1::2]] if sharding == "block" else [walked]
    assert executor.weight_loads == sum(len({*of}) for of in cores)
    assert executor.tally.slots == slots


def test_what_is_no_block_or_cannot_be_shared_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        Blockwise(0)
    with pytest.raises(ValueError, match="no sharding 'h'.*'H'"):
        Blockwise(sharding="h")


def test_experts_of_other_code_are_not_cut_along_h(tmp_path):
    model = open_model(tiny.save("dbrx", tmp_path), dtype=torch.float32)
    ids = {"input_ids": torch.randint(3, 90, (1, 9))}
    with torch.no_grad():
        expected = model(**ids).logits
        for sharding in ("I", "block"):
            with using(model, executor="blockwise", sharding=sharding, block_size=4):
                torch.testing.assert_close(model(**ids).logits, expected, rtol=1e-4, atol=1e-5)
        with (
            using(model, executor="blockwise", sharding="H"),
            pytest.raises(ValueError, match="DbrxExperts.*I or block"),
        ):
            model(**ids)
