"""Figures of speculation draw the numbers they are given, in the units they say, and never differ
by colour alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("plotly.io")

from moelab.specs import Event
from moelab.viz import speculation_figures as figures
from moelab.viz.figures import apart, differences
from tests.viz.lazily import Lazily, named

#: two layers: the second's expert 5 is read while the first computes, its expert 6 after its router
#: has run
TOKEN = [
    Event("compute", "other", 0, -1, 1.000, 1.001),
    Event("disk", "read", 0, 3, 1.001, 1.003, 9),
    Event("compute", "wait", 0, 3, 1.001, 1.003),
    Event("compute", "expert", 0, 3, 1.003, 1.004),
    Event("disk", "read", 1, 5, 1.0035, 1.0055, 9),
    Event("compute", "other", 1, -1, 1.004, 1.006),
    Event("disk", "read", 1, 6, 1.006, 1.007, 9),
    Event("worker 0", "check", 1, 6, 1.007, 1.0071),
    Event("compute", "expert", 1, 5, 1.006, 1.0065),
    Event("compute", "expert", 1, 6, 1.007, 1.008),
    Event("compute", "other", -1, -1, 1.008, 1.009),
]
LATER = [event._replace(start=event.start + 5, end=event.end + 5.001) for event in TOKEN]
PANELS = {
    "trained": {"s": [0.5, 0.7, np.nan], "q": [0.6, 0.8, 0.9]},
    "untrained": {"q": [0.3, 0.4, 0.5]},
}
SAMPLES = {
    "1 ×": {"on demand": [0.01, 0.02, 0.03], "speculative": [0.01, 0.01, 0.02]},
    "3 ×": {"on demand": [0.04, 0.05], "speculative": [0.03, 0.02]},
}
MADE = Lazily(
    {
        "by_layer": lambda: figures.by_layer(
            PANELS, "recall@K (%)", chance=0.125, errors={"trained": {"s": [0.01, 0.02, 0]}}
        ),
        "training": lambda: figures.training(
            {"mean": [(0, 0.1), (5000, 0.7)], "hardest": [(0, 0.1), (5000, 0.5)]},
            {"router on s": 0.6, "router on q": 0.61},
        ),
        "differences": lambda: differences(
            {
                "loss": {"quasi": (2.0, 1.5, 2.6), "random": (9.0, 8.0, 10.0)},
                "lookup": {"quasi": (-1.0, -3.0, 1.0)},
            },
            {"loss": "change (%)", "lookup": "points (%)"},
            {"loss": 1},
        ),
        "tpot": lambda: figures.tpot(SAMPLES, {"1 ×": 0.012}, "copying (× computing)"),
        "token_timeline": lambda: figures.token_timeline(
            {"on demand": TOKEN, "speculative": LATER}
        ),
    }
)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
def test_labels_are_moved_apart_in_their_order(values):
    moved = apart(values, 5, 100)
    order = np.argsort(values, kind="stable")
    assert (np.diff(np.array(moved)[order]) >= 5 - 1e-9).all() and max(moved) <= 100
    if len(values) == 1 or np.diff(np.sort(values)).min() >= 5:
        np.testing.assert_allclose(moved, values)


def test_differences_have_their_interval_on_both_sides():
    points = named(MADE["differences"], "loss")
    np.testing.assert_allclose(
        [points.x[0], points.error_x.arrayminus[0], points.error_x.array[0]], [2, 0.5, 0.6]
    )
    assert MADE["differences"].layout.yaxis.categoryarray == ("random", "quasi")  # the first on top


def test_tpot_bars_are_medians_in_milliseconds():
    bar = named(MADE["tpot"], "on demand")
    np.testing.assert_allclose(bar.y, [20, 45])
    np.testing.assert_allclose(bar.error_y.array, [8, 4])
    np.testing.assert_allclose(named(MADE["tpot"], "eq. (1): no less").y, [12])


def test_the_timeline_tells_prefetches_from_reads_on_demand_and_leaves_workers_out():
    figure = MADE["token_timeline"]
    on_demand, ahead = named(figure, "read"), named(figure, "prefetch")
    assert ([e for _, e in on_demand.customdata], [e for _, e in ahead.customdata]) == ([3, 6], [5])
    np.testing.assert_allclose([ahead.base[0], ahead.x[0]], [3.5, 2.0])
    assert set(ahead.y) == {"copy"} and set(named(figure, "expert").y) == {"compute"}
    assert named(figure, "other").text == ("0", "1", "")
    assert len({y for trace in figure.data for y in trace.y}) == 2
