"""The study of static shapes against plain loops: routings, padding, blocks, drops and what they
cost; the guide's examples against a calculator."""

from itertools import combinations, product
from math import comb

import numpy as np
import pytest
import torch

import moelab
from moelab.experts.executor import Tally
from moelab.static.static import CapacityFactor, Tiered
from moelab.trace import DECODE
from notebooks.studies import static


@pytest.fixture(scope="module")
def model():
    return moelab.open_model(None)


@pytest.fixture(scope="module")
def trace(model):
    texts = static.texts(model.tokenizer, "train", 1, 96)
    return moelab.record(model, texts, batch_size=4, max_new_tokens=5, min_new_tokens=5)


def naive_share(routings, T, K, B, skip):
    """Slots without a token over slots, block by block: all experts but one have a token each, in a
    block each, one has all the others; never more than choices."""
    slots = empty = 0
    for counts in routings:
        filled = [min(B, n - start) for n in counts for start in range(0, n, B)]
        E = len(counts)
        provided = min(E - 1 + len(range(0, T * K - (E - 1), B)), T * K)
        provided = len(filled) if skip else provided
        slots, empty = slots + provided * B, empty + provided * B - sum(filled)
    return empty / slots


def test_padding_curves_are_a_naive_loops():
    T, E, K = 48, 6, 2
    ids = static.routing(T, E, K, 0.5, 0)
    assert all(len(set(row)) == K for row in ids.tolist())
    assert static.routed(T, E, K, 0.5, 0) == tuple(int((ids == e).sum()) for e in range(E))
    loads = torch.tensor([static.routed(T, E, K, 0.5, s) for s in range(4)])
    curves = static.padding_curves(loads.view(2, 2, E), T, K, "toy", seed=7)
    assert list(curves) == ["uniform", "Zipf 1.2", "toy: real", static.ALL_BLOCKS]
    drawn = [static.routed(T, E, K, 1.2, 7 + i) for i in range(8)]
    for n, B in enumerate(static.SIZES):
        for name, counts, skip in (
            ("toy: real", loads.tolist(), True),
            (static.ALL_BLOCKS, loads.tolist(), False),
            ("Zipf 1.2", drawn, True),
        ):
            assert curves[name][n] == (B, pytest.approx(naive_share(counts, T, K, B, skip)))
    ids = torch.stack([static.routing(40, 5, 2, skew, 1) for skew in (0.0, 1.5)], 1)  # [T, L, K]
    assert static.slots_are_the_formulas(ids, 5, (4, 32))


def test_unique_experts_of_a_batch(trace):
    found, E, K = static.unique_experts(trace, (1, 2)), trace.spec.E, trace.spec.K
    decode = trace.select(trace.phase == DECODE)

    def chosen(s, i, layer):
        return set(decode.ids[decode.sequence == s][i, layer].tolist())

    pairs = [
        len(chosen(s, i, layer) | chosen(s + 1, i, layer))
        for s in range(0, trace.sequences, 2)
        for i in range(4)
        for layer in range(trace.spec.L)
    ]
    assert found["counted"] == [(1, pytest.approx(K)), (2, pytest.approx(np.mean(pairs)))]
    assert found["independent, even"][1][1] == pytest.approx(E * (1 - (1 - K / E) ** 2))
    assert found["provisioned: min(bK, E)"] == [(1, K), (2, 2 * K)]


@pytest.mark.parametrize(
    "make",
    [
        lambda _: CapacityFactor(0.6),
        lambda s: Tiered([[6] * 32] * 6, saliency=s),
        lambda _: Tiered([[6] * 32] * 6, order="router"),
    ],
    ids=["factor", "saliency", "router"],
)
def test_texts_of_a_batch_have_capacities_of_their_own(make):
    """Read together they lose what each loses alone."""
    model, alone = moelab.open_model(dtype=torch.float32), []
    ids = torch.randint(3, 999, (3, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), static.limited(model, make) as together:
        logits = model(ids).logits
    for row, expected in zip(ids, logits):
        with torch.no_grad(), static.limited(model, make) as executor:
            torch.testing.assert_close(model(row[None]).logits[0], expected, rtol=1e-3, atol=1e-3)
        alone.append((executor.tally.routed, executor.tally.executed, executor.tally.slots))
    assert together.tally == Tally(*map(sum, zip(*alone))) and together.tally.dropped > 0


def test_ways_of_tiers_drop_what_their_capacities_say(model, trace):
    plan = static.TierPlan.of(moelab.calibrate(trace), 256, 4)  # capacities of 16 and of 32 or more
    assert plan.launches == np.mean([len(of) for of in plan.groups])
    for printed, own in zip(plan.printed, plan.tiers):
        assert sum(printed.capacity) <= sum(own.capacity)
    text = static.texts(model.tokenizer, "test", 1, 96)[:1]
    ways = {name: way for name, way in plan.ways().items() if "groups" not in name}
    ran = static.tallies(model, ways, text)
    assert ran["tiers, pad"].dropped == 0
    assert ran["tiers, literal B/E"].dropped > ran["tiers, prune"].dropped
    orders = static.drop_orders(plan.tiers)
    orders = {name: orders[name] for name in ("token", "random", static.NO_EXPERTS)}
    costs = static.costs(model, orders, ("loss",), n=2, windows=2, tokens=96)
    assert costs.tally(static.NO_EXPERTS).executed == 0 < costs.tally("token").executed
    assert costs.loss("token")[0] < costs.loss(static.NO_EXPERTS)[0]
    assert costs.verdict("random").startswith("indistinguishable")


def test_figures_are_what_a_calculator_says():
    found = {name: value for name, (value, _) in static.figures().items()}
    router = 2880 * 128 * 2
    flops, moved = 2 * 32 * 4096 * 12288, 2 * (32 * 4096 + 32 * 12288 + 4096 * 12288)
    blocks = {"blocks_provisioned": -(-2000 // 256) + 7, "blocks_needed": 8}
    assert {name: found[name] for name in blocks} == blocks
    assert found["worst_possible_blocks"] == found["blocks_provisioned"]
    for name, value in {
        "router_mb": router / 1e6,
        "router_share": 36 * router / 24e9,
        "padding_to_provisioned": (15 - 8) / 8,
        "padding_algorithmic": (8 * 256 - 2000) / 2000,
        "token_skipping_saves": 2880 / (4 * 2880 + 3 * 2880**2),
        "intensity_decode_batch_32": flops / moved,
        "experts_needed_256_8_32": 256 * (1 - (1 - 8 / 256) ** 32),
    }.items():
        assert found[name] == pytest.approx(value, rel=0.08 if name == "router_share" else 1e-9)


@pytest.mark.parametrize("E, K, batch", [(4, 2, 3), (5, 1, 4), (6, 3, 2)])
def test_expected_unique_experts_counted_by_brute_force(E, K, batch):
    choices = list(combinations(range(E), K))
    sizes = [len(set().union(*step)) for step in product(choices, repeat=batch)]
    assert len(sizes) == comb(E, K) ** batch
    assert static.expected_unique(batch, [K / E] * E) == pytest.approx(sum(sizes) / len(sizes))
