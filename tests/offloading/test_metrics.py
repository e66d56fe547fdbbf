"""Metrics: a small run counted by hand."""

import pytest

from moelab.base.specs import Event, State
from moelab.cache.residency import CacheCounters
from moelab.offloading.metrics import metrics, process

FORWARDS = [(0.0, 4.0, 10, "prefill"), (5.0, 7.0, 2, "decode"), (7.0, 10.0, 2, "decode")]
EVENTS = [
    Event("disk", "read E", 0, 1, 0.0, 1.0, 100),
    Event("disk", "read SM", 0, 1, 1.0, 2.0, 300),
    Event("worker 0", "decompress", 0, 1, 1.0, 2.0),
    Event("worker 0", "recover", 0, 1, 2.0, 2.5),
    Event("compute", "other", 0, -1, 0.0, 0.5),
    Event("compute", "wait", 0, -1, 0.5, 2.5),
    Event("compute", "expert", 0, 1, 2.5, 4.0),
    Event("compute", "other", 0, -1, 5.0, 6.0),
    Event("compute", "expert", 0, 1, 6.0, 7.0),
    Event("compute", "other", 0, -1, 7.0, 7.5),
    Event("disk", "read", 0, 2, 7.5, 9.5, 40),
    Event("compute", "wait", 0, -1, 7.5, 9.5),
    Event("compute", "expert", 0, 2, 9.5, 10.0),
]


def test_a_run_by_hand():
    counters = CacheCounters({State.FULL: 6, State.COMPRESSED: 3}, misses=3, evictions=2)
    found = metrics(EVENTS, FORWARDS, counters)
    assert found.ttft == 4 and found.tpot == 2.5
    assert found.throughput == pytest.approx(4 / 6)  # from the prefill's end at 4 to 10
    assert (found.prefill_tokens, found.decode_tokens) == (10, 4)
    assert found.read_bytes == 440
    assert found.read_bytes_per_token == 10
    assert found.stall == 4 and found.stall_per_step == 1
    assert found.busy == {"compute": 5, "disk": 4, "worker 0": 1.5}
    assert found.overlap_efficiency == 0
    assert found.hits == {"F": 6, "C": 3} and found.evictions == 2 and found.hit_rate == 0.5


def test_what_a_gpu_ran_by_hand():
    """Prompts count for nothing here; a median of two is their mean."""
    passes = [
        (0.0, 1.0, 9, "prefill", 0, 0, None, None, "layer", 9.0),
        (1.0, 2.0, 1, "decode", 0, 0, None, None, "token", 1e-5),
        (2.0, 3.0, 3, "decode", 2, 1, None, None, "layer", 3e-5),
        (3.0, 4.0, 1, "decode", 0, 0, None, None, "token"),
    ]
    events = [Event("link", "read", 0, 1, 1.0, 1.5, 70), Event("link", "back", 0, 2, 1.5, 2.0, 7)]
    found = metrics([*events, *EVENTS], passes, CacheCounters(admissions=4, away=3))
    assert found.paths == {"token": 2, "layer": 2} and found.link_bytes == 77
    assert found.python_per_layer == pytest.approx(2e-5)
    assert (found.admissions, found.away) == (4, 3)
    assert metrics([], []).paths is None


def test_nothing_happened():
    found = metrics([], [], CacheCounters())
    assert found.ttft is found.tpot is found.overlap_efficiency is found.throughput is None
    assert found.read_bytes == found.stall == 0 and found.hit_rate is None


def test_the_process_has_a_peak():
    before = process()["peak_rss_bytes"]
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    after = process()["peak_rss_bytes"]
    if before is not None:  # Linux
        assert after >= before and after > 64 << 20
