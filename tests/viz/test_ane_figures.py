"""Figures of planning draw the numbers they are given, and never tell series apart by colour
alone."""

from types import SimpleNamespace

import pytest

pio = pytest.importorskip("plotly.io")

from moelab.ane.device.comparison import MACHINES, Setting
from moelab.ane.device.published import TABLE_5
from moelab.ane.device.rates import fit
from moelab.ane.plan import make_plan
from moelab.ane.popularity import assumed_counts
from moelab.ane.systems import SYSTEMS, TABLE_2
from moelab.cards import load_model
from moelab.claims import FITTED, NOT_REPRODUCED, REPRODUCED, Claim, Row
from moelab.viz.story import ane_figures as figures
from tests.viz.lazily import Lazily

SPEC = load_model("Phi-3.5-MoE")
PLAN = make_plan(SPEC, *assumed_counts(SPEC))
CHOSEN = Setting(levels=1)


def prefill(attention, experts):
    """The milliseconds of a prefill that `parts` draws."""
    return SimpleNamespace(
        attention=SimpleNamespace(ms=attention),
        experts=SimpleNamespace(ms=experts),
        dispatch_ms=0,
        host=SimpleNamespace(ms=0),
    )


MADE = Lazily(
    {
        "placement": lambda: figures.placement(PLAN),
        "sweep": lambda: figures.sweep(fit(), TABLE_5),
        "graph_weights": lambda: figures.graph_weights(
            {"Phi": {1: 0.16, 8: 1.26}, "Qwen": {1: 0.009, 8: 0.075}}, 1.258
        ),
        "parity": lambda: figures.parity({"double": [1e-6, 2e-6], "fp16": [1e-3, 2e-3]}, 0.01),
        "dropping": lambda: figures.dropping(
            {"weakest": [(0.3, 2.0, 0.1), (0.1, 0.5, 0.1)], "random": [(0.1, 1.0, 0.2)]}, "%"
        ),
        "parts": lambda: figures.parts({"anemll": prefill(1000, 3000), "npumoe": prefill(1500, 0)}),
        "time_and_energy": lambda: figures.time_and_energy(
            {
                model: {
                    (1024, 256): dict.fromkeys(
                        TABLE_2, SimpleNamespace(ttft_s=3.0, mj_per_token=9.0)
                    )
                }
                for model in MACHINES
            },
            (1024, 256),
        ),
        "misses": lambda: figures.misses(
            [
                Row(
                    Claim("s", "S", text, "§1", text, "h", "m", value=value, metric=("n", metric)),
                    ours,
                    None,
                    "modelled",
                    verdict,
                )
                for text, value, metric, ours, verdict in (
                    ("near", 2.0, "phi_ttft_cpu", 2.2, REPRODUCED),
                    ("far", 2.0, "phi_ttft_cpu", 1.4, NOT_REPRODUCED),
                    ("fitted", 2.0, "watts", 2.0, FITTED),
                    ("a word", "no", "ttft", "no", REPRODUCED),
                )
            ]
        ),
        "around": lambda: figures.around(
            {
                Setting(): SimpleNamespace(point=(0.1, 0.3, 5.0, 70.0)),
                CHOSEN: SimpleNamespace(point=(0.2, 0.2, 4.0, 60.0)),
                Setting(chunk=512): None,
            },
            CHOSEN,
        ),
    }
)
NO_Y_TITLE = ("parts", "misses")  # rows that are named


@pytest.mark.parametrize("name", MADE)
def test_axes_have_titles_and_survive_json(name):
    figure = pio.from_json(MADE[name].to_json())
    assert figure.layout.xaxis.title.text and (figure.layout.yaxis.title.text or name in NO_Y_TITLE)
    assert len(figure.data) == len(MADE[name].data) > 1


@pytest.mark.parametrize(
    "name, look",
    [
        ("graph_weights", lambda trace: trace.line.dash),
        ("parity", lambda trace: trace.marker.symbol),
        ("dropping", lambda trace: trace.line.dash),
        ("misses", lambda trace: trace.marker.symbol),
        ("parts", lambda trace: trace.type == "bar" and trace.marker.pattern.shape),
        ("placement", lambda trace: (trace.marker.pattern.shape, trace.marker.color)),
    ],
)
def test_no_two_series_differ_by_colour_alone(name, look):
    looks = [look(trace) for trace in MADE[name].data]
    assert len(set(looks)) == len(looks)


def test_the_placement_covers_every_expert_once_and_says_where():
    covered = {}
    for trace in MADE["placement"].data:
        for layer, start, width, (experts, _) in zip(
            trace.y, trace.base, trace.x, trace.customdata
        ):
            assert width == len(experts.split(", "))
            covered.setdefault(layer, []).append((start, start + width))
            unit = {group.experts: group.unit for group in PLAN.layers[layer].groups}
            assert unit[tuple(map(int, experts.split(", ")))] == (
                "cpu" if trace.name == "CPU" else "ane"
            )
    assert sorted(covered) == list(range(32))
    for spans in covered.values():
        spans.sort()
        assert (
            spans[0][0] == 0
            and spans[-1][1] == 16
            and all(a[1] == b[0] for a, b in zip(spans, spans[1:]))
        )


def test_the_sweep_is_the_fit_through_table_5():
    lines = {trace.name: trace for trace in MADE["sweep"].data}
    timed = lines["G=8, timed"]
    assert dict(zip(timed.x, timed.y)) == {
        s.C: s.ms for s in TABLE_5 if s.G == 8 and s.mode == "serial"
    }
    fitted = dict(zip(lines["G=8, fitted"].x, lines["G=8, fitted"].y))
    assert all(abs(fitted[C] / ms - 1) < 0.08 for C, ms in zip(timed.x, timed.y))


def test_the_limit_is_a_line():
    limit = MADE["graph_weights"].data[-1]
    assert set(limit.y) == {1.258} and list(limit.x) == [1, 8] and "limit" in limit.name
    assert list(MADE["graph_weights"].data[0].y) == [0.16, 1.26]


def test_dropping_runs_from_little_to_much():
    weakest, rand = MADE["dropping"].data
    assert (
        list(weakest.x) == [10, 30]
        and list(weakest.y) == [0.5, 2.0]
        and list(rand.error_y.array) == pytest.approx([0.2])
    )


def test_a_breakdown_tells_the_sums():
    *parts, sums = MADE["parts"].data
    assert [list(part.x) for part in parts] == [[1.0, 1.5], [3.0, 0.0], [0, 0], [0, 0]]
    assert list(sums.x) == [4.0, 1.5] and sums.text[0].strip() == "4.0 s"


def test_systems_look_the_same_in_every_panel():
    looks = {}
    for trace in MADE["time_and_energy"].data:
        looks.setdefault(trace.name, set()).add((trace.marker.symbol, trace.marker.color))
    assert set(looks) == {SYSTEMS[system].title for system in TABLE_2} and all(
        len(of) == 1 for of in looks.values()
    )
    assert len(set.union(*looks.values())) == len(TABLE_2)


def test_misses_are_what_is_not_reproduced():
    near, far, fitted = (
        {text: round(x) for text, x in zip(trace.text, trace.x)} for trace in MADE["misses"].data
    )
    assert (near, far, fitted) == ({"near": 10}, {"far": -30}, {"fitted": 0})
    assert [round(trace.y[0]) for trace in MADE["misses"].data] == [0, 0, 3]


def test_the_chosen_setting_is_marked_in_both_panels():
    everything, left, _, right = MADE["around"].data
    assert (list(left.x), list(left.y)) == ([20], [20]) and (list(right.x), list(right.y)) == (
        [4],
        [60],
    )
    assert len(everything.x) == 2 and left.marker.symbol != everything.marker.symbol
