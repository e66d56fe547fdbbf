"""EPLB against brute force and its own promises; advice and volumes."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab import cards
from moelab.parallel import Placement, volumes
from moelab.parallel.advice import advise
from moelab.parallel.eplb import balance, measure, pack, replicate
from moelab.specs import MoESpec

LOADS = st.lists(st.integers(0, 1000), min_size=1, max_size=24)


def zipf(E: int, s: float) -> list[float]:
    return [1 / (e + 1) ** s for e in range(E)]


def test_64_experts_on_8_ranks():
    load = zipf(64, 0.6)
    assert balance(load, 8).ratio <= 1.18
    assert balance(load, 8, spare=8).ratio <= 1.01
    assert measure(load, Placement.consecutive(64, 8)).ratio > 2  # what it is good for


@given(LOADS, st.integers(1, 6), st.integers(0, 3))
def test_every_expert_has_a_place_and_devices_hold_equally_many(load, devices, more):
    spare = -len(load) % devices + more * devices
    made = balance(load, devices, spare)
    held = [e for experts in made.placement.devices for e in experts]
    assert {len(experts) for experts in made.placement.devices} == {(len(load) + spare) // devices}
    assert sum(made.replicas) == len(held) == len(load) + spare
    assert [held.count(e) for e in range(len(load))] == list(made.replicas) and min(
        made.replicas
    ) >= 1
    assert sum(made.device_load) == pytest.approx(sum(load))
    assert made.ratio >= 1 - 1e-9


@given(st.lists(st.integers(0, 100), min_size=4, max_size=4), st.integers(1, 3))
def test_groups_stay_on_their_node(group_load, spare):
    load = [value + i for value in group_load for i in range(4)]  # 4 groups of 4 experts
    made = balance(load, devices=4, spare=4 * spare, nodes=2, groups=4)
    for node in (made.placement.devices[:2], made.placement.devices[2:]):
        assert len({e // 4 for experts in node for e in experts}) == 2


def test_groups_that_nodes_do_not_divide_are_balanced_as_one():
    load = zipf(12, 1.0)
    assert balance(load, 4, nodes=4, groups=3) == balance(load, 4)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(0, 4))
def test_replicas_are_the_best_there_are(load, spare):
    """The largest load per replica is the least possible."""

    def compositions(total, n):
        return (
            [(total,)]
            if n == 1
            else [
                (i, *rest)
                for i in range(1, total - n + 2)
                for rest in compositions(total - i, n - 1)
            ]
        )

    every = compositions(len(load) + spare, len(load))
    best = min(max(value / n for value, n in zip(load, counts)) for counts in every)
    assert max(value / n for value, n in zip(load, replicate(load, len(load) + spare))) == best


@settings(max_examples=30)
@given(st.lists(st.integers(0, 50), min_size=6, max_size=6), st.sampled_from([2, 3]))
def test_packing_is_close_to_the_optimum(load, bins):
    size = 6 // bins
    best = min(
        max(sum(load[i] for i in order[b * size : (b + 1) * size]) for b in range(bins))
        for order in permutations(range(6))
    )
    fullest = max(sum(load[i] for i in items) for items in pack(load, bins))
    assert best <= fullest <= 4 / 3 * best  # heaviest first is known to be that close


@given(
    st.integers(1, 5), st.integers(0, 4), st.integers(0, 30), st.integers(1, 3), st.integers(0, 7)
)
def test_choices_go_where_their_expert_is_and_replicas_take_turns(devices, more, T, K, start):
    E = 6
    made = balance(zipf(E, 1.2), devices, -E % devices + more * devices).placement
    ids = torch.rand(T, E + 1).argsort(-1)[:, :K]
    ranks = made.assign(ids, start)
    for e in range(E):
        chosen = ranks[ids == e].tolist()
        assert all(e in made.devices[r] for r in chosen)
        places = [r for r in range(devices) for held in made.devices[r] if held == e]
        for place in set(places):  # within one of an equal share for each place
            assert abs(
                chosen.count(place) - len(chosen) * places.count(place) / len(places)
            ) <= places.count(place)
    assert (ranks[ids == E] == devices).all()


@pytest.mark.parametrize(
    "wrong",
    [
        dict(load=[], devices=1),
        dict(load=[1, -1], devices=1),
        dict(load=[float("nan")], devices=1),
        dict(load=[1, float("inf")], devices=1),
        dict(load=[1] * 8, devices=3),
        dict(load=[1] * 8, devices=4, nodes=3),
        dict(load=[1] * 8, devices=4, groups=3),
    ],
)
def test_what_cannot_be_placed_is_refused(wrong):
    with pytest.raises(ValueError):
        balance(**wrong)


@pytest.mark.parametrize("devices", [((0, 1), (2,)), ((0, 1, 2, 3), (4,))])
def test_a_placement_must_hold_every_expert(devices):
    with pytest.raises(ValueError, match="experts"):
        Placement(devices, 4)


# ------------------------------------------------------------------------------------------------------------
# volumes


@pytest.mark.parametrize("E, K, W", [(8, 2, 2), (6, 3, 4), (7, 2, 3), (5, 5, 4)])
def test_expected_rows_are_the_mean_over_all_routings(E, K, W):
    """Every set of K experts, from every owner."""
    from itertools import combinations

    ids = torch.tensor(list(combinations(range(E), K)))
    ranks = Placement.consecutive(E, W).assign(ids)
    pairs = deduplicated = 0
    for row in ranks.tolist():
        for owner in range(W):
            pairs += sum(r != owner for r in row)
            deduplicated += len(set(row) - {owner})
    n = len(ids) * W
    even = E % W == 0
    assert volumes.deduplicated(E, K, W) == pytest.approx(deduplicated / n)
    assert volumes.expected("ep-a2a", 64, K, W) == pytest.approx(pairs / n)
    if even:  # the formula as it is usually written
        from math import comb

        assert volumes.deduplicated(E, K, W) == pytest.approx(
            (W - 1) * (1 - comb(E - E // W, K) / comb(E, K))
        )


def test_sending_every_choice_loses_to_all_gather_when_k_exceeds_w():
    for K in range(1, 9):
        for W in range(2, 9):
            gathered, all_to_all = (
                volumes.expected(variant, 64, K, W) for variant in ("ep", "ep-a2a")
            )
            assert (all_to_all > gathered) == (K > W)
            assert volumes.deduplicated(64, K, W) <= min(all_to_all, gathered) + 1e-9


# -------------------------------------------------------------------------------------------------------------
# advice


def test_the_guides_examples():
    def spec(E, I):
        return MoESpec("toy", "toy", 1, (0,), E=E, K=1, H=64, I=I)

    assert advise(spec(8, 14336), 8).kind == "TP"
    assert advise(spec(128, 768), 16).kind == "EP"
    few = advise(spec(16, 512), 16)
    assert (few.tp, few.ep, few.kind) == (4, 4, "hybrid") and "128" in str(few)
    assert advise(spec(48, 1024), 8).kind == "hybrid"
    assert advise(spec(64, 1024), 128).tp == 2
    assert advise(spec(64, 1024), 1).kind == "one device"


@pytest.mark.parametrize("name", cards.MODELS)
@pytest.mark.parametrize("devices", [1, 2, 6, 16, 64])
def test_advice_fits_the_devices(name, devices):
    spec = cards.load_model(name)
    for load in (None, [1] * spec.E, zipf(spec.E, 1.0)):
        made = advise(spec, devices, load)
        assert made.tp * made.ep == devices and made.ep <= spec.E and made.reasons
        assert all(reason.endswith(".") for reason in made.reasons)


@settings(max_examples=200)
@given(
    st.sampled_from([8, 32, 33, 48, 60, 63, 64, 256]),
    st.sampled_from([96, 128, 512, 1408, 4096]),
    st.integers(1, 130),
)
def test_reasons_are_true(E, I, devices):
    try:
        made = advise(MoESpec("toy", "toy", 1, (0,), E=E, K=1, H=64, I=I), devices)
    except ValueError:
        assert not any(
            devices % tp == 0 and devices // tp <= E for tp in range(1, min(devices, I) + 1)
        )
        return
    said, parts = str(made), I / made.tp
    assert (
        not ("every device works on every token" in said or "none is a straggler" in said)
        or made.ep == 1
    )
    assert "whole ones" not in said or made.tp == 1
    assert "are spread" not in said or made.ep > 1
    assert "moderate tp beside ep" not in said or (2 <= made.tp <= 8 and made.ep > 1)
    assert "have no tp of 2 to 8" not in said or not any(
        devices % tp == 0 and tp < devices <= E * tp and I / tp >= 128 for tp in range(2, 9)
    )
    assert "at least 128" not in said or parts >= 128
    assert "keeps only" not in said or parts < 128


def test_a_skewed_load_moves_advice_to_larger_tp():
    spec = cards.load_model("Qwen3-30B-A3B")
    even, skewed = advise(spec, 16, [1] * spec.E), advise(spec, 16, zipf(spec.E, 1.0))
    assert even.tp == 1 and skewed.tp > 1 and "times the mean" in str(skewed)
    with pytest.raises(ValueError, match="128 experts"):
        advise(spec, 16, [1, 2])
    with pytest.raises(ValueError, match="too many"):
        advise(spec, 7 * 1024 * 1024)
