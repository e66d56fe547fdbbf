"""Engines that are not ours: a cache in bytes against a naive one, and seconds by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import ExpertKey
from notebooks.studies.engines import Costs, SizedCache, StaticSet, played

BATCHES = st.lists(
    st.tuples(st.integers(0, 2), st.lists(st.integers(0, 5), min_size=1, max_size=7)), max_size=40
)


def size(key: ExpertKey) -> int:
    return 3 + key.layer


def naive(batches, budget, layers):
    """Least recently used, as a list from the oldest; after each batch what is too much leaves."""
    kept, missed = [], []
    for layer, experts in batches:
        batch = [(layer, expert) for expert in experts]
        missed.append([key for key in dict.fromkeys(batch) if key not in kept])
        for key in batch:
            if key in kept:
                kept.remove(key)
            kept.append(key)

        def mine(layer=layer):
            return [key for key in kept if not layers or key[0] == layer]

        def room(mine=mine):
            return sum(3 + of for of, _ in mine()) <= budget // max(layers, 1)

        for key in mine():
            if not room() and key not in batch:
                kept.remove(key)
    return missed


@given(BATCHES, st.integers(0, 60), st.sampled_from((0, 3)))
def test_a_cache_in_bytes_evicts_as_a_naive_one(batches, budget, layers):
    cache = SizedCache(budget, size, "lru", layers)
    assert [cache.ask(*batch) for batch in batches] == naive(batches, budget, layers)


@given(BATCHES, st.sampled_from(("lru", "lfu", "lrfu", "fifo")))
def test_with_room_for_all_only_first_uses_are_missed(batches, policy):
    cache = SizedCache(18 * 5, size, policy)
    missed = [key for batch in batches for key in cache.ask(*batch)]
    used = {(layer, expert) for layer, experts in batches for expert in experts}
    assert len(missed) == len(used) and set(missed) == used


def test_seconds_are_of_hits_misses_and_the_reads_that_are_not_hidden():
    token = [(0, [1, 2]), (1, [2, 2])]
    held = StaticSet({ExpertKey(0, 1)})
    run = played([token, token], held, Costs(2.0, 0.25, 0.5, 0.1), size)
    assert (run.requests, run.misses, run.read) == (6, 4, 14)
    assert run.computing == pytest.approx(2 * (2.0 + 0.25 + 2 * 0.5))
    assert run.waiting == pytest.approx(1.4)
    assert run.pace == pytest.approx(2 / 7.9) and run.hit_rate == pytest.approx(1 / 3)
    hidden = played([token], held, Costs(2.0, byte=1.0, hidden=1.0), size)
    assert hidden.waiting == (3 - 1) + (4 - 1)


def test_a_mapped_file_holds_other_weights_beside_experts():
    token = [(0, [-1, 1]), (1, [-1, 1])]
    bytes_of = {-1: 10, 1: 5}
    cache = SizedCache(20, lambda key: bytes_of[key.expert])
    run = played([token] * 3, cache, Costs(1.0), lambda key: bytes_of[key.expert])
    assert run.requests == 6 and run.misses == 2  # experts are there once they were read
    assert run.read == 30 + 2 * 2 * 10  # a layer's other weights leave before it comes again


def test_nothing_to_play_is_refused():
    with pytest.raises(ValueError, match="no experts"):
        played([], StaticSet(()), Costs(1.0), size)
