"""Figures of planning draw the numbers they are given, and never tell series apart by colour
alone."""

from types import SimpleNamespace

import pytest

pytest.importorskip("plotly.io")

from moelab.ane.device.comparison import MACHINES, Setting
from moelab.ane.device.published import TABLE_5
from moelab.ane.device.rates import fit
from moelab.ane.plan import make_plan
from moelab.ane.popularity import assumed_counts
from moelab.ane.systems import TABLE_2
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


def test_a_breakdown_tells_the_sums():
    *parts, sums = MADE["parts"].data
    assert [list(part.x) for part in parts] == [[1.0, 1.5], [3.0, 0.0], [0, 0], [0, 0]]
    assert list(sums.x) == [4.0, 1.5] and sums.text[0].strip() == "4.0 s"


def test_misses_are_what_is_not_reproduced():
    near, far, fitted = (
        {text: round(x) for text, x in zip(trace.text, trace.x)} for trace in MADE["misses"].data
    )
    assert (near, far, fitted) == ({"near": 10}, {"far": -30}, {"fitted": 0})
    assert [round(trace.y[0]) for trace in MADE["misses"].data] == [0, 0, 3]
