"""Whether a guess is worth a read, against the expectation of it by simulation, and that bad guessers are held back."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.cache.pools import Pools
from moelab.models import discover, plug
from moelab.offloading.prefetch_gate import KEEP, PrefetchGate
from moelab.offloading.offload import offload
from tests.offloading.test_offload import DELAYS


def gain_of_fetching(p, idle, n, read, chance, rounds=4_000):
    """Mean seconds by which a layer's first demand read begins earlier, or by which reads are saved, when n guesses,
    each right with probability p, are read one after another in a time of about `idle`, beside doing nothing in it."""
    total = 0.0
    for _ in range(rounds):
        clock, saved, until = 0.0, 0.0, max(0.0, idle + read * (chance.random() - 0.5))
        for _ in range(n):
            if clock >= until:
                break
            right = chance.random() < p
            over = max(0.0, clock + read - until)               # it is under way when the layer comes
            saved += (read - over if right else -over)
            clock += read
        total += saved
    return total / rounds


@pytest.mark.parametrize("idle, n, read", [(1.0, 8, 0.25), (0.2, 8, 1.0), (1.0, 2, 0.3), (3.0, 1, 1.0),
                                           (0.05, 8, 2.0)])
def test_the_rule_agrees_with_what_happens(idle, n, read):
    """Where the simulation is clearly for or against, the rule says the same; it may err near the border only."""
    gate = PrefetchGate()
    gate.pause(idle)
    for p in (0.02, 0.1, 0.9, 1.0):
        gate.precision[0] = p
        gain = gain_of_fetching(p, idle, n, read, random.Random(0))
        if abs(gain) > 0.1 * read:
            assert gate.worth(0, range(n), read) == (gain > 0), (p, gain)


@given(st.lists(st.tuples(st.sets(st.integers(0, 7), min_size=1), st.sets(st.integers(0, 7))), min_size=1, max_size=20))
def test_precision_is_a_running_mean_of_what_was_right(rounds):
    gate, mean = PrefetchGate(), 0.5
    for guessed, wanted in rounds:
        gate.worth(3, guessed, 1.0)
        gate.came(3, wanted)
        mean = KEEP * mean + (1 - KEEP) * sum(expert in wanted for expert in guessed) / len(guessed)
    assert gate.precision[3] == pytest.approx(mean)
    gate.came(3, {1})                                      # nothing was guessed: nothing is learnt
    assert gate.precision[3] == pytest.approx(mean)


def test_an_engine_stops_fetching_for_a_guesser_that_is_always_wrong(qwen):
    _, store = qwen
    offloaded = offload(store, "10MB", plan=Pools(), ahead=4, delays=DELAYS, bandwidth=2e6)
    engine = offloaded.moelab.engine
    inner, begin = type(engine).__call__, engine.residency.begin
    engine.gate.precision = {1: 0.5}
    engine.gate.idle, engine.gate.pause = 1e-4, lambda seconds: None      # on a busy machine all is idle
    chosen = {}
    engine.residency.begin = lambda layer, tokens: (chosen.__setitem__(layer, set(tokens)), begin(layer, tokens))[1]
    assert len(discover(offloaded)) == 2
    right = False

    def announcing(x, ids, weights, experts):
        if experts.layer == 0 and 1 in chosen:
            others = chosen[1] if right else set(range(8)) - chosen[1]
            engine.prefetch(1, torch.tensor([sorted(others)]))
        return inner(engine, x, ids, weights, experts)
    plug(offloaded, executor=announcing)

    def begun(passes):
        offloaded.moelab.reset()
        for _ in range(passes):
            offloaded(torch.tensor([[5]]))                      # the same token: layer 1 wants the same as before
        return offloaded.moelab.metrics().prefetched["begun"]
    with torch.inference_mode():
        begun(30)
        assert begun(5) == 0                                    # it has learnt not to listen
        right = True
        begun(40)
        assert begun(5) > 0                                     # and that it may again
    offloaded.moelab.close()
