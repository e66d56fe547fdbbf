"""Two runs side by side: parameters, and metrics with their spread.

views.runs()                    the two newest            views.runs("01",
                                                          "results/runs/01_calibration/2025…")
"""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from moelab.base.files import results_root
from moelab.base.records import Rows
from moelab.comparison import (
    HEAD,
    Comparison,
    Metric,
    are_numbers,
    compare,
    find_run,
    finished_runs,
)
from moelab.viz.charts import by_row, hover, interval, point_look
from moelab.viz.plotly_json import Figure
from moelab.viz.views.detailed import Detail, Detailed, html_rows

METRICS = "all metrics"


def newest(results: str | Path | None = None) -> Path:
    """The newest saved run of all notebooks. ValueError: there is none."""
    root = results_root(results)
    runs = [
        run
        for folder in (root / "runs").glob("*")
        for run in finished_runs(folder.name, root, lab=True)
    ]
    if not runs:
        raise ValueError(
            f"there is no saved run in {root / 'runs'}; `moelab run 01 -p smoke=true` makes one"
        )
    return max(runs, key=lambda run: run.name)


def draw(found: Comparison) -> Figure:
    """Every metric's ratio with its spread."""
    there = [
        m
        for m in found.metrics
        if are_numbers(*m.values)
        and min(m.values) > 0
        and all(spread is None or spread[0] > 0 for spread in m.spreads)
    ]
    figure = Figure()
    for i, kind in enumerate(dict.fromkeys(m.kind for m in there)):
        own = {m.name: _ratio(m) for m in there if m.kind == kind}
        value, low, high = zip(*own.values())
        figure.add_scatter(
            x=value,
            y=[*own],
            mode="markers",
            name=kind,
            marker=point_look(i),
            error_x=interval(value, low, high),
            customdata=[*own],
            hovertemplate=hover("%{y}: %{x:.3f} ×", kind),
        )
    figure.update_xaxes(type="log")
    return by_row(
        figure, [m.name for m in there], "B ÷ A (whiskers: runs with the same parameters)"
    )


def _ratio(metric: Metric) -> tuple[float, float, float]:
    """B ÷ A, and the least and the most that it is by both spreads."""
    a, b = metric.values
    (least_a, most_a), (least_b, most_b) = (
        spread or (value, value) for spread, value in zip(metric.spreads, metric.values)
    )
    return b / a, least_b / most_a, most_b / least_a


def runs(
    a: str | Path | None = None, b: str | Path | None = None, results: str | Path | None = None
) -> Detailed:
    """Two runs as a view: folders or notebooks, as of `moelab compare`; without, the two newest of
    one notebook.

    All parameters and metrics are in the table below.
    """
    after = find_run(b, results) if b else newest(results)
    beside = [run for run in finished_runs(after.parent.name, results, lab=True) if run != after]
    before = find_run(a, results) if a else (beside or [after])[-1]
    found = compare(before, after, results)
    paths = [str(before), str(after)]
    shell = f"moelab view runs {' '.join(map(quote, paths))}"
    return Detailed(
        "runs",
        {},
        lambda: found,
        draw,
        _rows,
        lambda: (shell, f"from moelab.viz import views\nviews.runs(*{paths!r})"),
        _words,
        label="metric",
        names=lambda found: [METRICS, *(m.name for m in found.metrics)],
        tell=_tell,
        first=METRICS,
    )


def _words(found: Comparison) -> tuple[str, str]:
    differ = ", ".join(f"{name} {a} / {b}" for name, (a, b) in found.params.items()) or "none"
    names = f"A: {found.names[0]}, B: {found.names[1]}"
    return f"{names}; parameters that differ: {differ}.", f"{names}: every metric of B over A's"


def _rows(found: Comparison) -> Rows:
    params = [(name, "", "parameter", str(a), str(b), "") for name, (a, b) in found.params.items()]
    return [dict(zip((*HEAD, "A", "B", "B ÷ A"), cells)) for cells in [*params, *found.cells]]


def _tell(found: Comparison, name: str) -> Detail:
    rows = [row for row in _rows(found) if name in (METRICS, row["metric"])]
    return Detail(html_rows([*HEAD, "A", "B", "B ÷ A"], (row.values() for row in rows)))
