"""The compact timeline gives back what was put in."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from moelab.runtime import timeline as module
from moelab.runtime.timeline import Timeline
from moelab.specs import Event

EVENTS = st.lists(st.builds(Event, st.sampled_from(["disk", "worker 0", "compute"]),
                            st.sampled_from(["read", "expert", "wait"]), st.integers(-1, 90), st.integers(-1, 500),
                            st.floats(0, 1e6), st.floats(0, 1e6), st.integers(0, 1 << 40)))


@given(EVENTS, st.integers(1, 5))
def test_events_come_back_in_their_order(events, batch):
    old, module._BATCH = module._BATCH, batch
    try:
        timeline = Timeline()
        for event in events:
            timeline.add(event)
            timeline.compact()
        assert list(timeline) == events and len(timeline) == len(events)
        assert timeline.since(10.0) == [event for event in events if event.end > 10.0]
        timeline.clear()
        assert not len(timeline) and list(timeline) == []
    finally:
        module._BATCH = old


def test_a_packed_event_is_small():
    timeline = Timeline()
    for i in range(module._BATCH):
        timeline.add(Event("disk", "read", 3, i, float(i), i + 0.5, 4096))
    timeline.compact()
    assert not timeline._new and sum(rows.nbytes for rows in timeline._old) <= 48 * module._BATCH
    assert sys.getsizeof(timeline._old[0]) < 50 * module._BATCH
