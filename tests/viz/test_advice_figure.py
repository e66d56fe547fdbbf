"""The figure of an advice draws every way where it is, says each one's kind, and its line is what
nothing beats."""

import sys
from dataclasses import replace

import numpy as np
import pytest

pio = pytest.importorskip("plotly.io")

from moelab import advise
from moelab.table import duration, size
from moelab.viz.advice import DrawnAdvice
from moelab.viz.advice_figure import pareto


@pytest.fixture(scope="module")
def advice():
    found = advise("Phi-tiny-MoE", "6GB", device="m2-max", loss="any")
    few = replace(found.ways[0], loss=0.005, kind="measured")
    less = [
        replace(way, memory=way.memory // 2, tpot=2 * way.tpot, kind="simulated")
        for way in found.ways
        if way.lossless
    ]
    return replace(found, ways=(few, *found.ways[1:]), elsewhere=tuple(less))


def test_every_way_is_drawn_in_ms_and_gb_with_its_kind(advice):
    figure = pio.from_json(pareto(advice).to_json())
    points = [trace for trace in figure.data if trace.mode == "markers" and trace.name != "advised"]
    left = [trace for trace in points if trace.xaxis == "x"]
    drawn = sorted((x, y) for trace in left for x, y in zip(trace.x, trace.y))
    ways = (*advice.ways, *advice.elsewhere)
    assert np.allclose(drawn, sorted((way.memory / 1e9, 1e3 * way.tpot) for way in ways))
    few = advice.ways[0]
    assert {trace.name for trace in left} == {
        f"{way.form}, {way.loses}, {way.kind}" for way in ways
    }
    assert {trace.marker.symbol for trace in left} == {trace.marker.symbol for trace in points}
    assert len({trace.marker.symbol for trace in left}) == len({way.form for way in ways})
    titles = [axis.title.text for axis in figure.select_xaxes()] + [
        axis.title.text for axis in figure.select_yaxes()
    ]
    assert "memory of the process (GB)" in titles and all("(" in title for title in titles if title)
    name = f"{few.form}, 0.50 % more loss, measured"
    assert [trace.x for trace in points if trace.name == name and trace.xaxis == "x2"] == [(0.5,)]
    told = [text for trace in left for text in trace.text]
    assert sorted(told) == sorted(
        f"{way.name}, {size(way.memory)}: {duration(way.tpot)}" for way in ways
    )


@pytest.mark.parametrize("kind", ["modelled", "measured"])
@pytest.mark.parametrize("pair", [("int8", "fp8"), ("int4", "mxfp4")])
def test_forms_that_lie_on_each_other_are_both_seen(advice, pair, kind):
    ways = tuple(replace(advice.ways[0], form=form, kind=kind) for form in pair)
    under, above, ring = (
        trace.marker
        for trace in pio.from_json(pareto(replace(advice, ways=ways, elsewhere=())).to_json()).data
        if trace.mode == "markers" and trace.xaxis == "x"
    )
    assert (
        under.symbol.endswith("-open")
        and not above.symbol.endswith("-open")
        and under.color != above.color
    )
    assert above.size < under.size < ring.size


def test_one_kind_is_told_by_the_axis_and_a_small_model_in_mb(advice):
    ways = tuple(replace(way, kind="modelled", memory=way.memory // 100) for way in advice.ways)
    figure = pio.from_json(pareto(replace(advice, ways=ways, elsewhere=())).to_json())
    assert "modelled TPOT (ms, log)" in [axis.title.text for axis in figure.select_yaxes()]
    assert "memory of the process (MB)" in [axis.title.text for axis in figure.select_xaxes()]
    assert {
        x
        for trace in figure.data
        if trace.mode == "markers" and trace.xaxis == "x"
        for x in trace.x
    } == {way.memory / 1e6 for way in ways}


def test_the_line_falls_and_nothing_lossless_is_below_it(advice):
    line = next(trace for trace in pareto(advice).data if trace.mode == "lines")
    points = list(zip(line.x, line.y))
    assert points == sorted(points) and list(line.y) == sorted(line.y, reverse=True)
    for way in (*advice.ways, *advice.elsewhere):
        assert (
            not way.lossless or min(y for x, y in points if x <= way.memory / 1e9) <= 1e3 * way.tpot
        )


def test_it_draws_itself_in_a_notebook(advice, monkeypatch):
    said = []
    for name in ("say", "table", "show"):
        monkeypatch.setattr(
            f"moelab.viz.advice_figure.{name}", lambda *of, name=name: said.append((name, *of))
        )
    DrawnAdvice(**vars(advice))._ipython_display_()
    assert [name for name, *_ in said] == ["say", "show", "table", "say"]
    assert (
        all(line.strip() in said[0][1] for line in advice.words.split("\n"))
        and advice.best.name in said[1][3]
    )
    for shown, row in zip(
        said[2][1], advice.table(), strict=True
    ):  # what all rows share is told below
        there = {name.partition(",")[0] for name in shown}
        assert all(
            row[name] == "–" or f"{name.partition(',')[0]} " in said[3][1]
            for name in row
            if name.partition(",")[0] not in there
        )
        assert float(shown["memory, GB"]) == pytest.approx(row["memory, B"] / 1e9, rel=5e-3)


def test_without_plotly_it_is_text(advice, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "moelab.viz.advice_figure", None)
    DrawnAdvice(**vars(advice))._ipython_display_()
    assert capsys.readouterr().out == f"{advice}\n"
