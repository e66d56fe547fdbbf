"""Every figure names its axes, survives JSON, and tells its series apart by more than colour."""

import pytest

pio = pytest.importorskip("plotly.io")

from tests.viz.test_charts import MADE

EVERY = [(MADE, name) for name in MADE]


def look(trace):
    """What is seen of a trace in print without colours; a filled band lies in another."""
    if trace.type == "bar":
        return trace.marker.pattern.shape, trace.marker.color, trace.y[0]
    return trace.mode, trace.line.dash, trace.marker.symbol, trace.fill and trace.name


@pytest.mark.parametrize("made, name", EVERY, ids=[name for _, name in EVERY])
def test_axes_have_titles_after_a_trip_through_json(made, name):
    figure = pio.from_json(made[name].to_json())
    assert any(axis.title.text for axis in (*figure.select_xaxes(), *figure.select_yaxes()))
    assert len(figure.data) == len(made[name].data) > 0


@pytest.mark.parametrize("made, name", EVERY, ids=[name for _, name in EVERY])
def test_no_two_series_differ_by_colour_alone(made, name):
    figure = pio.from_json(made[name].to_json())
    shown = {
        trace.name: look(trace)
        for trace in figure.data
        if trace.type in ("bar", "scatter") and trace.showlegend is not False
    }
    assert len(set(shown.values())) == len(shown)
