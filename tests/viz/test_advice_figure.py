"""The figure of an advice draws every way where it is, says each one's kind, and its line is what
nothing beats."""

import sys
from dataclasses import replace

import numpy as np
import pytest

pio = pytest.importorskip("plotly.io")

from moelab import advise
from moelab.base.table import duration, size
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


def markers(figure):
    """Of all ways, without the ring of what is advised."""
    data = pio.from_json(figure.to_json()).data
    return [of for of in data if of.mode == "markers" and of.name != "advised"]


def test_every_way_is_drawn_in_ms_and_gb_with_its_kind(advice):
    points = markers(pareto(advice))
    ways = (*advice.ways, *advice.elsewhere)
    drawn = sorted((x, y) for trace in points for x, y in zip(trace.x, trace.y))
    assert np.allclose(drawn, sorted((way.memory / 1e9, 1e3 * way.tpot) for way in ways))
    assert {of.name for of in points} == {f"{of.form}, {of.loses}, {of.kind}" for of in ways}
    assert len({of.marker.symbol for of in points}) == len({way.form for way in ways})
    said = sorted(f"{way.name}, {size(way.memory)}: {duration(way.tpot)}" for way in ways)
    assert sorted(text for trace in points for text in trace.text) == said


def test_a_small_model_is_in_mb(advice):
    ways = tuple(replace(way, memory=way.memory // 100) for way in advice.ways)
    figure = pio.from_json(pareto(replace(advice, ways=ways, elsewhere=())).to_json())
    assert figure.layout.xaxis.title.text == "memory of the process (MB)"
    assert {x for of in markers(figure) for x in of.x} == {way.memory / 1e6 for way in ways}


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
    assert advice.best.name in said[1][3] and len(said[2][1]) == len(advice.table())


def test_without_plotly_it_is_text(advice, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "moelab.viz.advice_figure", None)
    DrawnAdvice(**vars(advice))._ipython_display_()
    assert capsys.readouterr().out == f"{advice}\n"
