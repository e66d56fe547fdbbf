"""Pictures of studies draw the numbers that they are given."""

import numpy as np
import pytest

pytest.importorskip("plotly")
from moelab.base.specs import Event
from moelab.viz import figures
from notebooks.studies import charts
from notebooks.studies.ane import add_paper
from notebooks.studies.loads import load_distribution
from notebooks.studies.timelines import token_timeline

#: two layers: the second's expert 5 is read while the first computes, its expert 6 after its router
TOKEN = [
    Event("compute", "other", 0, -1, 1.000, 1.001),
    Event("disk", "read", 0, 3, 1.001, 1.003, 9),
    Event("compute", "expert", 0, 3, 1.003, 1.004),
    Event("disk", "read", 1, 5, 1.0035, 1.0055, 9),
    Event("compute", "other", 1, -1, 1.004, 1.006),
    Event("disk", "read", 1, 6, 1.006, 1.007, 9),
    Event("worker 0", "check", 1, 6, 1.007, 1.0071),
    Event("compute", "expert", 1, 6, 1.007, 1.008),
]


def test_experts_are_ordered_by_load_and_the_band_spans_all_chunks():
    everything, _, median = load_distribution([[1, 9], [3, 5], [2, 7]], {"K·B/E": 6}).data
    np.testing.assert_array_equal(everything.y, [9, 3, 1, 5])  # up the top, down below
    np.testing.assert_array_equal([median.y, median.customdata], [[7, 2], [1, 0]])


def test_a_read_before_its_layers_router_has_run_is_a_prefetch():
    reads = [figures.kind_of(event, TOKEN) for event in TOKEN if event.resource == "disk"]
    assert reads == ["read", "prefetch", "read"]
    made = token_timeline({"on demand": TOKEN, "hint": TOKEN})
    assert {row for trace in made.data for row in trace.y} == {"copy", "compute"}


def test_published_values_lie_on_their_bars():
    panels = {"p": {"a": {"x": 1.0}, "b": {"x": 2.0}}, "q": {"a": {"x": 3.0}}}
    made = add_paper(charts.bars(panels, "×"), {"b": {"x": 2.5}}, {"a": {"x": 3.5}})
    *bars, first, second = made.data
    assert [(of.xaxis, of.y) for of in (first, second)] == [("x", (2.5,)), ("x2", (3.5,))]
    assert (first.showlegend, second.showlegend) == (True, False)
