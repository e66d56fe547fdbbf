"""Figures of planning draw the numbers they are given, and never tell series apart by colour alone."""

import pytest

pio = pytest.importorskip("plotly.io")

from moelab.ane.plan import make_plan  # noqa: E402
from moelab.ane.published import TABLE_5  # noqa: E402
from moelab.ane.rates import fit  # noqa: E402
from moelab.ane.skew import assumed_counts  # noqa: E402
from moelab.specs import MoESpec  # noqa: E402
from moelab.viz import ane_figures as figures  # noqa: E402

SPEC = MoESpec.from_card("Phi-3.5-MoE")
PLAN = make_plan(SPEC, *assumed_counts(SPEC))
RUNS = {"P=1024": {"cpu": 1.8, "naive": 5.5}, "P=4096": {"cpu": 1.6, "naive": 3.4}}
MADE = {
    "tiers": figures.tiers(PLAN), "residency": figures.residency(PLAN),
    "ratios": figures.ratios(RUNS, {"P=4096": {"naive": (3.0, 4.0)}}, "TTFT over ours (modelled)"),
    "sweep": figures.sweep(fit(), TABLE_5),
    "graph_weights": figures.graph_weights({"Phi": {1: 0.16, 8: 1.26}, "Qwen": {1: 0.009, 8: 0.075}}, 1.258),
}


@pytest.mark.parametrize("name", MADE)
def test_axes_have_titles_and_survive_json(name):
    figure = pio.from_json(MADE[name].to_json())
    assert figure.layout.xaxis.title.text and figure.layout.yaxis.title.text
    assert len(figure.data) == len(MADE[name].data) > 1


@pytest.mark.parametrize("name, look", [
    ("tiers", lambda trace: trace.line.dash), ("graph_weights", lambda trace: trace.line.dash),
    ("residency", lambda trace: (trace.marker.pattern.shape, trace.marker.color)),
    ("ratios", lambda trace: trace.type == "bar" and trace.marker.pattern.shape)])
def test_no_two_series_differ_by_colour_alone(name, look):
    looks = [look(trace) for trace in MADE[name].data]
    assert len(set(looks)) == len(looks)


def test_tiers_are_the_plans_with_the_mean_load():
    for trace, level in zip(MADE["tiers"].data, range(3)):
        assert list(trace.y) == [dict(enumerate(layer.tiers.levels)).get(level) for layer in PLAN.layers]
    assert MADE["tiers"].layout.shapes[0].y0 == 256 * 2 / 16


def test_the_residency_map_covers_every_expert_once_and_says_where():
    covered = {}
    for trace in MADE["residency"].data:
        for layer, start, width, (experts, _) in zip(trace.y, trace.base, trace.x, trace.customdata):
            assert width == len(experts.split(", "))
            covered.setdefault(layer, []).append((start, start + width))
            unit = {group.experts: group.unit for group in PLAN.layers[layer].groups}
            assert unit[tuple(map(int, experts.split(", ")))] == ("cpu" if trace.name == "CPU" else "ane")
    assert sorted(covered) == list(range(32))
    for spans in covered.values():
        spans.sort()
        assert spans[0][0] == 0 and spans[-1][1] == 16 and all(a[1] == b[0] for a, b in zip(spans, spans[1:]))


def test_ratios_stand_under_their_run_and_the_papers_range_on_its_bar():
    cpu, naive, paper = MADE["ratios"].data
    assert list(cpu.y) == [1.8, 1.6] and list(naive.y) == [5.5, 3.4]
    assert list(paper.y) == [3.0, 4.0, None] and set(paper.x[:2]) == {naive.x[1]} and "paper" in paper.name
    assert [round(x) for x in naive.x] == [0, 1] and list(MADE["ratios"].layout.xaxis.ticktext) == list(RUNS)


def test_the_sweep_is_the_fit_through_table_5():
    lines = {trace.name: trace for trace in MADE["sweep"].data}
    timed = lines["G=8, timed"]
    assert dict(zip(timed.x, timed.y)) == {s.C: s.ms for s in TABLE_5 if s.G == 8 and s.mode == "serial"}
    fitted = dict(zip(lines["G=8, fitted"].x, lines["G=8, fitted"].y))
    assert all(abs(fitted[C] / ms - 1) < 0.08 for C, ms in zip(timed.x, timed.y))


def test_the_limit_is_a_line():
    limit = MADE["graph_weights"].data[-1]
    assert set(limit.y) == {1.258} and list(limit.x) == [1, 8] and "limit" in limit.name
    assert list(MADE["graph_weights"].data[0].y) == [0.16, 1.26]
