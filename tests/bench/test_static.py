"""The bench of static shapes against plain loops: routings, padding, blocks, drops and what they
cost."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch

import moelab
from moelab.bench import static
from moelab.evaluation.accuracy import compare
from moelab.experts.executor import Tally
from moelab.static.static import CapacityFactor, Tiered
from moelab.trace import PREFILL


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


def test_texts_come_source_by_source_and_fill_half_a_chunk(model):
    wanted = [
        p.text
        for source in static.SOURCES
        for p in moelab.prompts(source, 2, tokens=96, seed=4, split="test")
    ]
    assert static.texts(model.tokenizer, "test", 2, 96, 4) == wanted
    chunks = static.chunk_texts(model.tokenizer, 2, 96, 4)
    assert 0 < len(chunks) <= 4 and set(chunks) <= set(wanted)
    assert all(len(model.tokenizer(text)["input_ids"]) > 48 for text in chunks)


def test_texts_are_cut_by_the_models_own_tokenizer(model):
    """A tokenizer of letters, on passages of code and prose, the first two sources."""
    of_letters, of_words = (
        static.texts(tokenizer, "test", 2, 160)[:4]
        for tokenizer in (lambda text, **_: {"input_ids": list(text)}, model.tokenizer)
    )
    assert max(map(len, of_letters)) <= 160 < max(map(len, of_words))


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
    decode = trace.decode
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


def test_the_busiest_expert_within_a_chunk(trace):
    prefill = trace.prefill
    for layer, value in enumerate(static.chunk_imbalance(trace, 64).tolist()):
        ratios = []
        for start in range(0, len(prefill) // 64 * 64, 64):
            counts = [
                int((prefill.ids[start : start + 64, layer] == e).sum())
                for e in range(trace.spec.E)
            ]
            ratios.append(max(counts) / np.mean(counts))
        assert value == pytest.approx(np.mean(ratios))


def test_limited_experts_are_those_of_the_block_only_and_are_kept(model):
    text = ["the red fox and the blue whale and the old man"]
    (before,) = static.read_all(model, text)
    with static.limited(model, lambda saliency: CapacityFactor(0.5)) as executor:
        (within,) = static.read_all(model, text)
    (after,) = static.read_all(model, text)
    assert executor.tally.dropped > 0
    assert torch.equal(before, after) and not torch.equal(before, within)
    assert not any("seam" in vars(module) for module in model.modules())


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


def test_costs_are_those_of_compare_with_their_tallies(model):
    ways = static.capacity_factors((0.5, 4.0))
    how = dict(n=2, windows=2, tokens=96, seed=1)
    costs = static.costs(model, ways, ("loss", "needle"), **how)
    by_hand = compare(
        model,
        {"plain": nullcontext, "half": lambda: static.limited(model, ways["0.5"])},
        ("loss", "needle"),
        batch_size=1,
        **how,
    )
    row = by_hand["scores"]["loss"]["half"]
    assert costs.loss("0.5") == pytest.approx(
        (
            row["relative"],
            row["relative"] - 12.7062 * row["relative error"],
            row["relative"] + 12.7062 * row["relative error"],
        ),
        rel=1e-4,
    )  # t(1)
    assert (
        costs.points("needle", "0.5")[0] == 100 * by_hand["scores"]["needle"]["half"]["difference"]
    )
    assert costs.tally("0.5").drop_rate > 0.4 and costs.tally("4").dropped == 0
    assert abs(costs.loss("4")[0]) < 0.5  # per cent: padded rows round elsewhere, in bf16
    assert costs.tally("0.5", "needle").routed != costs.tally("0.5", "loss").routed
    assert costs.nearest(0.0) == "4" and costs.nearest(0.9) == "0.5"
    alone = costs.only(["4"])
    assert alone.nearest(0.9) == "4" and list(alone.scores["needle"]) == [static.BASELINE, "4"]
    assert alone.points("needle", "4") == costs.points("needle", "4")


def test_a_verdict_needs_an_interval_that_excludes_zero():
    rng = np.random.default_rng(0)
    base = 2 + rng.normal(0, 1, 50)
    samples = {
        "random": base,
        "router": base - 0.1 + rng.normal(0, 0.01, 50),
        "saliency": base + rng.normal(0, 1, 50),
        "token": base + 0.2 + rng.normal(0, 0.01, 50),
    }
    costs = static.DropCosts(
        {},
        {"loss": {name: values.tolist() for name, values in samples.items()}},
        {name: {"loss": Tally()} for name in samples},
    )
    difference = samples["router"] - base
    error = difference.std(ddof=1) / 50**0.5
    assert costs.against("random", "router") == pytest.approx(
        (
            difference.mean(),
            difference.mean() - 2.009575 * error,
            difference.mean() + 2.009575 * error,
        )
    )  # t(49)
    assert [costs.verdict(name) for name in ("router", "saliency", "token")] == [
        "better than random",
        "indistinguishable from random",
        "worse than random",
    ]


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
