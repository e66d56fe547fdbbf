"""Two runs side by side: parameters, metrics with their spread, figures laid over each other.

views.runs()                    the two newest            views.runs("01",
                                                          "results/runs/01_calibration/2025…")
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from moelab.comparison import (
    HEAD,
    Comparison,
    Metric,
    MetricsFile,
    are_numbers,
    compare,
    find_run,
    saved_runs,
)
from moelab.files import read_json, results_root
from moelab.records import Rows
from moelab.viz.charts import EDGE, finish, interval, point_look
from moelab.viz.plotly_json import Figure, merged
from moelab.viz.theme import BLUE, VERMILLION
from moelab.viz.views.base import menu
from moelab.viz.views.detailed import Detail, Detailed, html_rows

METRICS = "all metrics: B ÷ A"
#: traces of which two can be laid over each other
OVERLAID = {"scatter", "scattergl", "bar"}
CHANGE = [[0, BLUE], [0.5, "white"], [1, VERMILLION]]


def everyone(results: str | Path | None = None) -> dict[str, Path]:
    """Every saved run under a name that says its notebook, newest first. ValueError: there is
    none."""
    root = results_root(results)
    runs = [run for folder in (root / "runs").glob("*") for run in saved_runs(folder.name, root)]
    if not runs:
        raise ValueError(
            f"there is no saved run in {root / 'runs'}; `moelab run 01 -p smoke=true` makes one"
        )
    return {
        f"{run.parent.name} {run.name}": run
        for run in sorted(runs, key=lambda run: run.name, reverse=True)
    }


def draw(found: Comparison, of: str = METRICS) -> Figure:
    """Every metric's ratio with its spread, or a figure that both runs have."""
    if of != METRICS:
        return overlaid(
            *(
                Figure(kept["figure"]["data"], kept["figure"]["layout"])
                for kept in found.figures[of]
            ),
            found.names,
        )
    there = [
        m
        for m in found.metrics
        if are_numbers(*m.values)
        and min(m.values) > 0
        and all(spread is None or spread[0] > 0 for spread in m.spreads)
    ]
    value, low, high = np.array([_ratio(m) for m in there], float).reshape(-1, 3).T
    figure = Figure()
    for i, kind in enumerate(dict.fromkeys(m.kind for m in there)):
        own = [n for n, m in enumerate(there) if m.kind == kind]
        figure.add_scatter(
            x=value[own],
            y=[there[n].name for n in own],
            mode="markers",
            name=kind,
            marker=point_look(i),
            error_x=interval(value[own], low[own], high[own]),
            customdata=[there[n].name for n in own],
            hovertemplate="%{y}: %{x:.3f} ×<extra>" + kind + "</extra>",
        )
    figure.add_vline(x=1, line=EDGE)
    figure.update_xaxes(type="log")
    figure.update_yaxes(
        type="category",
        categoryorder="array",
        categoryarray=[m.name for m in there][::-1],
        tickfont={"size": 11},
    )
    return finish(
        figure,
        "B ÷ A (whiskers: runs with the same parameters)",
        legend="kind",
        height=160 + 20 * max(len(there), 4),
    )


def _ratio(metric: Metric) -> tuple[float, float, float]:
    """B ÷ A, and the least and the most that it is by both spreads."""
    (a, b), (of_a, of_b) = (
        metric.values,
        [spread or (v, v) for spread, v in zip(metric.spreads, metric.values)],
    )
    return b / a, of_b[0] / of_a[1], of_b[1] / of_a[0]


def overlaid(a: Figure, b: Figure, names: tuple[str, str]) -> Figure:
    """B over A: lines and bars pale, heatmaps as their difference; what is neither, A alone, and it
    says so."""
    kinds = [{trace.get("type", "scatter") for trace in figure.traces} for figure in (a, b)]
    if kinds[0] | kinds[1] <= OVERLAID:
        named = [
            (trace | look, f"{which} {trace.get('name') or ''}".rstrip())
            for which, figure, look in (("A", a, {}), ("B", b, {"opacity": 0.45}))
            for trace in figure.traces
        ]
        return Figure(
            [trace | {"name": name, "legendgroup": name} for trace, name in named], a.frame
        ).update_layout(showlegend=True)
    if kinds[0] == kinds[1] == {"heatmap"}:
        z = [[numbers(trace["z"]) for trace in figure.traces] for figure in (a, b)]
        if [of.shape for of in z[0]] == [of.shape for of in z[1]]:
            changes = [after - before for before, after in zip(*z)]
            widest = [max(np.nanmax(np.abs(change), initial=0), 1e-12) for change in changes]
            return Figure(
                [
                    merged(
                        trace,
                        {
                            "z": change,
                            "zmin": -most,
                            "zmax": most,
                            "colorscale": CHANGE,
                            "colorbar_title_text": "B − A",
                        },
                    )
                    for trace, change, most in zip(a.traces, changes, widest)
                ],
                a.frame,
            )
    return Figure(a.traces, a.frame).add_annotation(
        text=f"A alone, {names[0]}: B's cannot be laid over it",
        xref="paper",
        yref="paper",
        x=0,
        y=1.08,
        showarrow=False,
    )


def numbers(array: Any) -> np.ndarray:
    """An array as a figure has it, whose missing values are None; from JSON, plotly keeps it as
    {"dtype", "bdata"}."""
    if not isinstance(array, Mapping):
        return np.asarray(array, float)
    flat = np.frombuffer(b64decode(array["bdata"]), array["dtype"]).astype(float)
    return flat.reshape([int(n) for n in str(array.get("shape", flat.size)).split(",")])


def runs(
    a: str | Path | None = None, b: str | Path | None = None, results: str | Path | None = None
) -> Detailed:
    """Two runs as a view: folders or notebooks, as of `moelab compare`; without, the two newest of
    one notebook.

    A figure that both runs have is chosen in the menu `figure`; all parameters and metrics are in
    the table below."""
    known = everyone(results)
    by_path = {run.resolve(): name for name, run in known.items()}
    first = find_run(b, results) if b else next(iter(known.values()))
    beside = [run for run in known.values() if run.parent == first.parent and run != first]
    other = find_run(a, results) if a else (beside or [first])[0]
    for run in (first, other):
        if by_path.setdefault(run.resolve(), str(run)) not in known:
            known[str(run)] = run

    @lru_cache(maxsize=32)
    def compared(a: str, b: str) -> Comparison:
        return compare(known[a], known[b], results)

    names = list(
        dict.fromkeys(
            name
            for run in known.values()
            for name in read_json(run / "metrics.json", MetricsFile).get("figures", {})
        )
    )

    def compute(a: str, b: str, figure: str) -> tuple[Comparison, str]:
        found = compared(a, b)
        return found, figure if figure in found.figures else METRICS

    def command(a: str, b: str, figure: str) -> tuple[str, str]:
        paths = [str(known[name]) for name in (a, b)]
        return (
            f"moelab compare {' '.join(paths)}",
            f"from moelab.viz import views\nviews.runs({paths[0]!r}, {paths[1]!r})",
        )

    return Detailed(
        "runs",
        {
            "a": menu("run A", by_path[other.resolve()], list(known)),
            "b": menu("run B", by_path[first.resolve()], list(known)),
            "figure": menu("figure", METRICS, [METRICS, *names]),
        },
        compute,
        lambda data: draw(*data),
        _rows,
        command,
        _words,
        label="metric",
        names=lambda data: [METRICS, *(m.name for m in data[0].metrics)],
        tell=_tell,
    )


def _words(data: tuple[Comparison, str]) -> tuple[str, str]:
    found, figure = data
    differ = ", ".join(f"{name} {a} / {b}" for name, (a, b) in found.params.items()) or "none"
    kept = f" {found.figures[figure][0]['caption']}" if figure != METRICS else ""
    return (
        f"A: {found.names[0]}, B: {found.names[1]}; parameters that differ: {differ}.{kept}",
        f"Runs {found.names[0]} and {found.names[1]}, {figure}",
    )


def _rows(data: tuple[Comparison, str]) -> Rows:
    found, _ = data
    params = [
        {"metric": name, "kind": "parameter", "A": str(a), "B": str(b)}
        for name, (a, b) in found.params.items()
    ]
    return params + [dict(zip((*HEAD, "A", "B", "B ÷ A"), cells)) for cells in found.cells]


def _tell(data: tuple[Comparison, str], name: str) -> Detail:
    found, _ = data
    if name == METRICS:
        params = [[name, "", "parameter", *map(str, of), ""] for name, of in found.params.items()]
        return Detail(html_rows([*HEAD, "A", "B", ""], params + found.cells))
    cells = next(cells for cells in found.cells if cells[0] == name)
    return Detail(html_rows([*HEAD, "A", "B", ""], [cells]))
