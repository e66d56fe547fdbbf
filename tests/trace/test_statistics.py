"""Statistics of a trace against loops over its tokens."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moelab.trace.statistics import (
    hit_rates,
    hits_by_capacity,
    next_layer,
    next_token_reuse,
    popularity,
    statistics,
)
from tests.test_trace import random_trace


def replayed(keys, capacity, policy):
    """Hits of a policy that must admit, by looking at everything each time."""
    resident, hits = set(), 0
    for now, key in enumerate(keys):
        hits += key in resident
        if key not in resident and len(resident) == capacity:
            before, after = keys[: now + 1], keys[now + 1 :]
            last = {k: max(i for i, one in enumerate(before) if one == k) for k in resident}
            uses = Counter(before)
            following = {k: after.index(k) if k in after else len(keys) for k in resident}
            order = {
                "lru": lambda k: last[k],
                "lfu": lambda k: (uses[k], last[k]),
                "belady": lambda k: -following[k],
            }
            resident.remove(min(sorted(resident), key=order[policy]))
        resident.add(key)
    return hits


@given(st.lists(st.integers(0, 7), min_size=1, max_size=40), st.integers(1, 8))
def test_one_pass_gives_the_hits_of_every_capacity(keys, capacity):
    for policy in ("lru", "lfu", "belady"):
        found = hits_by_capacity(np.array(keys), 8, policy)
        assert found[capacity - 1] == replayed(keys, capacity, policy)
    best = sum(count for _, count in Counter(keys).most_common(capacity))
    assert hits_by_capacity(np.array(keys), 8, "static")[capacity - 1] == best


@given(
    *(st.integers(low, high) for low, high in ((1, 30), (1, 4), (2, 9), (0, 99))),
)
def test_reuse_popularity_and_order_are_those_of_loops(T, L, E, seed):
    """`random_trace` has tokens of three sequences mixed, and some that no expert ran."""
    trace = random_trace(T, L, E, 1 + seed % E, seed)
    shared = asked = 0
    keys, latest = [], {}
    for token in sorted(range(T), key=lambda t: int(trace.sequence[t])):
        cells = [[e for e in cell if e < E] for cell in trace.ids[token].tolist()]
        for layer, cell in enumerate(cells):
            keys += [layer * E + e for e in cell]
            if before := latest.get(int(trace.sequence[token]), {}).get(layer):
                shared += len({*before} & {*cell})
                asked += len(cell)
        latest = {int(trace.sequence[token]): dict(enumerate(cells))}
    reuse = next_token_reuse(trace)
    assert math.isclose(reuse, shared / asked) if asked else math.isnan(reuse)
    if not keys:
        return
    rates = hit_rates(trace, (0.5,))
    for policy in ("lru", "lfu", "belady"):
        slots = round(0.5 * L * E)
        assert math.isclose(rates[policy][0], replayed(keys, slots, policy) / len(keys))
    bits, quarter = zip(
        *(layer_popularity([k % E for k in keys if k // E == layer], E) for layer in range(L))
    )
    assert np.allclose(popularity(trace), (np.nanmean(bits), np.nanmean(quarter)))


def layer_popularity(experts, E):
    if not experts:
        return math.nan, math.nan
    shares = sorted((n / len(experts) for n in Counter(experts).values()), reverse=True)
    return -sum(p * math.log2(p) for p in shares), sum(shares[: max(E // 4, 1)])


def test_a_layer_that_follows_from_the_one_before_is_told():
    trace = random_trace(400, 3, 8, 2, seed=1)
    ids = torch.arange(400)[:, None] % 8 // 2 * 2 + torch.arange(2)  # pairs of experts
    trace.ids[:] = torch.stack([ids, (ids + 2) % 8, (ids + 4) % 8], 1)
    assert next_layer(trace) == 1
    assert statistics(trace).next_layer == 1


def test_what_says_nothing_is_refused():
    trace = random_trace(3, 2, 4, 2)
    with pytest.raises(ValueError, match="from 0 to 1"):
        hit_rates(trace, (1.5,))
    trace.ids[:] = 4
    with pytest.raises(ValueError, match="no expert ran"):
        statistics(trace)
