"""The prefetch gate: tokens go the faster way, and trials of the other one are few."""

import random

import pytest

from moelab.base.specs import Event
from moelab.offloading.prefetch_gate import SELDOM, SOON, TRIAL, PrefetchGate


def tokens(gate, n, on, off, chance=None, phase="decode", asks=True):
    """n tokens that take `on` seconds with prefetching and `off` without; which of them did."""
    found = []
    for _ in range(n):
        gate.begin_forward(phase)
        found.append(gate.enabled if asks else None)
        noise = chance.choice([1, 1, 1, 1.1, 3]) if chance else 1
        gate.end_forward((on if found[-1] else off) * noise)
    return found


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("on, off", [(0.7, 1.0), (1.0, 0.7)])
def test_the_faster_way_is_kept_and_trials_become_rare(on, off, noisy):
    found = tokens(PrefetchGate(), 4000, on, off, random.Random(0) if noisy else None)
    assert not any(found[:SOON])  # on demand at first
    assert found[SOON : SOON + TRIAL] == [True] * TRIAL
    other = sum(open_ != (on < off) for open_ in found[2 * SOON + TRIAL :])
    assert 0 < other < 0.03 * len(found)


def test_where_neither_is_faster_nothing_is_prefetched():
    found = tokens(PrefetchGate(), 4000, 1.0, 1.0)
    assert sum(found) <= 10 * TRIAL


def test_it_notices_that_the_machine_has_changed():
    gate = PrefetchGate()
    assert sum(tokens(gate, 2000, 1.3, 1.0)[-SELDOM:]) <= 2 * TRIAL
    assert sum(tokens(gate, 2 * SELDOM, 0.7, 1.0)[-SELDOM:]) > SELDOM / 2


def test_prefill_and_a_gate_without_trials_are_always_open():
    assert all(tokens(PrefetchGate(), 50, 2.0, 1.0, phase="prefill"))
    assert all(tokens(PrefetchGate(trials=False), 500, 2.0, 1.0))


def test_tokens_without_predictions_do_not_count():
    gate = PrefetchGate()
    tokens(gate, 10 * SOON, 1.0, 1.0, asks=False)
    assert not any(tokens(gate, SOON, 1.0, 1.0))


def copies(n, each):
    """Events of a link that brings n experts one after the other."""
    return [Event("link", "read", 0, i, i * each, (i + 1) * each, 1) for i in range(n)]


@pytest.mark.parametrize("n, each, layers, room", [(4, 0.1, 2, 3), (8, 0.1, 1, 2), (9, 0.2, 4, 0)])
def test_no_more_is_prefetched_than_a_link_would_idle_for(n, each, layers, room):
    gate = PrefetchGate()
    assert gate.room is None
    for _ in range(3):
        gate.begin_forward("decode")
        assert not gate.enabled
        gate.end_forward(1.0001, copies(n, each), layers)
    assert gate.room == room
    gate.begin_forward("prefill")
    assert gate.room is None
    assert PrefetchGate(trials=False).room is None
    opened = tokens(gate, 200, 0.5, 1.0)
    assert any(opened) == (room > 0)  # nothing is tried that has no room


def test_a_link_that_is_less_busy_than_before_has_room_again():
    gate = PrefetchGate()
    for busy in (1.0, 0.2):
        for _ in range(2 * TRIAL):
            gate.begin_forward("decode")
            assert not gate.enabled or busy < 1
            gate.end_forward(1.0, copies(4, busy / 4), 2)
    assert gate.room > 0
