"""Most hits against all decisions that a cache could take, and against every policy."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import State
from moelab.cache.policies import POLICIES, Belady
from moelab.cache.residency import Pools, Residency
from notebooks.studies.most_hits import belady_hits, request_count


@given(st.lists(st.lists(st.permutations(range(8)), min_size=3, max_size=3), max_size=12))
def test_no_lru_up_to_the_cliff_ever_hits(tokens):
    """Of (L − 1)·K experts: between two visits to a layer a token demands as many others."""
    residency = Residency(3, 8, Pools(F=4), "lru")
    for token in tokens:
        for layer, chosen in enumerate(token):
            for expert in sorted(chosen[:2]):
                residency.begin(layer, {expert: 1})
    assert residency.counters.hits[State.FULL] == 0


SMALL = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.sets(st.integers(0, 2), min_size=1).map(lambda experts: dict.fromkeys(experts, 1)),
    ),
    max_size=7,
)
LARGER = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.dictionaries(st.integers(0, 5), st.integers(1, 3), min_size=1, max_size=4),
    ),
    max_size=60,
)


def best_by_trial(steps, capacity):
    """After each step keep any set of what was kept or used, of every size; the most hits of all
    those ways."""
    reached = {frozenset(): 0}
    for layer, tokens in steps:
        used = frozenset((layer, expert) for expert in tokens)
        following = {}
        for kept, hits in reached.items():
            hits += len(kept & used)
            for size in range(capacity + 1):
                for chosen in combinations(sorted(kept | used), size):
                    chosen = frozenset(chosen)
                    following[chosen] = max(following.get(chosen, 0), hits)
        reached = following
    return max(reached.values())


@given(SMALL, st.integers(0, 4))
def test_belady_is_the_most(steps, capacity):
    assert belady_hits(steps, capacity) == best_by_trial(steps, capacity)


@pytest.mark.parametrize("scope", ["model", "layer"])
@pytest.mark.parametrize("name", list(POLICIES))
@given(LARGER, st.integers(0, 8), st.sampled_from([None, 0, 3]))
def test_no_policy_is_above(name, scope, steps, capacity, margin):
    pools = (
        Pools(F=capacity) if margin is None else Pools(F=capacity // 2, E=capacity - capacity // 2)
    )
    residency = Residency(3, 6, pools, Belady(steps) if name == "belady" else name, scope, margin)
    for step in steps:
        residency.begin(*step)
    by_layer = [[step for step in steps if step[0] == layer] for layer in range(3)]
    parts = [steps] if scope == "model" else by_layer
    ceiling = sum(belady_hits(part, capacity) for part in parts)
    compulsory = len({(layer, expert) for layer, tokens in steps for expert in tokens})
    hits = sum(residency.counters.hits.values())
    assert hits <= ceiling <= request_count(steps) - compulsory


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "belady"])
@given(LARGER, st.integers(0, 8))
def test_of_policies_belady_has_the_most(name, steps, capacity):
    """The arena's ceiling."""
    found = []
    for policy in (name, Belady(steps)):
        residency = Residency(3, 6, Pools(F=capacity), policy)
        for step in steps:
            residency.begin(*step)
        found.append(sum(residency.counters.hits.values()))
    assert found[0] <= found[1]


def test_a_capacity_is_not_negative():
    assert belady_hits([], 3) == 0
    with pytest.raises(ValueError, match="capacity is -1"):
        belady_hits([], -1)
