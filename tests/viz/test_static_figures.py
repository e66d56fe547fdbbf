"""Figures of experts draw the numbers they are given, in the units they say, and never differ by
colour alone."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("plotly.io")

from moelab.viz.story import static_figures as figures
from tests.viz.lazily import Lazily, named

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


def test_executors_are_medians_in_milliseconds_in_the_order_given_and_limits_cross_all_of_them():
    points = named(MADE["executors"], "prefill")
    np.testing.assert_allclose(
        [points.x, points.error_x.array, points.error_x.arrayminus], [[20, 10], [8, 8], [8, 0]]
    )
    assert MADE["executors"].layout.yaxis.categoryarray == ("gemv", "sorted", "reference")
    line = named(MADE["executors"], "decode: memory bandwidth, 0.8 ms")
    assert line.x == pytest.approx([0.8] * 3) and set(line.y) == {"gemv", "sorted", "reference"}


def test_balance_is_relative_to_the_mean():
    assert [bar.name for bar in MADE["balance"].data] == [
        "as they are: max/mean 2.000",
        "8 spare: max/mean 1.000",
    ]
    np.testing.assert_allclose(MADE["balance"].data[0].y, [2, 2 / 3, 2 / 3, 2 / 3])
