"""Blocks: N, padding, and the worked examples of the guide."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab import cards
from moelab.static.blockwise import Blockwise, blocks_by_code
from notebooks.studies import blocks
from tests.static.test_neuron import H, I, cases


def compositions(total, parts, most):
    if parts == 1:
        return [(total,)] if total <= most else []
    return [
        (n, *rest)
        for n in range(min(total, most) + 1)
        for rest in compositions(total - n, parts - 1, most)
    ]


@pytest.mark.parametrize("T, E", list(product(range(0, 8), range(1, 6))))
def test_n_blocks_are_always_enough_by_brute_force(T, E):
    for K, B in product(range(1, E + 1), range(1, 8)):
        worst = max(blocks.blocks_needed(counts, B) for counts in compositions(T * K, E, T))
        assert worst <= blocks_by_code(T, K, E, B) <= max(blocks.blocks_by_text(T, K, E, B), 0)


@given(cases(), st.integers(1, 12))
def test_padding_equals_the_formulas(case, B):
    x, ids, weights, experts = case
    (T, K), E = ids.shape, experts.num_experts
    counts = torch.bincount(ids.flatten(), minlength=E + 1)[:E]
    found = blocks.padding(counts, T, K, B)
    static = Blockwise(B, skip_blocks=False)
    static(x, ids, weights, experts)
    assert static.tally.slots == (found.slots if T else 0)
    if T:
        assert (
            static.tally.slots - static.tally.executed
            == found.padded
            == found.provisioned * B - int(counts.sum())
        )
    skipping = Blockwise(B)
    skipping(x, ids, weights, experts)
    assert skipping.tally.slots == found.needed * B
    if found.pairs:
        assert skipping.tally.slots / found.pairs - 1 == pytest.approx(found.algorithmic)
        assert static.tally.slots / skipping.tally.slots - 1 == pytest.approx(found.worst_case)


def test_the_guides_worked_example_of_padding():
    best = blocks.padding([250] * 8, 1000, 2, 256, "text")
    assert (best.provisioned, best.needed, best.slots, best.needed * 256) == (15, 8, 3840, 2048)
    assert best.worst_case == 0.875 and best.algorithmic == pytest.approx(0.024)
    worst = blocks.padding([1750] + [36] * 6 + [34], 1000, 2, 256, "text")
    assert (worst.needed, worst.needed * 256) == (14, 3584)
    assert worst.worst_case == pytest.approx(
        0.0714, abs=5e-5
    ) and worst.algorithmic == pytest.approx(0.792)
    # 1750 of 1000 tokens cannot choose one expert: the worst that distinct top-2 can do is 1000
    possible = blocks.padding([1000] + [143] * 6 + [142], 1000, 2, 256, "text")
    assert possible.needed == 11 < worst.needed


def test_trainium2_has_the_guides_ratio_in_fp8_only():
    trn2 = cards.load_device("trn2")
    assert 400 <= blocks.intensity_target(trn2, "fp8") <= 500
    assert blocks.intensity_target(trn2) == pytest.approx(667e12 / 2.9e12)


def test_what_there_is_no_arithmetic_for_is_refused():
    trn2 = cards.load_device("trn2")
    for counts in ([5, 5], [], [-1, 2]):
        with pytest.raises(ValueError, match="1 tokens with 1 experts"):
            blocks.padding(counts, 1, 1, 2)
    assert blocks.padding([0, 0], 1, 1, 2).padded == 2  # "no expert" is chosen
    for wrong, told in (
        (lambda: blocks.padding([1], 1, 1, 8, "guess"), "code, text"),
        (lambda: blocks.intensity_target(trn2, "int3"), "bf16"),
    ):
        with pytest.raises(ValueError, match=told):
            wrong()


@given(cases(), st.integers(1, 6))
def test_what_cores_share_is_what_the_executor_counts(case, B):
    x, ids, weights, experts = case
    counts = torch.bincount(ids.flatten(), minlength=experts.num_experts + 1)[:-1]
    for way, found in blocks.shared(counts.tolist(), len(x), H, I, B).items():
        executor = Blockwise(B, sharding=way)
        executor(x, ids, weights, experts)
        if experts.has_gate or way != "H":
            assert executor.exchanged == found.exchanged
        half = 1 if way == "block" else 2
        assert found.loads * half <= executor.weight_loads <= found.loads * 2
        assert executor.tally.slots <= 2 * B * found.blocks
