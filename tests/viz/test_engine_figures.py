"""Figures of the engine draw the numbers they are given, in the units they say, and never differ by
colour alone."""

import numpy as np
import pytest

pytest.importorskip("plotly.io")

from moelab.specs import Event
from moelab.viz import engine_figures as figures
from tests.viz.lazily import Lazily

LAYER = [
    Event("disk", "read E", 3, 5, 1.000, 1.002, 9),
    Event("disk", "read SM", 3, 5, 1.002, 1.006, 20),
    Event("worker 0", "decompress", 3, 5, 1.002, 1.005),
    Event("worker 10", "recover", 3, 5, 1.006, 1.007),
    Event("worker 2", "decode", 3, 6, 1.006, 1.007),
    Event("compute", "wait", 3, -1, 1.001, 1.007),
    Event("compute", "expert", 3, 5, 1.007, 1.008),
]
LATER = [event._replace(start=event.start + 5, end=event.end + 5) for event in LAYER]
CURVES = {"LRU": [(2e9, 0.2, 0.4), (1e9, 0.3, 0.1)], "LFU": [(1e9, 0.25, 0.2), (2e9, 0.1, 0.5)]}
SYSTEMS = {"moelab": {1: 8.0, 4: 14.5}, "accelerate": {1: 0.9, 4: 1.1}}
LENGTHS = {
    "moelab": [(64, 7, 6, 9), (16, 2, 1, 3)],
    "accelerate": [(16, 8, 7, 9), (64, 30, 28, 33)],
}
MADE = Lazily(
    {
        "gantt": lambda: figures.gantt({"chosen order": LAYER, "naive order": LATER}),
        "budget_curve": lambda: figures.budget_curve(
            CURVES,
            [(1e9, 0.2, 0.3), (2e9, 0.1, 0.6)],
            {"reads": [(1e9, 0.1), (2e9, 0)]},
            {"one token": 0.5e9},
        ),
        "pools_chart": lambda: figures.pools_chart(
            {"1 GB": {"F": 0.6e9, "C": 0.4e9}, "2 GB": {"F": 2e9}},
            {"1 GB": 0.21, "2 GB": 0.1},
            {"1 GB": 0.23},
        ),
        "ablation": lambda: figures.ablation({"planned": (4, 12), "LRU": (6, 9), "FIFO": (6.5, 8)}),
        "batches": lambda: figures.batches(SYSTEMS),
        "output_lengths": lambda: figures.output_lengths(LENGTHS),
        "simulated_vs_measured": lambda: figures.simulated_vs_measured(
            {"full": [(0.1, 0.11)], "pools": [(0.2, 0.15), (0.4, 0.4)]}
        ),
    }
)


def named(figure, name):
    return next(trace for trace in figure.data if trace.name == name)


def test_the_gantt_starts_both_schedules_at_zero_and_tells_how_long_they_take():
    figure = MADE["gantt"]
    first, second = [trace for trace in figure.data if trace.name == "read SM"]
    for trace in (first, second):
        np.testing.assert_allclose([trace.base[0], trace.x[0]], [2, 4])
        assert (trace.y, trace.text) == (("disk",), ("5",))
    assert (first.showlegend, second.showlegend) == (True, False)
    assert [note.text for note in figure.layout.annotations] == [
        "chosen order: 8.00 ms",
        "naive order: 8.00 ms",
    ]
    assert [shape.x0 for shape in figure.layout.shapes] == pytest.approx([8, 8])
    assert named(figure, "wait").text == ("",)


def test_small_models_are_drawn_in_mb():
    curves = {"LRU": [(2e6, 0.2, 0.4), (4e6, 0.1, 0.6)]}
    figure = figures.budget_curve(
        curves, limits={"reads": [(2e6, 0.1), (4e6, 0)]}, marks={"one token": 1e6}
    )
    assert list(named(figure, "LRU").x) == [2, 4] == list(named(figure, "limit: reads").x)
    assert figure.layout.shapes[0].x0 == 1 and "(MB)" in figure.layout.xaxis2.title.text
    assert "(GB)" in MADE["budget_curve"].layout.xaxis2.title.text
    pools = figures.pools_chart({"35 %": {"F": 1e6, "C": 2e6}}, {"35 %": 0.1})
    assert pools.data[0].y == (1,) and "(MB)" in pools.layout.yaxis.title.text


def test_the_budget_curve_has_tpot_in_ms_above_hits_in_percent():
    lru = [trace for trace in MADE["budget_curve"].data if trace.name == "LRU"]
    assert [trace.xaxis for trace in lru] == ["x", "x2"]
    np.testing.assert_allclose([lru[0].x, lru[0].y, lru[1].y], [[1, 2], [300, 200], [10, 40]])
    belady = [trace for trace in MADE["budget_curve"].data if "Belady" in trace.name]
    assert all(trace.mode == "lines" and trace.line.dash == "solid" for trace in belady)
    assert "simulated" in MADE["budget_curve"].layout.legend.title.text
    np.testing.assert_allclose(named(MADE["budget_curve"], "limit: reads").y, [100, 0])
    assert {shape.x0 for shape in MADE["budget_curve"].layout.shapes} == {0.5}
    assert len(figures.budget_curve(CURVES).data) == 4


def test_batches_and_lengths_are_as_given():
    assert [dict(zip(trace.x, trace.y)) for trace in MADE["batches"].data] == [
        {"1": 8, "4": 14.5},
        {"1": 0.9, "4": 1.1},
    ]
    assert MADE["batches"].data[0].text == ("8", "14.5")
    mean = named(MADE["output_lengths"], "moelab")
    band = named(MADE["output_lengths"], "moelab, p10 to p90")
    np.testing.assert_allclose([mean.x, mean.y], [[16, 64], [2, 7]])
    np.testing.assert_allclose([band.x, band.y], [[16, 64, 64, 16], [3, 9, 6, 1]])


def test_a_point_lies_in_the_band_if_it_is_within_15_percent():
    figure = MADE["simulated_vs_measured"]
    band = named(figure, "within ±15 %")
    np.testing.assert_allclose(np.divide(band.y, band.x), [1.15, 1.15, 0.85, 0.85])
    pools = named(figure, "pools")
    np.testing.assert_allclose(
        [pools.x, pools.y, pools.customdata], [[200, 400], [150, 400], [-25, 0]]
    )
    assert figures.simulated_vs_measured({}).data[0].fill == "toself"
