"""Figures of experts draw the numbers they are given, in the units they say, and never differ by colour alone."""

import numpy as np
import pytest

pio = pytest.importorskip("plotly.io")

from moelab.viz import expert_figures as figures  # noqa: E402

SAMPLES = {"prefill": {"reference": [0.01, 0.02, 0.03], "packed": [0.01, 0.01, 0.02]},
           "decode": {"gemv": [0.001, 0.002], "reference": [0.004, 0.002]}}
MADE = {
    "padding": figures.padding({"uniform": [(128, 0.2), (64, 0.1)], "Zipf 1": [(64, 0.3), (128, 0.5)]}),
    "dropping": figures.dropping({"saliency": [(1.0, 0.2, 0.8, 0.7, 0.85), (2.0, 0.0, 0.9, 0.88, 0.92)],
                                  "random": [(1.0, 0.2, 0.5, 0.4, 0.6), (2.0, 0.0, 0.9, 0.88, 0.92)]}, 0.9),
    "by_layer": figures.by_layer({"tiers": [0.1, 0.2], "groups": [0.1, 0.3]}, {"tiers": [0.3, 0.2], "pad": [0.5, 0.6]},
                                 {"BoolQ": (0.1466, 0.3173)}),
    "executors": figures.executors(SAMPLES, {"decode": {"memory bandwidth": 0.0008}}),
    "selective": figures.selective({"measured": [(1, 8), (4, 20)]}, {"independent": [(1, 8), (4, 25)],
                                                                     "worst case": [(1, 8), (4, 32)]}, 64,
                                   {"selective": [(1, [0.001, 0.003])], "all experts": [(1, [0.005, 0.006])]}),
    "volumes": figures.volumes({"all-gather": [(2, 100), (4, 300)], "all-to-all": [(2, 50), (4, 75)]},
                               {"all-gather": [(2, 100)], "all-to-all": [(2, 50)]}),
    "balance": figures.balance({"as they are": [3, 1, 1, 1], "8 spare": [1.5, 1.5, 1.5, 1.5]}),
}


def named(figure, name):
    return next(trace for trace in figure.data if trace.name == name)


@pytest.mark.parametrize("name", MADE)
def test_axes_have_titles_with_units_and_figures_survive_json(name):
    figure = pio.from_json(MADE[name].to_json())
    titles = [axis.title.text for axis in (*figure.select_xaxes(), *figure.select_yaxes())]
    assert any(title and "(" in title for title in titles)
    assert len(figure.data) == len(MADE[name].data) > 1
    assert figure.layout.template.layout.colorway == MADE["padding"].layout.template.layout.colorway


@pytest.mark.parametrize("name, look", [
    ("padding", lambda trace: trace.line.dash), ("dropping", lambda trace: trace.line.dash),
    ("by_layer", lambda trace: trace.line.dash), ("balance", lambda trace: trace.marker.pattern.shape),
    ("executors", lambda trace: trace.xaxis),
    ("selective", lambda trace: (trace.mode, trace.line.dash)),
    ("volumes", lambda trace: (trace.mode, trace.line.dash or trace.marker.symbol))])
def test_no_two_series_differ_by_colour_alone(name, look):
    looks = {trace.name: look(trace) for trace in MADE[name].data}
    assert len(set(looks.values())) == len(looks) > 1


def test_padding_is_sorted_and_in_per_cent():
    line = named(MADE["padding"], "uniform")
    np.testing.assert_allclose([line.x, line.y], [[64, 128], [10, 20]])
    assert MADE["padding"].layout.xaxis.ticktext == ("64", "128")


def test_dropping_shows_accuracy_with_its_interval_below_the_drop_rate():
    drop, accuracy = [trace for trace in MADE["dropping"].data if trace.name == "saliency"]
    np.testing.assert_allclose(drop.y, [20, 0])
    np.testing.assert_allclose([accuracy.y, accuracy.error_y.array, accuracy.error_y.arrayminus],
                               [[80, 90], [5, 2], [10, 2]])
    assert (drop.showlegend, accuracy.showlegend) == (None, False) and drop.line == accuracy.line
    assert [note.text for note in MADE["dropping"].layout.annotations] == ["nothing dropped: 90.0 %"]


def test_a_plan_looks_alike_in_both_panels_and_stands_in_the_legend_once():
    first, second = [trace for trace in MADE["by_layer"].data if trace.name == "tiers"]
    assert first.line == second.line and (first.showlegend, second.showlegend) == (True, False)
    np.testing.assert_allclose([first.y, second.y], [[10, 20], [30, 20]])
    assert named(MADE["by_layer"], "pad").showlegend
    assert sorted(shape.y0 for shape in MADE["by_layer"].layout.shapes) == pytest.approx([14.66, 31.73])


def test_executor_bars_are_medians_in_milliseconds_in_the_order_given():
    bar = named(MADE["executors"], "prefill")
    np.testing.assert_allclose([bar.x, bar.error_x.array, bar.error_x.arrayminus], [[20, 10], [8, 8], [8, 0]])
    assert MADE["executors"].layout.yaxis.categoryarray == ("gemv", "packed", "reference")
    assert [shape.x0 for shape in MADE["executors"].layout.shapes] == pytest.approx([0.8])
    assert "memory bandwidth: 0.80 ms" in [note.text for note in MADE["executors"].layout.annotations]


def test_unique_experts_measured_are_points_and_expected_are_lines():
    figure = MADE["selective"]
    assert (named(figure, "measured").mode, named(figure, "independent").mode) == ("markers", "lines")
    np.testing.assert_allclose(named(figure, "selective").y, [2])
    assert [shape.y0 for shape in figure.layout.shapes] == [64]
    assert len(figures.selective({"m": [(1, 8)]}, {"e": [(1, 8)]}, 64).data) == 2


def test_a_ways_formula_and_its_measurement_share_colour():
    line, points = (named(MADE["volumes"], f"all-to-all: {what}") for what in ("formula", "measured"))
    assert line.line.color == points.marker.color and (line.mode, points.mode) == ("lines", "markers")


def test_balance_is_relative_to_the_mean():
    assert [bar.name for bar in MADE["balance"].data] == ["as they are: max/mean 2.000", "8 spare: max/mean 1.000"]
    np.testing.assert_allclose(MADE["balance"].data[0].y, [2, 2 / 3, 2 / 3, 2 / 3])
