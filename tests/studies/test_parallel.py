"""Rows that real processes send; EPLB against brute force and its own promises."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from notebooks.studies import parallel
from notebooks.studies.eplb import balance, consecutive, device_loads, imbalance, replicate


def test_two_processes_send_what_is_expected():
    volume, balanced = parallel.run(tokens=64, ranks=(2,)).values()
    for way, row in volume.items():
        assert row["dispatched"] == pytest.approx(row["expected rows a token"], rel=0.1), way
        assert row["dispatched"] == row["combined"] and row["MB sent"] > 0
    for row in balanced.values():
        assert row["in order"] >= row["EPLB, 0 spare"] >= row["EPLB, 64 spare"] >= 1


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
