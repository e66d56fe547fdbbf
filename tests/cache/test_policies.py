"""Policies against naive ones that walk lists, through a single pool that admits everything."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import ExpertKey, State
from moelab.cache.policies import LRFU, Belady, CachePolicy, Marking, make_policy
from moelab.cache.residency import Pools, Residency

L, E = 3, 6
STEPS = st.lists(
    st.tuples(
        st.integers(0, L - 1),
        st.dictionaries(st.integers(0, E - 1), st.integers(1, 4), min_size=1, max_size=4),
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", ["fifo", "lru"])
@given(STEPS, st.integers(0, L * E + 1))
def test_against_lists(name, steps, capacity):
    """A cache as a list, its oldest first: by their arrival, or by their latest use."""
    residency, cache = Residency(L, E, Pools(F=capacity), name), []
    for layer, tokens in steps:
        keys = [ExpertKey(layer, expert) for expert in sorted(tokens)]
        hits = [key for key in keys if key in cache]
        step = residency.begin(layer, tokens)
        assert [request.key for request in step.requests if request.state is State.FULL] == hits
        for key in keys:
            if key in hits:
                continue
            if len(cache) == capacity:
                victims = [other for other in cache if other not in keys]
                if not victims:
                    continue
                cache.remove(victims[0])
            cache.append(key)
        if name == "lru":
            cache = [key for key in cache if key not in keys] + [
                key for key in keys if key in cache
            ]
        assert sorted(residency.resident(State.FULL)) == sorted(cache)


@pytest.mark.parametrize("name, half_life", [("lfu", math.inf), ("lrfu", LRFU.half_life)])
@given(STEPS, st.integers(1, L * E))
def test_the_fewest_uses_go_of_which_old_ones_may_count_less(name, half_life, steps, capacity):
    """By the definition: 2^(−turns of the layer since ÷ half-life) for each use, of all the
    history; uses that were refused a place count, too."""
    residency, turns, uses = Residency(L, E, Pools(F=capacity), name), [0] * L, {}
    for layer, tokens in steps:
        turns[layer] += 1
        for expert in tokens:
            uses.setdefault(ExpertKey(layer, expert), []).append(turns[layer])
        resident = residency.resident(State.FULL)
        score = {
            key: sum(2 ** ((turn - max(turns)) / half_life) for turn in uses[key])
            for key in resident
            if key.layer != layer or key.expert not in tokens
        }
        evicted = residency.begin(layer, tokens).evicted
        least = sorted(score.values())[: len(evicted)]
        assert [score[key] for key in evicted] == pytest.approx(least)


@given(STEPS, st.integers(1, L * E), st.integers(0, 3))
def test_marking_spares_what_its_phase_used(steps, capacity, seed):
    """Fiat et al.: no victim was used in the phase, and a phase ends only when all candidates are
    marked."""
    residency, marked = Residency(L, E, Pools(F=capacity), Marking(seed)), set()
    for layer, tokens in steps:
        used = {ExpertKey(layer, expert) for expert in tokens}
        resident = set(residency.resident(State.FULL))
        marked |= used
        for victim in residency.begin(layer, tokens).evicted:
            if not (resident - used) - marked:
                marked = set(used)
            assert victim in resident - used and victim not in marked
            resident.discard(victim)


@given(STEPS, st.integers(1, L * E))
def test_belady_evicts_what_is_needed_last(steps, capacity):
    residency = Residency(L, E, Pools(F=capacity), Belady(steps))
    for number, (layer, tokens) in enumerate(steps):
        before = set(residency.resident(State.FULL))
        residency.begin(layer, tokens)
        after = set(residency.resident(State.FULL))

        def next_use(key, number=number):
            later = (
                n
                for n in range(number + 1, len(steps))
                if steps[n][0] == key.layer and key.expert in steps[n][1]
            )
            return next(later, len(steps))

        used = {ExpertKey(layer, expert) for expert in tokens}
        gone, kept = (before | used) - after, after - (before & used)
        if gone and kept:
            assert min(map(next_use, gone)) >= max(map(next_use, kept))


def test_belady_needs_the_future_it_was_told():
    residency = Residency(1, 4, Pools(F=2), Belady([(0, {0: 1}), (0, {1: 1})]))
    residency.begin(0, {0: 1})
    with pytest.raises(ValueError, match="expert 2 of layer 0.*this very run"):
        residency.begin(0, {2: 1})
    with pytest.raises(ValueError, match=r"needs the future.*simulate\(run.*Belady\(steps\)"):
        make_policy("belady")


class MostRecent:
    """A policy of one's own, as in a notebook cell."""

    def __init__(self):
        self.last = {}

    def touch(self, key, step):
        self.last[key] = step

    def victim(self, resident):
        return max(resident, key=lambda key: (self.last[key], key))


@pytest.mark.parametrize("policy", [MostRecent, MostRecent()])
def test_a_policy_of_ones_own(policy):
    residency = Residency(1, 5, Pools(F=2), policy)
    for expert in (0, 1, 2):
        step = residency.begin(0, {expert: 1})
    assert step.evicted == [(0, 1)]
    assert isinstance(make_policy(policy)(), CachePolicy)


def test_errors_are_for_people():
    with pytest.raises(ValueError, match="there is no cache 'lur'. Did you mean 'lru'"):
        make_policy("lur")
    with pytest.raises(
        ValueError, match=r"no cache policy: it needs the methods touch\(key, step\)"
    ):
        make_policy(3)

    class Wrong(MostRecent):
        def victim(self, resident):
            return ExpertKey(0, 4)

    residency = Residency(1, 5, Pools(F=1), Wrong)
    residency.begin(0, {0: 1})
    with pytest.raises(ValueError, match="Wrong chose .* not among the candidates"):
        residency.begin(0, {1: 1})
