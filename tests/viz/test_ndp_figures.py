"""Figures of GPU-NDP draw the numbers they are given, in the units they say, and never differ by
colour alone."""

import numpy as np
import pytest

pytest.importorskip("plotly.io")

from moelab.specs import Event
from moelab.viz.charts import gantt
from moelab.viz.story import ndp_figures as figures
from tests.viz.lazily import Lazily

LAYER = [
    Event("gpu", "other", 0, -1, 1.000, 1.001),
    Event("link", "read activations", 0, -1, 1.001, 1.0011, 8),
    Event("unit 10", "expert", 0, 3, 1.0011, 1.004),
    Event("unit 2", "expert", 0, 3, 1.0011, 1.004),
    Event("link", "read weights", 0, 5, 1.0011, 1.003, 99),
    Event("gpu", "expert", 0, 5, 1.003, 1.0035),
]
LATER = [event._replace(start=event.start + 7, end=event.end + 7.002) for event in LAYER]
PANELS = {
    "Qwen3": {
        "+TP": {"1": None, "2": (1.5, 1.4, 1.7)},
        "+TP+LB": {"1": None, "2": (1.8, 1.8, 1.8)},
    },
    "all": {"+TP": {"mean": (1.2, 1.0, 1.3)}, "+TP+LB": {"mean": (1.4, 1.2, 1.5)}},
}
ERRORS = {
    "fit": {"a": (0.05, 0.04, 0.06)},
    "judge": {"b": (-0.2, -0.25, -0.1), "c": (0.0, 0.0, 0.0)},
}
SPACE = {
    "Qwen3": {"DDR4": [(1, np.nan), (2, 30.0), (4, 15.0)]},
    "Phi": {"DDR4": [(4, 9.0)], "HBM": [(4, 2.0)]},
}
SIDES = {"Eq. 1": {"GPU": ([0, 1, 2], [0.001, np.nan, 0.003]), "modules": ([0, 2], [0.004, 0.0])}}
MADE = Lazily(
    {
        "bars": lambda: figures.bars(
            PANELS,
            "speedup (×)",
            "N",
            paper={"all": {"+TP": {"mean": [1.26]}, "+TP+LB": {"mean": (1.4, 1.6)}}},
            line=(1, "MoNDE"),
        ),
        "percent": lambda: figures.bars(
            {"": {"free": {"code": (0.2, 0.1, 0.4)}, "known": {"code": (0.1, 0.1, 0.1)}}},
            "used (%)",
            percent=True,
            line=(0.125, "chance"),
        ),
        "schedules": lambda: gantt({"MoNDE": LAYER, "+TP": LATER}),
        "balance": lambda: figures.balance(
            SIDES, {"Eq. 1": {"balanced": (1.2, 0.0016), "whole": (1, 0.002)}}
        ),
        "agreement": lambda: figures.agreement(ERRORS, {"b": (-0.3, 0.05)}),
        "lines": lambda: figures.lines(SPACE, "step (ms)", "units N", log="xy", at=3),
    }
)


def named(figure, name):
    return [trace for trace in figure.data if trace.name == name]


def test_bars_have_whiskers_and_stand_where_their_paper_is():
    (bar,) = [trace for trace in named(MADE["bars"], "+TP") if list(trace.x) == ["2"]]
    assert list(bar.y) == [1.5]
    np.testing.assert_allclose([bar.error_y.arrayminus[0], bar.error_y.array[0]], [0.1, 0.2])
    paper, span = named(MADE["bars"], "the paper")
    assert list(span.y[:2]) == [1.4, 1.6] and np.isnan(span.y[2]) and list(span.x) == ["mean"] * 3
    (mean,) = [trace for trace in named(MADE["bars"], "+TP") if list(trace.x) == ["mean"]]
    assert (
        paper.y[0] == 1.26 and paper.offsetgroup == mean.offsetgroup and paper.xaxis == mean.xaxis
    )
    assert "MoNDE" in MADE["bars"].layout.legend.title.text


def test_what_is_not_supported_says_so():
    texts = [
        (trace.text, list(trace.x))
        for trace in MADE["bars"].data
        if trace.type == "scatter" and trace.mode == "text"
    ]
    assert texts == [("N.S.", ["1"])]


def test_shares_are_drawn_in_per_cent():
    (bar,) = named(MADE["percent"], "free")
    assert list(bar.y) == [20]
    np.testing.assert_allclose([bar.error_y.arrayminus[0], bar.error_y.array[0]], [10, 20])
    assert MADE["percent"].layout.shapes[0].y0 == 12.5


def test_balance_draws_milliseconds_and_marks_the_solution():
    (gpu,) = named(MADE["balance"], "GPU")
    np.testing.assert_allclose(gpu.y, [1, np.nan, 3])
    (mark,) = named(MADE["balance"], "balanced")
    np.testing.assert_allclose([mark.x[0], mark.y[0]], [1.2, 1.6])


def test_a_sweep_is_drawn_by_number_of_units():
    from moelab.ndp.sweep import MODELS, over_seeds, paper_sweep

    ours = "NDP+TP+LB+PRE"
    sweep = paper_sweep(units=(2, 6), seeds=(0, 1), prompt=16, answer=4)
    means = over_seeds(sweep)
    figure = figures.speedups(
        sweep, {"+TP": "NDP+TP"}, "MoNDE", "moe_decode", means=means, columns=3
    )
    value, low, high = sweep.gain(MODELS[0], 6, "NDP+TP", "MoNDE", "moe_decode")
    bar = figure.data[0]
    assert bar.x == ("2", "6") and bar.y[1] == pytest.approx(value)
    assert (bar.error_y.array[1], bar.error_y.arrayminus[1]) == pytest.approx(
        (high - value, value - low)
    )
    assert [note.text for note in figure.layout.annotations][-1] == "all"
    diamonds = [trace for trace in figure.data if trace.name == "the paper"]
    assert [trace.y[0] for trace in diamonds] == [1.99]
    assert (
        sum(trace.name == "not supported" for trace in figure.data) == 2
    )  # Phi and Mixtral on two modules
    figure = figures.by_phase(
        sweep, MODELS[1], "ours", ours, {p: means[f"Qwen3 {p}"] for p in ("prefill", "decode")}
    )
    assert figure.data[0].x == ("2", "6", "mean") and figure.data[0].y[2] == pytest.approx(
        means["Qwen3 prefill"][0]
    )
    figure = figures.additions(sweep, {"+LB": "NDP+TP+LB"}, "NDP+TP")
    assert list(figure.data[2].x) == [6]
    figure = figures.improvements(sweep, ("NDP+TP", ours), {"decode": "moe_decode"})
    assert len(figure.data) == 4 + 1  # a bar a model, and one N.S.
    figure = figures.machines({MODELS[0]: {"a": {1: 0.001, 2: 0.002}}})
    assert figure.data[0].y == pytest.approx((1, 2))
