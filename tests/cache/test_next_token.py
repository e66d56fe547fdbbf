"""The policy against a naive cache that walks lists, with expectations that are drawn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.base.specs import ExpertKey, State
from moelab.cache.next_token import NextTokenPolicy
from moelab.cache.policies import make_policy
from moelab.cache.residency import Pools, Residency

L, E = 3, 6
STEPS = st.lists(
    st.tuples(st.integers(0, L - 1), st.sets(st.integers(0, E - 1), min_size=1, max_size=4)),
    max_size=50,
)


class Drawn:
    """Expectations that depend on both of what they are given; ties happen."""

    half_life, shape = 2.0, (L, E)

    def expected(self, layer, s, u):
        return np.round(s.sum(0) + u * (1 + layer), 1)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, L * E), st.randoms(use_true_random=False))
def test_it_keeps_what_is_expected_most(steps, capacity, draw):
    residency, cache = Residency(L, E, Pools(F=capacity), NextTokenPolicy(Drawn())), []
    uses, expected = np.zeros((L, E)), {}
    for layer, experts in steps:
        s = np.array([[draw.randint(0, 3) for _ in range(E)] for _ in range(2)], np.float32)
        residency.see(layer, s)
        found = residency.begin(layer, dict.fromkeys(experts, 1))
        uses[layer] *= 0.5**0.5
        uses[layer, list(experts)] += 1
        expected |= {
            ExpertKey(layer, e): value
            for e, value in enumerate(
                np.round(s.sum(0) + uses[layer].astype(np.float32) * (1 + layer), 1).tolist()
            )
        }
        hits = [ExpertKey(layer, e) for e in sorted(experts) if ExpertKey(layer, e) in cache]
        assert [r.key for r in found.requests if r.state is State.FULL] == hits
        for key in (
            ExpertKey(layer, e) for e in sorted(experts) if ExpertKey(layer, e) not in cache
        ):
            offered = [other for other in cache if other not in hits] + [
                key
            ]  # the newcomer may be refused
            if len(cache) < capacity:
                cache.append(key)
            elif (victim := min(offered, key=lambda other: (expected[other], other))) != key:
                cache.remove(victim)
                cache.append(key)
        assert sorted(residency.resident(State.FULL)) == sorted(cache)


def test_it_refuses_to_guess_blindly():
    residency = Residency(L, E, Pools(F=2), NextTokenPolicy(Drawn()))
    assert residency.sees and not Residency(L, E, Pools(F=2)).sees
    with pytest.raises(ValueError, match="was not told"):
        residency.begin(0, {1: 1})
    with pytest.raises(ValueError, match="must be fitted to your model"):
        make_policy("next-token")
