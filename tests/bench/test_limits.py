"""Limits: numbers computed by hand, and that no small simulation of what they bound gets past
them."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.bench import limits
from moelab.bench.limits import LayerRecord
from moelab.offloading.budget import kv_bytes
from moelab.specs import Event, MoESpec

SPEC = MoESpec(
    "toy", "toy", num_layers=4, moe_layers=(1, 2, 3), E=8, K=2, H=100, I=50, kv_heads=2, head_dim=16
)


def lru(requests, capacity):
    """Hits of a global LRU, one request at a time."""
    cache, hits = OrderedDict(), 0
    for key in requests:
        if key in cache:
            hits += 1
            cache.move_to_end(key)
        else:
            cache[key] = True
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


def routings(L, E, K, tokens):
    """Strategy: [tokens][L] sets of K of E experts."""
    layer = st.sets(st.integers(0, E - 1), min_size=K, max_size=K)
    return st.lists(st.lists(layer, min_size=L, max_size=L), min_size=1, max_size=tokens)


@given(routings(3, 8, 2, 12), st.integers(0, 2))
def test_no_lru_up_to_the_cliff_ever_hits(routing, fewer):
    requests = [
        (layer, e)
        for token in routing
        for layer, chosen in enumerate(token)
        for e in sorted(chosen)
    ]
    assert lru(requests, limits.lru_cliff(SPEC) - fewer) == 0


def test_the_cliff_is_no_lower():
    assert limits.lru_cliff(SPEC) == 4
    requests = [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
        (0, 1),
        (0, 2),
    ]  # expert 1 last, then first
    assert lru(requests, 4) == 0 and lru(requests, 5) == 1


def test_uniform_routing_hits_the_share_that_fits():
    assert limits.uniform_hit_rate(SPEC, 6) == 0.25
    assert limits.uniform_hit_rate(SPEC, 1000) == 1


def test_kv_bytes_by_hand():
    assert (
        kv_bytes(SPEC, 10) == 10 * 4 * 2 * 2 * 16 * 2
    )  # tokens, layers, keys and values, heads, size


@pytest.mark.parametrize("rate, steps", [(0, 1), (1, 0)])
def test_values_out_of_range_are_refused(rate, steps):
    with pytest.raises(ValueError, match="must be positive"):
        limits.on_demand_limit([], rate, steps)


def test_on_demand_by_hand():
    read_bound = LayerRecord(
        bytes=4_000_000, other_s=0.001, expert_s=0.003, decompress_s=0.006
    )  # reads 4 ms
    decode_bound = LayerRecord(
        bytes=1_000_000, other_s=0.001, expert_s=0.002, decompress_s=0.010
    )  # 5 ms on two
    hit = LayerRecord(other_s=0.001, expert_s=0.002)
    assert limits.on_demand_limit([read_bound], 1e9, workers=2) == pytest.approx(0.005)
    assert limits.on_demand_limit([decode_bound], 1e9, workers=2) == pytest.approx(0.006)
    assert limits.on_demand_limit([hit], 1e9) == pytest.approx(0.003)
    assert limits.on_demand_limit(
        [read_bound, decode_bound, hit] * 2, 1e9, 2, workers=2
    ) == pytest.approx(0.014)


RECORDS = st.lists(
    st.builds(LayerRecord, st.integers(0, 10**9), *[st.floats(0, 10)] * 3), max_size=8
)


@given(RECORDS, st.floats(1e6, 1e10), st.integers(1, 8))
def test_on_demand_is_between_the_busiest_resource_and_one_after_another(records, rate, workers):
    found = limits.on_demand_limit(records, rate, workers=workers)
    other, read = sum(r.other_s for r in records), sum(r.bytes for r in records) / rate
    decompress, expert = (
        sum(r.decompress_s for r in records) / workers,
        sum(r.expert_s for r in records),
    )
    assert other + max(read, decompress, expert) <= found * (1 + 1e-9) + 1e-12
    assert found <= (other + read + decompress + expert) * (1 + 1e-9) + 1e-12
    assert limits.on_demand_limit(records, 2 * rate, workers=workers) <= found


def test_records_are_the_sums_of_each_layer_of_each_decode_forward():
    forwards = [(0, 10, 5, "prefill"), (10, 20, 1, "decode"), (20, 30, 1, "decode")]
    events = [
        Event("disk", "read E", 0, 3, 1, 2, 999),
        Event("compute", "other", -1, -1, 10, 11),
        Event("compute", "other", 0, -1, 11, 12),
        Event("disk", "read E", 0, 3, 12, 13, 10),
        Event("disk", "read SM", 0, 3, 13, 14, 20),
        Event("worker 0", "decompress", 0, 3, 13, 15),
        Event("worker 1", "recover", 0, 3, 15, 15.5),
        Event("compute", "wait", 0, -1, 12, 15.5),
        Event("compute", "expert", 0, 3, 15.5, 16.5),
        Event("compute", "expert", 1, 0, 21, 23),
    ]
    records, steps = limits.layer_records(events, forwards)
    assert steps == 2
    assert records == [LayerRecord(other_s=1), LayerRecord(30, 1, 1, 2.5), LayerRecord(expert_s=2)]
    assert limits.on_demand_limit(records, 10, steps) == pytest.approx((1 + 1 + 3 + 2) / 2)
