"""EPLB against brute force and its own promises; the guide's choice of parallelism."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.specs import MoESpec
from moelab.static.eplb import balance, consecutive, device_loads, imbalance, replicate
from moelab.static.parallelism import choose


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=24), st.integers(1, 6), st.integers(0, 3)
)
def test_every_expert_has_a_place_and_devices_hold_equally_many(load, devices, more):
    spare = -len(load) % devices + more * devices
    made, places = balance(load, devices, spare), replicate(load, len(load) + spare)
    held = [e for experts in made for e in experts]
    assert {len(experts) for experts in made} == {(len(load) + spare) // devices}
    assert [held.count(e) for e in range(len(load))] == places
    assert sum(device_loads(load, made)) == pytest.approx(sum(load))
    assert imbalance(load, made) >= 1 - 1e-9


@settings(max_examples=50)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(0, 4))
def test_replicas_are_the_best_there_are(load, spare):
    """The largest load per replica is the least possible."""
    places, n = len(load) + spare, len(load)
    cuts = [(0, *inner, places) for inner in combinations(range(1, places), n - 1)]
    every = [[b - a for a, b in zip(cut, cut[1:])] for cut in cuts]
    best = min(max(value / m for value, m in zip(load, counts)) for counts in every)
    assert max(value / m for value, m in zip(load, replicate(load, places))) == best


def test_what_it_gains_and_what_it_refuses():
    load = [1 / (e + 1) ** 0.6 for e in range(64)]
    assert imbalance(load, consecutive(64, 8)) > 2
    assert imbalance(load, balance(load, 8)) <= 1.18
    assert imbalance(load, balance(load, 8, spare=8)) <= 1.01
    for wrong in ([], [1, -1], [float("nan")], [1, float("inf")], [1, 1, 1]):
        with pytest.raises(ValueError):
            balance(wrong, 2)


def toy(E, I):
    return MoESpec("toy", "toy", 1, (0,), E=E, K=1, H=64, I=I)


def test_the_guides_examples():
    assert choose(toy(8, 14336), 8).kind == "TP"
    assert choose(toy(128, 768), 16).kind == "EP"
    few = choose(toy(16, 512), 16)
    assert (few.tp, few.ep, few.kind) == (4, 4, "hybrid") and "128" in str(few)
    assert choose(toy(48, 1024), 8).kind == "hybrid"
    assert choose(toy(64, 1024), 128).tp == 2
    assert choose(toy(64, 1024), 1).kind == "one device"


@given(
    st.sampled_from([8, 32, 33, 48, 60, 63, 64, 256]),
    st.sampled_from([96, 128, 512, 1408, 4096]),
    st.integers(1, 130),
)
def test_advice_fits_and_its_reasons_are_true(E, I, devices):
    try:
        made = choose(toy(E, I), devices)
    except ValueError as error:
        tps = range(1, min(devices, I) + 1)
        assert "too many" in str(error)
        assert not any(devices % tp == 0 and devices // tp <= E for tp in tps)
        return
    assert made.tp * made.ep == devices and made.ep <= E and made.reasons
    said = str(made)
    assert "moderate tp beside ep" not in said or (2 <= made.tp <= 8 and made.ep > 1)
    assert "at least 128" not in said or I / made.tp >= 128
    assert "less than 128" not in said or I / made.tp < 128
