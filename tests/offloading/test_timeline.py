"""The packed timeline gives back what was put in."""

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import Event
from moelab.offloading.run import Timeline
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


@given(EVENTS)
def test_events_come_back_in_their_order(events):
    timeline = Timeline()
    for event in events:
        timeline.add(event)
    assert list(timeline) == events and len(timeline) == len(events)
    timeline.clear()
    assert not len(timeline) and list(timeline) == []


def test_threads_report_at_the_same_time():
    timeline, n = Timeline(), depth(5_000, 300_000)

    def report(me):
        for i in range(n):
            timeline.add(Event(f"worker {me}", "decode", me, i, 0.0, 1.0))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(report, range(3)))
    found = list(timeline)
    assert len(found) == len(timeline) == 3 * n
    for me in range(3):
        mine = [event for event in found if event.layer == me]
        assert [event.expert for event in mine] == list(range(n))
        assert {event.resource for event in mine} == {f"worker {me}"}
