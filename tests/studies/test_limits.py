"""The least seconds of a step: numbers computed by hand, and that no simulation gets past them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.specs import Event
from notebooks.studies import limits
from notebooks.studies.limits import LayerRecord

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
    least = limits.overlapped_limit(records, rate, workers=workers)
    assert max(read, decompress, other + expert) == pytest.approx(least)


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
