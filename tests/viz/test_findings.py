"""The findings' pictures show the numbers that lie in results/; README shows every picture, and all
are small."""

import re
from pathlib import Path

import pytest

pytest.importorskip("plotly")

from moelab.files import read_json, results_root
from moelab.viz import findings, theme

ROOT = Path(__file__).parents[2]
RESULTS = results_root(ROOT / "results")
RECALLS = {
    "residual, 4,000 tokens": (0.7, 0.6, 0.8),
    "appendix-a, 4,000 tokens": (0.3, 0.2, 0.4),
    "residual, 16,000 tokens": (0.75, 0.7, 0.8),
    "appendix-a, 16,000 tokens": (0.6, 0.5, 0.7),
    "next router on s": (0.6, 0.5, 0.7),
    "next router on q": (0.65, 0.6, 0.7),
}
MISSES = {"belady": 0.5, "next-token": 0.8, "lfu, layer by layer": 0.9, "lrfu": 0.95, "lru": 1.0}
PREDICTION = {
    f"{model} (L 2): {about}": rows
    for model in ("small", "wide")
    for about, rows in {
        "its router (measured)": {"parameters": 9.0},
        "recall one layer ahead, chance 0.1 (measured)": {
            name: dict(zip(("recall", "from", "to"), of)) for name, of in RECALLS.items()
        },
        "recall of our estimator (measured)": {},
        **{
            f"evictions, {share}% of the experts (exact counts)": {
                name: {"misses ÷ lru": of - share / 1000, "from": of - 0.1, "to": of + 0.1}
                for name, of in MISSES.items()
            }
            for share in (25, 50)
        },
    }.items()
}


def traces(figure, name):
    return [trace for trace in figure.data if trace.name == name]


def test_recall_is_drawn_by_model_and_training():
    ours, other = traces(findings.estimators(PREDICTION), "begins as the router (ours)")
    assert list(ours.x) == list(other.x) == [4, 16] and list(ours.y) == [70, 75]
    assert ours.error_y.array == pytest.approx([10, 5])
    figure = findings.estimators(PREDICTION)
    assert sum("65.0 %" in note.text for note in figure.layout.annotations) == 2


def test_evictions_are_drawn_beside_the_best_that_knows_the_past():
    figure = findings.evictions(PREDICTION)
    best, _ = traces(figure, "best that knows the past")
    assert list(best.x) == [25, 50] and list(best.y) == pytest.approx([87.5, 85])
    ours, _ = traces(figure, "predicts the next tokens (ours)")
    assert list(ours.y) == pytest.approx([77.5, 75])


def test_balancing_is_a_gain_over_tensor_parallelism():
    metrics = read_json(RESULTS / "baseline" / "07_ndp_scheduling.json")["metrics"]
    free, shared = findings.balancing(metrics).data
    with_it, without = (metrics[f"decode NDP+TP{added}"]["value"] for added in ("+LB", ""))
    assert free.y[0] == pytest.approx(100 * (with_it / without - 1))
    assert shared.y[0] == 0 < free.y[0]


def test_all_combinations_that_fit_are_drawn():
    metrics = read_json(RESULTS / "baseline" / "07_ndp_scheduling.json")["metrics"]
    assert sum(findings.combinations(metrics).data[0].y) == metrics["readings_that_fit"]["value"]


def test_dropping_costs_points_with_intervals():
    rows = read_json(RESULTS / "bench" / "ane_accuracy.json")["results"]
    figure, (task, row) = (
        findings.dropping(rows),
        next(
            (name, row)
            for name, row in rows["accuracy (measured), drops and padding (exact)"].items()
            if name == "spelling: weakest attention (NPUMoE)"
        ),
    )
    (trace,) = traces(figure, "spelling")
    at = list(trace.y).index(task.partition(": ")[2])
    assert trace.x[at] == pytest.approx(100 * row["difference"]) and len(trace.y) == 5
    assert trace.error_x.array[at] >= 196 * row["difference error"]  # Student's reach is longer


def test_bytes_are_those_that_were_read():
    rows = read_json(RESULTS / "bench" / "experts.json")["results"]
    figure = findings.bf12(rows)
    (sixteen, ms), (twelve, _) = traces(figure, "ours, bf16"), traces(figure, "ours, bf12")
    assert (
        0.75 <= twelve.y[0] / sixteen.y[0] < 0.76
        and ms.y[0] == rows["bf16 decode, 1 token"]["gemv"]["ms"]
    )


@pytest.mark.parametrize("name", findings.FINDINGS)
def test_the_picture_is_there_small_and_shown(name):
    read, draw = findings.FINDINGS[name]
    assert theme.to_json(draw(read(RESULTS)))["data"]
    assert (RESULTS / "findings" / f"{name}.png").stat().st_size <= 60_000
    section = (
        (ROOT / "README.md")
        .read_text(encoding="utf-8")
        .partition("## Findings")[2]
        .partition("\n## ")[0]
    )
    (alt,) = re.findall(rf"!\[(.+)\]\(results/findings/{name}\.png\)", section)
    assert len(alt) > 40
