"""The compact timeline gives back what was put in."""

import threading
from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from moelab.offloading import run as module
from moelab.offloading.run import Timeline
from moelab.specs import Event
from tests.depth import depth

EVENTS = st.lists(
    st.builds(
        Event,
        st.sampled_from(["disk", "worker 0", "compute"]),
        st.sampled_from(["read", "expert", "wait"]),
        st.integers(-1, 90),
        st.integers(-1, 500),
        st.floats(0, 1e6),
        st.floats(0, 1e6),
        st.integers(0, 1 << 40),
    )
)


@given(EVENTS, st.integers(1, 5))
def test_events_come_back_in_their_order(events, batch):
    old, module._BATCH = module._BATCH, batch
    try:
        timeline = Timeline()
        for event in events:
            timeline.add(event)
            timeline.compact()
        assert list(timeline) == events and len(timeline) == len(events)
        timeline.clear()
        assert not len(timeline) and list(timeline) == []
    finally:
        module._BATCH = old


def test_packing_drops_nothing_that_other_threads_report_meanwhile(monkeypatch):
    """Three threads report events, while a fourth packs as often as it can."""
    monkeypatch.setattr(module, "_BATCH", 5)
    timeline, n, over = Timeline(), depth(5_000, 300_000), threading.Event()

    def report(me):
        for i in range(n):
            timeline.add(Event(f"worker {me}", "decode", me, i, 0.0, 1.0))

    def pack():
        while not over.is_set():
            timeline.compact()

    packer = threading.Thread(target=pack)
    packer.start()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(report, range(3)))
    over.set()
    packer.join()
    found = list(timeline)
    assert len(found) == len(timeline) == 3 * n
    for me in range(3):
        assert [event.expert for event in found if event.layer == me] == list(range(n))
