"""Charts draw the numbers they are given, where they belong and in the units they say."""

import json

import numpy as np
import pytest

pytest.importorskip("plotly")

from moelab.base.specs import Event
from moelab.viz import figures, theme
from moelab.viz.charts import gantt
from notebooks.studies import charts

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
DRAWN = {
    "lines": lambda: charts.lines(
        {"one": {"a": [(1, 2), (2, 3)]}, "two": {"b": [0.5, 0.7, np.nan], "a": [(1, 9)]}},
        "share (%)",
        "x",
    ),
    "lines across": lambda: charts.lines(
        {"a": [(1, 2, 1, 4)], "b": [(1, 5)]}, "%", "x", across={"chance": 1, "paper": 3}
    ),
    "lines log": lambda: charts.lines(
        {"a": [(2, 1), (64, 30)]}, "rows", "ranks", log="xy", dots={"a": [(2, 1.5)]}
    ),
    "bars": lambda: charts.bars(
        {"ours": {"a": (2, 1, 4), "b": None}, "theirs": {"a": 3, "b": 1}}, "ms", text=".1f"
    ),
    "bars and a line": lambda: charts.bars({"": {"a": 2.0}}, "load", line=(1, "perfect balance")),
    "intervals": lambda: charts.intervals(
        {
            "loss": {"random": (3, 1, 6), "router": (1, 0.5, 1.5)},
            "task": {"router": (0, -2, 2)},
        },
        {"loss": "(%)", "task": "(points)"},
        limits={"loss": 1},
    ),
    "intervals log": lambda: charts.intervals(
        {"prefill": {"ours": (20, 12, 28), "theirs": (40, 39, 44)}},
        "ms",
        series={"ours": "moelab", "theirs": "transformers"},
        limits={"prefill": 8},
        zero=None,
        log=True,
    ),
    "matrix": lambda: charts.matrix([[75, 0], [25, 50]], "layer", "expert", "%", numbers=".0f"),
    "gantt": lambda: gantt({"chosen order": LAYER, "naive order": LATER}),
    "budget curve": lambda: figures.budget_curve(
        CURVES,
        [(1e9, 0.2, 0.3), (2e9, 0.1, 0.6)],
        {"one token": 0.5e9},
    ),
}


class Made(dict):
    """name → figure, drawn when a test first asks for it."""

    def __missing__(self, name):
        return self.setdefault(name, DRAWN[name]())


MADE = Made()


def named(figure, name):
    """The trace of this name."""
    return next(trace for trace in figure.data if trace.name == name)


def look(trace):
    """What is seen of a trace in print without colours; a filled band lies in another."""
    if trace.type == "bar":
        return trace.marker.pattern.shape, trace.marker.color, trace.y[0]
    return trace.mode, trace.line.dash, trace.marker.symbol, trace.fill and trace.name


@pytest.mark.parametrize("name", DRAWN)
def test_axes_have_titles_and_no_two_series_differ_by_colour_alone(name):
    figure = MADE[name]
    assert json.loads(json.dumps(theme.to_json(figure)))["data"]
    assert any(axis.title.text for axis in (*figure.select_xaxes(), *figure.select_yaxes()))
    shown = {
        trace.name: look(trace)
        for trace in figure.data
        if trace.type in ("bar", "scatter") and trace.showlegend is not False
    }
    assert len(set(shown.values())) == len(shown)


def test_a_series_looks_alike_in_all_panels_and_is_named_once():
    first, _, again = MADE["lines"].data
    assert first.name == again.name == "a" and first.line == again.line
    assert (first.xaxis, again.xaxis) == ("x", "x2") and first.showlegend and not again.showlegend
    np.testing.assert_array_equal(named(MADE["lines"], "b").x, [0, 1, 2])


def test_lines_have_intervals_and_references():
    figure = MADE["lines across"]
    error = named(figure, "a").error_y
    assert error.array == (2,) and error.arrayminus == (1,)
    assert {shape.y0 for shape in figure.layout.shapes if shape.x1 != shape.x0} == {1, 3}


def test_logarithmic_lines_have_a_tick_at_each_point_and_dots_in_their_look():
    figure = MADE["lines log"]
    assert figure.layout.xaxis.tickvals == (2, 64) and figure.layout.yaxis.type == "log"
    line, dots = figure.data
    assert line.line.color == dots.marker.color and (*dots.x, *dots.y) == (2, 1.5)


def test_bars_have_whiskers_where_there_is_a_spread_and_none_without_a_value():
    ours, theirs = MADE["bars"].data
    assert [*map(list, (ours.x, ours.y, ours.error_y.array))] == [["a"], [2], [2]]
    assert list(theirs.y) == [3, 1] and theirs.error_y.array is None
    assert charts.bars({"ours": {"a": 0.5}}, "%", percent=True).data[0].y == (50,)


def test_stacked_bars_share_a_place_and_a_lines_name_lies_beside_them():
    figure = charts.bars({"read": {"M": 1}, "decode": {"M": 2}}, "ms", barmode="stack")
    assert figure.layout.barmode == "stack" and {bar.offsetgroup for bar in figure.data} == {None}
    (note,) = MADE["bars and a line"].layout.annotations
    assert (note.x, note.xref, note.xanchor, note.y) == (1, "x domain", "left", 1)


def test_intervals_are_around_zero_in_the_order_given():
    loss, figure = named(MADE["intervals"], "loss"), MADE["intervals"]
    np.testing.assert_allclose(
        [loss.x, loss.error_x.array, loss.error_x.arrayminus], [[3, 1], [3, 0.5], [2, 0.5]]
    )
    assert [shape.x0 for shape in figure.layout.shapes] == [0, 1, 0]
    assert figure.layout.yaxis.categoryarray == ("router", "random")
    assert MADE["intervals log"].layout.shapes[0].x0 == 8


def test_cells_are_as_given():
    np.testing.assert_array_equal(MADE["matrix"].data[0].z, [[75, 0], [25, 50]])


def test_the_gantt_starts_both_schedules_at_zero_and_tells_how_long_they_take():
    figure = MADE["gantt"]
    first, second = [trace for trace in figure.data if "(SM)" in trace.name]
    for trace in (first, second):
        np.testing.assert_allclose([trace.base[0], trace.x[0]], [2, 4])
        assert (trace.y, trace.text) == (("disk",), ("5",))
    assert all(note.text.endswith(": 8.00 ms") for note in figure.layout.annotations)
    assert [shape.x0 for shape in figure.layout.shapes] == pytest.approx([8, 8])


def test_the_budget_curve_has_tpot_in_ms_above_hits_in_percent():
    figure = MADE["budget curve"]
    lru = [trace for trace in figure.data if trace.name == "LRU"]
    assert [trace.xaxis for trace in lru] == ["x", "x2"]
    np.testing.assert_allclose([lru[0].x, lru[0].y, lru[1].y], [[1, 2], [300, 200], [10, 40]])
    assert "(GB)" in figure.layout.xaxis2.title.text
    small = figures.budget_curve({"LRU": [(2e6, 0.2, 0.4)]})
    assert list(small.data[0].x) == [2] and "(MB)" in small.layout.xaxis2.title.text
