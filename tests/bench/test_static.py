"""The bench of static shapes against plain loops: routings, padding, blocks, drops and what they
cost."""

import numpy as np
import pytest
import torch

import moelab
from moelab.bench import static
from moelab.experts.executor import Tally
from moelab.static.static import CapacityFactor, Tiered
from moelab.trace import DECODE, PREFILL


@pytest.fixture(scope="module")
def model():
    return moelab.open_model(None)


@pytest.fixture(scope="module")
def trace(model):
    texts = static.texts(model.tokenizer, "train", 1, 96)
    return moelab.record(model, texts, batch_size=4, max_new_tokens=5, min_new_tokens=5)


def test_routing_names_distinct_experts_and_skews_as_told():
    ids = static.routing(4000, 16, 1, skew=1.0)
    counts = torch.bincount(ids.flatten(), minlength=16).double()
    wanted = 1 / torch.arange(1, 17).double()
    assert torch.allclose(counts / 4000, wanted / wanted.sum(), atol=0.03)
    ids = static.routing(50, 12, 5, skew=2.0, seed=3)
    assert all(len(set(row)) == 5 for row in ids.tolist()) and int(ids.max()) < 12
    assert torch.equal(ids, static.routing(50, 12, 5, skew=2.0, seed=3))
    assert static.routed(50, 12, 5, 2.0, 3) == tuple(int((ids == e).sum()) for e in range(12))


def provisioned(T, K, E, B):
    """N: all experts but one have a token each, in a block each; one has all the others; never more
    than choices."""
    return min(E - 1 + sum(1 for _ in range(0, T * K - (E - 1), B)), T * K)


def naive_share(routings, T, K, B, skip):
    """Slots without a token over slots, block by block."""
    slots = empty = 0
    for counts in routings:
        filled = [min(B, n - start) for n in counts for start in range(0, n, B)]
        provided = len(filled) if skip else provisioned(T, K, len(counts), B)
        slots, empty = slots + provided * B, empty + provided * B - sum(filled)
    return empty / slots


def test_padding_curves_are_a_naive_loops():
    T, E, K = 48, 6, 2
    loads = torch.stack(
        [torch.bincount(static.routing(T, E, K, 0.5, s).flatten(), minlength=E) for s in range(4)]
    )
    curves = static.padding_curves(loads.view(2, 2, E), T, K, "toy", seed=7)
    assert list(curves) == ["uniform", "Zipf 0.6", "Zipf 1.2", "toy: real", static.ALL_BLOCKS]
    real = loads.tolist()
    for B, share in curves["toy: real"]:
        assert share == pytest.approx(naive_share(real, T, K, B, True))
        assert dict(curves[static.ALL_BLOCKS])[B] == pytest.approx(
            naive_share(real, T, K, B, False)
        )
    drawn = [
        torch.bincount(static.routing(T, E, K, 0.6, 7 + i).flatten(), minlength=E).tolist()
        for i in range(8)
    ]
    assert dict(curves["Zipf 0.6"])[16] == pytest.approx(naive_share(drawn, T, K, 16, True))
    distance, at = static.apart(curves, "uniform", "Zipf 1.2")
    distances = {B: abs(a - dict(curves["Zipf 1.2"])[B]) for B, a in curves["uniform"]}
    assert distance == max(distances.values()) == distances[at]
    made = static.block_paddings(T, E, K, 0.6, 7)
    assert set(made) == set(static.SIZES)
    for B, of in made.items():
        assert of.needed == sum(
            len(range(0, n, B)) for n in drawn[0]
        ) and of.provisioned == provisioned(T, K, E, B)
        assert of.padded == B * provisioned(T, K, E, B) - 96


def test_blocks_are_counted_as_they_run():
    ids = torch.stack([static.routing(40, 5, 2, skew, 1) for skew in (0.0, 1.5)], 1)  # [T, L, K]
    for one in static.count_blocks(ids, 5, (4, 32)):
        counts = [torch.bincount(layer.flatten(), minlength=5).tolist() for layer in ids.unbind(1)]
        filled = [sum(-(-n // one.B) for n in of) for of in counts]
        assert one.as_formula and one.filled == np.mean(filled)
        assert one.padded == pytest.approx(1 - 160 / (sum(filled) * one.B))
        assert one.padded_all == pytest.approx(naive_share(counts, 40, 2, one.B, False))
        assert (
            one.by_code <= one.by_text
            and 0 <= one.rows_skipped < 1
            and 0 <= one.weights_skipped < 1
        )


def test_unique_experts_of_a_batch(trace):
    found, E, K = static.unique_experts(trace, (1, 2)), trace.spec.E, trace.spec.K
    decode = trace.select(trace.phase == DECODE)
    steps = [
        set(decode.ids[decode.sequence == s][i, layer].tolist())
        for s in range(trace.sequences)
        for i in range(4)
        for layer in range(trace.spec.L)
    ]
    assert found["counted"][0] == (1, pytest.approx(np.mean(list(map(len, steps))))) == (1, K)
    pairs = [
        set(decode.ids[(decode.sequence == s)][i, layer].tolist())
        | set(decode.ids[(decode.sequence == s + 1)][i, layer].tolist())
        for s in range(0, trace.sequences, 2)
        for i in range(4)
        for layer in range(trace.spec.L)
    ]
    assert found["counted"][1][1] == pytest.approx(np.mean(list(map(len, pairs))))
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
    model, alone = moelab.open_model(dtype=torch.float32), Tally()
    ids = torch.randint(3, 999, (3, 50), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), static.limited(model, make) as together:
        logits = model(ids).logits
    for row, expected in zip(ids, logits):
        with torch.no_grad(), static.limited(model, make) as executor:
            torch.testing.assert_close(model(row[None]).logits[0], expected, rtol=1e-3, atol=1e-3)
        alone.add(executor.tally.routed, executor.tally.executed, executor.tally.slots)
    assert together.tally == alone and alone.dropped > 0


def test_ways_of_tiers_drop_what_their_capacities_say(model, trace):
    calibration = moelab.calibrate(trace)
    plan = static.TierPlan.of(calibration, 256, 4)  # capacities of 16 and of 32 or more
    assert plan.launches == np.mean([len(of) for of in plan.groups])
    assert all(
        sum(printed.capacity) <= sum(own.capacity) for printed, own in zip(plan.printed, plan.tiers)
    )
    text = static.chunk_texts(model.tokenizer, 1, 96)[:1]
    ran = static.run_ways(
        model, {name: way for name, way in plan.ways().items() if "groups" not in name}, text
    )
    assert ran["tiers, pad"].total.dropped == 0 and ran["tiers, pad"].agree > 0.95
    assert ran["tiers, literal B/E"].total.dropped > ran["tiers, prune"].total.dropped
    for of in ran.values():
        assert sum(layer.routed for layer in of.by_layer) == of.total.routed
    counts = calibration.counts(PREFILL)
    order = static.costs(
        model,
        {
            name: way
            for name, way in static.drop_orders(plan.tiers).items()
            if name in ("token", static.NO_EXPERTS)
        },
        ("loss",),
        n=2,
        windows=2,
        tokens=96,
    )
    assert (
        order.tally(static.NO_EXPERTS).executed == 0 < order.tally("token").executed
        and counts.sum() > 0
    )
