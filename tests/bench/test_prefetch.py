"""The prefetching bench on a model of a few megabytes: its bounds against their definition, and that all of it runs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.bench import prefetch
from moelab.specs import Event, MoESpec

seconds = st.floats(0, 10)


@given(st.lists(st.lists(st.tuples(seconds, seconds, seconds), min_size=1, max_size=4), min_size=1, max_size=4))
def test_bounds_are_what_overlapping_could_save(tokens):
    """Written out as times: copying, then computing; computing as experts come; both beside each other."""
    serial = sum(other + copy + expert for token in tokens for copy, expert, other in token)
    demand = sum(other + max(copy, expert) for token in tokens for copy, expert, other in token)
    ideal = sum(max(copy, expert + other) for token in tokens for copy, expert, other in token)
    over_serial, over_demand = prefetch.bounds([dict(enumerate(token)) for token in tokens])
    assert over_serial == pytest.approx((serial - ideal) / len(tokens), abs=1e-9)
    assert over_demand == pytest.approx((demand - ideal) / len(tokens), abs=1e-9)


def test_seconds_by_layer():
    events = [Event("compute", "other", 0, -1, 0, 1), Event("disk", "read", 0, 3, 1, 3),
              Event("disk", "read", 1, 2, 3, 4), Event("compute", "expert", 0, 3, 4, 5.5), Event("compute", "wait", 0, 3, 1, 4),
              Event("worker 0", "check", 0, 3, 3, 4), Event("compute", "other", -1, -1, 7, 8)]
    assert prefetch.by_layer(events) == {0: (2, 1.5, 1), 1: (1, 0, 0)}


def test_the_bench_runs(tmp_path):
    spec = MoESpec("synthetic-mini", "qwen3_moe", 3, (0, 1, 2), 16, 2, 64, 64, vocab=256, heads=4, kv_heads=2,
                   head_dim=16)
    found = prefetch.run(tmp_path, tokens=2, budgets=[0.5], ratios=[1.0], spec=spec)
    rows = found["budget 50%, fast, copying 1 × computing"]
    assert list(rows) == list(prefetch.ARMS)
    assert rows["speculative"]["MB wasted"] == 0 == rows["copy, then compute"]["hidden reads"]
    against = found["against the bounds"]["budget 50%, exact, copying 1 × computing"]
    assert against["eq. (1) s"] > 0 and against["copy ÷ compute, found"] > 0
