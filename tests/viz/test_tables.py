"""Tables show what they are given: every row once, figures in the units of their heads, and no
empty head but one."""

import math

import numpy as np
import pytest

pytest.importorskip("plotly")

from moelab import claims
from moelab.ane.device import comparison
from moelab.ane.device.comparison import Setting, fastest, settings
from moelab.ane.device.device_model import DeviceModel
from moelab.ane.device.published import TABLE_3, TABLE_5, inconsistencies
from moelab.ane.plan import count
from moelab.ane.popularity import assumed_loads
from moelab.ane.systems import ABLATION, OPERATORS, SYSTEMS
from moelab.bench import ane, neuron_examples, parallel, static
from moelab.bench.ane_accuracy import Answers
from moelab.bench.experts import ExpertTimes
from moelab.experts.executor import Tally
from moelab.ndp import conditions
from moelab.ndp.fit import CHOICES, CLAIMS, FIT, JUDGED
from moelab.ndp.readings import Readings
from moelab.ndp.sweep import MODELS, Assumptions
from moelab.table import head_and_rows, markdown_table
from moelab.viz.story import ane_figures, ane_tables, ndp_tables, static_figures, static_tables


def row(rows, head, value):
    return next(one for one in rows if one[head] == value)


def shown(rows, n):
    """The Markdown of rows, of which there are n."""
    rows = list(rows)
    assert len(rows) == n
    text = markdown_table(*head_and_rows(rows))
    assert len({line.count("|") for line in text.splitlines()}) == 1, "a cell holds a bar"
    return rows


@pytest.fixture(scope="module")
def costs():
    answer = {
        "score": 0.5,
        "error": 0.1,
        "difference": -0.02,
        "difference error": 0.01,
        "interval": [-0.04, 0.0],
    }
    loss = {"score": 2.0, "error": 0.1, "relative": 3.0, "relative error": 0.5, "n": 6}
    scores = {
        "loss": {"nothing dropped": loss, "1": loss, "2": loss},
        "needle": {"nothing dropped": answer, "1": answer, "2": answer},
    }
    return static.DropCosts(
        scores,
        {"loss": {"1": [1.0, 2.0], "2": [1.0, 2.5], "random": [1.5, 2.0]}},
        {"1": {"loss": Tally(10, 8, 16)}, "2": {"loss": Tally(10, 10, 40)}},
    )


def test_of_static_shapes(costs):
    assert shown(static_tables.block_map(neuron_examples.six_tokens()), 3)[0] == {
        "block": "0",
        "expert": "E0",
        "slots": "T0 T2 T5 –",
        "real": "3",
        "padding": "1",
    }
    ids = static.routing(16, 4, 2)[:, None]
    of = shown(static_tables.blocks(static.count_blocks(ids, 4, (8,))), 1)[0]
    assert of["B"] == "8" and of["padding: filled blocks"].endswith(" %")
    shown(static_tables.block_sizes(neuron_examples.block_sizes()), 10)
    rows = shown(static_tables.capacity(costs), 3 + len(TABLE_3))
    assert (rows[1]["dropped"], rows[1]["padding"]) == ("20.0 %", "50.0 %")
    assert [of["needle, points (95 %)"] for of in rows[:2]] == [
        "50.0 % right",
        "-2.0 (-4.0 to +0.0)",
    ]
    assert rows[4]["accuracy in the paper, fp16 → NPUMoE"] == "88.57 → 87.62 %"  # HellaSwag's
    assert (
        row(shown(static_tables.orders(costs), 2), "dropped first", "2")["against random, nats"]
        == "+0.0000"
    )
    assert static_tables.caption(static.block_paddings(16, 4, 2)[8], 16, 4, 2, 0).startswith(
        "B = 8, 16 tokens, Zipf 0:"
    )
    times = ExpertTimes({"transformers eager": [0.004], "gemv": [0.002]}, 0, 1e6, 1e9, 1e9)
    assert shown(static_tables.executors({"decode": times}), 1)[0] == {
        "phase": "decode",
        "best of transformers, ms": "4.00 (eager)",
        "best here, ms": "2.00 (gemv)",
        "times as fast": "2.00",
        "share of the roofline that it reaches": "50 %",
    }
    raced = {1: {"selective": [0.001, 0.003], "all_experts": [0.004]}}
    assert shown(static_tables.loading(raced, {1: 2.0}, 8, 2), 1)[0]["selective, ms"] == "2.00"
    shown(static_tables.zipf(parallel.eplb(0)), 4)
    shown(
        static_tables.parallel_ways(neuron_examples.parallel_ways()), len(neuron_examples.PARALLEL)
    )


def test_figures_of_costs(costs):
    figure = static_figures.capacity(costs)
    dropped = next(trace for trace in figure.data if trace.name == "dropped")
    np.testing.assert_allclose([dropped.x, dropped.y], [[1, 2], [20, 0]])
    figure = static_figures.drop_orders(costs)
    assert {trace.name for trace in figure.data} == {"language loss", "needle"}
    figure = static_figures.block_sizes(static.block_paddings(16, 4, 2))
    assert [trace.name for trace in figure.data] == ["filled blocks", "all N blocks"]
    ran = {
        name: static.Ran(Tally(4, 4, 8), [Tally(4, 3, 4)], 0.0, 1.0)
        for name in ("tiers, prune", "tiers, pad")
    }
    names = [
        trace.name
        for trace in static_figures.plans(ran | {"tiers, literal B/E": ran["tiers, pad"]}, {}).data
    ]
    assert names == ["tiers, prune", "tiers, prune", "tiers, pad"]


def test_of_the_neural_engine():
    plan, _ = ane.plan_card("Phi-tiny-MoE")
    account = count(plan, assumed_loads(plan.spec, 256, 4))
    shown(ane_tables.operators(OPERATORS), len(OPERATORS))
    rows = shown(ane_tables.plans({"plan": plan}, 0.8, {"plan": (account, account)}), 1)
    assert rows[0]["plan"].startswith("the same, slack 0.8:")
    assert rows[0]["dropped: calibration"] == f"{account.drop_rate:.1%}" == rows[0]["test"]
    rows = shown(ane_tables.cards({"Phi-tiny-MoE": plan}), 1)
    assert rows[0]["L × E, top-K"] == f"{plan.spec.L} × {plan.spec.E}, {plan.spec.K}"
    device = DeviceModel.of()
    shown(ane_tables.parameters(device), 4)
    rows = shown(ane_tables.slots(comparison.slot_grid(device)), 5)
    sample = next(s for s in TABLE_5 if (s.G, s.C, s.mode) == (8, 32, "serial"))
    assert row(rows, "ms a slot, serial: modelled (Table 5)", "G = 8")["C = 32"].endswith(
        f"({sample.ms:.2f})"
    )
    shown(ane_tables.contradictions(inconsistencies()), 9)
    found = settings("Phi-tiny-MoE", levels=(3,), slacks=(1.0,), groups=(8,), chunks=(256,))
    best = fastest(found, 1.0)
    shown(ane_tables.settings(found, best), 2)
    assert "out-of-sample error" in ane_tables.caption("Phi", Setting(), found[Setting()], device)
    stars = [
        trace for trace in ane_figures.around(found, Setting()).data if trace.name == str(Setting())
    ]
    assert [trace.marker.symbol for trace in stars] == ["star", "star"]


def test_of_systems():
    found = comparison.studies()
    phi = found["Phi-3.5-MoE"]
    first = phi[comparison.RUNS[0]]
    shown(ane_tables.systems(phi), 8)
    rows = shown(ane_tables.ablation(first), len(ABLATION))
    assert (
        row(rows, f"ablation, {ane_tables.label(comparison.RUNS[0])}", SYSTEMS["base+TG"].title)[
            "energy over Ours-TG, modelled"
        ]
        == "1.00"
    )
    values = comparison.figures(found, DeviceModel.of())
    metrics = {
        name: {"value": value, "kind": "modelled", "readings": {"wrong": 1e6}}
        for name, (value, _) in values.items()
    }
    asked = [
        of for of in claims.ledger() if set(of.metric[1:]) & values.keys() and not of.contradicted
    ]
    answered = claims.rows(asked, own={asked[0].metric[0]: metrics})
    lost = [of for of in answered if of.lost]
    rows = shown(
        ane_tables.sensitivity(answered),
        len(lost) + sum(of.verdict == claims.DIRECTION for of in answered),
    )
    assert sum(one["wrong"].endswith("✗") for one in rows) == len(lost) > 20
    figure = ane_figures.misses(answered)
    assert sum(len(trace.x) for trace in figure.data) == sum(
        isinstance(of.value, float) for of in asked
    )
    bars = {trace.name: trace for trace in ane_figures.systems(phi, "ttft", "TTFT (×)").data}
    assert bars[SYSTEMS["cpu"].title].y[0] == pytest.approx(comparison.ratio(first, "ttft", "cpu"))
    assert len(ane_figures.time_and_energy(found, comparison.RUNS[0]).layout.annotations) == 3
    sums = ane_figures.parts(first).data[-1]
    assert sums.x == pytest.approx([p.ttft_s for p in first.values()])


def test_of_drops():
    counted = type("Counted", (), {"drop_rate": 0.1, "padded_fraction": 0.3})()
    dense = {"score": 0.9, "error": 0.01, "n": 10}
    pruned = dense | {"difference": -0.1, "interval": [-0.2, 0.0], "lost": 1, "gained": 0}
    rows = shown(
        ane_tables.answers(Answers({"needle": dense}, {"needle": pruned}, {"needle": counted})),
        1 + len(TABLE_3),
    )
    assert rows[0]["difference, points"] == "-10.0" and rows[0]["dropped"] == "10.0%"


def test_of_ndp():
    from moelab.cards import load_model
    from moelab.ndp.costs import Costs

    assumed = Assumptions()
    costs = {name: Costs(load_model(name), assumed.hardware(6)) for name in MODELS}
    assert [
        one["modules needed (exact)"] for one in shown(ndp_tables.costs(costs, assumed), 4)
    ] == [1, 2, 3, 3]
    rows = shown(ndp_tables.answers(conditions.answers(units=(1, 6))), 4)
    assert rows[3]["E_g of Eq. 1, N = 1"] == "N.S." and "→" in rows[0]["E_g of Eq. 1, N = 1"]
    found = dict.fromkeys((*FIT, *JUDGED), (9.0, 8.0, 10.0))
    combined = Readings(
        {name: options[:1] for name, options in CHOICES.items()},
        {name: np.full([1] * len(CHOICES), 2.0) for name in found},
    )
    rows = shown(ndp_tables.published(found, combined), len(FIT) + len(JUDGED))
    told = row(rows, "published figure", "Qwen3 decode")
    assert (told["no simulator"], told["it agrees"], told["all that fit"]) == (
        "2.45",
        "**no**",
        "–",
    )
    rows = shown(
        ndp_tables.misses(found, {"Qwen3 prefill": "Seen."}, "unknown"), len(FIT) + len(JUDGED)
    )
    told = row(rows, "miss", CLAIMS["Qwen3 prefill"].text)
    assert told["likely reason"].endswith("Seen.") and rows[0]["likely reason"] == "unknown"
    rows = shown(ndp_tables.end_to_end({"MoNDE": {(MODELS[0], 2): 1.0, (MODELS[1], 3): 3.0}}), 1)
    assert (rows[0]["mean of all cells"], rows[0]["where"]) == ("2.00×", "Qwen3-30B-A3B, N = 3")
    rows = shown(ndp_tables.space({MODELS[0]: {"a": {6: math.nan}, "b": {6: 0.002}}}, 6), 1)
    assert rows[0]["a"] == "N.S." and rows[0]["b"] == "2.0 ms"
    steps = {"MoNDE": {"seconds": 0.001, "gpu": 0.5, "link": 0.0, "modules": 0.25, "least": 0.1}}
    assert shown(ndp_tables.steps(steps), 1)[0]["modules busy, mean"] == "25%"
