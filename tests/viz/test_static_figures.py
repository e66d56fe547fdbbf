"""Figures of experts draw the numbers they are given, in the units they say, and never differ by
colour alone."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("plotly.io")

from moelab.viz.story import static_figures as figures
from tests.viz.lazily import Lazily, check_axes, named

SAMPLES = {
    "prefill": {"reference": [0.01, 0.02, 0.03], "sorted": [0.01, 0.01, 0.02]},
    "decode": {"gemv": [0.001, 0.002], "reference": [0.004, 0.002]},
}


def ran(*layers):
    """(dropped, padded) by layer."""
    return SimpleNamespace(
        by_layer=[SimpleNamespace(drop_rate=a, padded_fraction=b) for a, b in layers]
    )


MADE = Lazily(
    {
        "padding": lambda: figures.padding(
            {"uniform": [(128, 0.2), (64, 0.1)], "Zipf 1": [(64, 0.3), (128, 0.5)]}
        ),
        "dropping": lambda: figures.dropping(
            {
                "of choices (%)": {"dropped": [(2.0, 0, 0, 0), (1.0, 20, 20, 20)]},
                "right answers (%)": {
                    "needle": [(1.0, 80, 70, 85), (2.0, 90, 88, 92)],
                    "dropped": [(1.0, 3, 3, 3)],
                },
            }
        ),
        "differences": lambda: figures.differences(
            {
                "loss": {"random": (3.0, 1.0, 6.0), "router": (1.0, 0.5, 1.5)},
                "needle": {"router": (0.0, -2.0, 2.0)},
            },
            {"loss": "(%)", "needle": "(points)"},
        ),
        "plans": lambda: figures.plans(
            {
                "tiers": ran((0.1, 0.3), (0.2, 0.2)),
                "literal": ran((0.9, 0.9)),
                "groups": ran((0.1, 0.3), (0.3, 0.2)),
                "tiers, pad": ran((0, 0.5), (0, 0.6)),
            },
            {"BoolQ": (0.1466, 0.3173)},
        ),
        "executors": lambda: figures.executors(SAMPLES, {"decode": {"memory bandwidth": 0.0008}}),
        "selective": lambda: figures.selective(
            {"measured": [(1, 8), (4, 20)]},
            {"independent": [(1, 8), (4, 25)], "worst case": [(1, 8), (4, 32)]},
            64,
        ),
        "volumes": lambda: figures.volumes(
            {"all-gather": [(2, 100), (4, 300)], "all-to-all": [(2, 50), (4, 75)]},
            {"all-gather": [(2, 100)], "all-to-all": [(2, 50)]},
        ),
        "balance": lambda: figures.balance(
            {"as they are": [3, 1, 1, 1], "8 spare": [1.5, 1.5, 1.5, 1.5]}
        ),
    }
)


@pytest.mark.parametrize("name", MADE)
def test_axes_have_titles_with_units_and_figures_survive_json(name):
    check_axes(MADE[name], MADE["padding"])


@pytest.mark.parametrize(
    "name, look",
    [
        ("padding", lambda trace: trace.line.dash),
        ("dropping", lambda trace: trace.line.dash),
        ("plans", lambda trace: trace.line.dash),
        ("balance", lambda trace: trace.marker.pattern.shape),
        ("executors", lambda trace: (trace.mode, trace.xaxis)),
        ("differences", lambda trace: trace.xaxis),
        ("selective", lambda trace: (trace.mode, trace.line.dash)),
        ("volumes", lambda trace: (trace.mode, trace.line.dash or trace.marker.symbol)),
    ],
)
def test_no_two_series_differ_by_colour_alone(name, look):
    looks = {trace.name: look(trace) for trace in MADE[name].data}
    assert len(set(looks.values())) == len(looks) > 1


def test_padding_is_sorted_and_in_per_cent():
    line = named(MADE["padding"], "uniform")
    np.testing.assert_allclose([line.x, line.y], [[64, 128], [10, 20]])
    assert MADE["padding"].layout.xaxis.ticktext == ("64", "128")


def test_dropping_sorts_and_shows_intervals_and_a_series_looks_alike_in_all_panels():
    (first, second), needle = (
        [trace for trace in MADE["dropping"].data if trace.name == name]
        for name in ("dropped", "needle")
    )
    np.testing.assert_allclose([first.x, first.y], [[1, 2], [20, 0]])
    np.testing.assert_allclose(
        [needle[0].y, needle[0].error_y.array, needle[0].error_y.arrayminus],
        [[80, 90], [5, 2], [10, 2]],
    )
    assert (first.showlegend, second.showlegend) == (
        True,
        False,
    ) and first.line == second.line != needle[0].line
    assert [axis.title.text for axis in MADE["dropping"].select_yaxes()] == [
        "of choices (%)",
        "right answers (%)",
    ]


def test_differences_are_points_with_intervals_around_zero():
    loss = named(MADE["differences"], "loss")
    np.testing.assert_allclose(
        [loss.x, loss.error_x.array, loss.error_x.arrayminus], [[3, 1], [3, 0.5], [2, 0.5]]
    )
    assert [shape.x0 for shape in MADE["differences"].layout.shapes] == [0, 0]
    assert MADE["differences"].layout.yaxis.categoryarray == ("router", "random")
    assert [axis.title.text for axis in MADE["differences"].select_xaxes()] == ["(%)", "(points)"]


def test_a_plan_looks_alike_in_both_panels_and_stands_in_the_legend_once():
    first, second = [trace for trace in MADE["plans"].data if trace.name == "tiers"]
    assert first.line == second.line and (first.showlegend, second.showlegend) == (True, False)
    np.testing.assert_allclose([first.y, second.y], [[10, 20], [30, 20]])
    assert named(MADE["plans"], "tiers, pad").showlegend is not False
    assert sorted(shape.y0 for shape in MADE["plans"].layout.shapes) == pytest.approx(
        [14.66, 31.73]
    )


def test_executors_are_medians_in_milliseconds_in_the_order_given_and_limits_cross_all_of_them():
    points = named(MADE["executors"], "prefill")
    np.testing.assert_allclose(
        [points.x, points.error_x.array, points.error_x.arrayminus], [[20, 10], [8, 8], [8, 0]]
    )
    assert MADE["executors"].layout.yaxis.categoryarray == ("gemv", "sorted", "reference")
    line = named(MADE["executors"], "decode: memory bandwidth, 0.8 ms")
    assert line.x == pytest.approx([0.8] * 3) and set(line.y) == {"gemv", "sorted", "reference"}


def test_unique_experts_measured_are_points_and_expected_are_lines():
    figure = MADE["selective"]
    assert (named(figure, "measured").mode, named(figure, "independent").mode) == (
        "markers",
        "lines",
    )
    assert [shape.y0 for shape in figure.layout.shapes] == [64]
    assert len(figures.selective({"m": [(1, 8)]}, {"e": [(1, 8)]}, 64).data) == 2


def test_a_ways_formula_and_its_measurement_share_colour():
    line, points = (
        named(MADE["volumes"], f"all-to-all: {what}") for what in ("formula", "measured")
    )
    assert line.line.color == points.marker.color and (line.mode, points.mode) == (
        "lines",
        "markers",
    )


def test_balance_is_relative_to_the_mean():
    assert [bar.name for bar in MADE["balance"].data] == [
        "as they are: max/mean 2.000",
        "8 spare: max/mean 1.000",
    ]
    np.testing.assert_allclose(MADE["balance"].data[0].y, [2, 2 / 3, 2 / 3, 2 / 3])
