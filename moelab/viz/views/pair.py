"""Two runs side by side: parameters, metrics with their spread, figures laid over each other.

views.runs()                    the two newest            views.runs("01",
                                                          "results/runs/01_calibration/2025…")
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from shlex import quote
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
    finished_runs,
)
from moelab.files import read_json, results_root
from moelab.records import Record, Rows
from moelab.viz.charts import by_row, hover, interval, point_look
from moelab.viz.plotly_json import Figure, merged
from moelab.viz.theme import BLUE, VERMILLION
from moelab.viz.views.base import menu
from moelab.viz.views.detailed import Detail, Detailed, html_rows

METRICS = "all metrics: B ÷ A"
#: traces of which two can be laid over each other
OVERLAID = "scatter", "bar"
Data = tuple[Comparison, str]  # and which figure
CHANGE = [[0, BLUE], [0.5, "white"], [1, VERMILLION]]


def everyone(results: str | Path | None = None) -> dict[str, Path]:
    """Every saved run under a name that says its notebook, newest first. ValueError: there is
    none."""
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
    return {
        f"{run.parent.name} {run.name}": run
        for run in sorted(runs, key=lambda run: run.name, reverse=True)
    }


def draw(found: Comparison, of: str = METRICS) -> Figure:
    """Every metric's ratio with its spread, or a figure that both runs have."""
    if of != METRICS:
        kept = [Figure(one["figure"]["data"], one["figure"]["layout"]) for one in found.figures[of]]
        return overlaid(*kept)
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


def panels_of(figure: Figure) -> dict[str, str]:
    """What a figure's panels show → what the names of their axes end with: each its title, or that
    of its vertical axis, or nothing."""
    axes = [name[5:] for name in figure.frame if name.startswith("xaxis")] or [""]
    notes = figure.frame.get("annotations", ())
    titles = [note["text"] for note in notes if note.get("yref") == "paper"]
    if len(titles) < len(axes):
        vertical = (figure.frame.get(f"yaxis{n}", {}) for n in axes)
        titles = [(axis.get("title") or {}).get("text", "") for axis in vertical]
    return dict(zip(titles, axes))


def overlaid(a: Figure, b: Figure) -> Figure:
    """B over A, panel by panel of the same title: lines and bars pale, heatmaps as their
    difference; what A has alone stays, what B has alone is named."""
    places, others = panels_of(a), panels_of(b)
    there = {n: places.get(title) for title, n in others.items()}
    maps = {of.get("xaxis", "x"): of for of in a.traces if of["type"] == "heatmap"}
    traces = [_named("A", of) for of in a.traces if of["type"] in OVERLAID]
    for trace in b.traces:
        if (n := there.get(trace.get("xaxis", "x")[1:])) is None:
            continue
        trace = trace | {"xaxis": f"x{n}", "yaxis": f"y{n}"}
        if trace["type"] in OVERLAID:
            traces.append(_named("B", trace) | {"opacity": 0.45})
        elif trace["xaxis"] in maps:
            maps[trace["xaxis"]] = _change(maps[trace["xaxis"]], trace)
    figure = Figure([*maps.values(), *traces], a.frame).update_layout(showlegend=bool(traces))
    alone = [title for title, n in others.items() if there[n] is None]
    if alone or not figure.traces:
        told = (
            f"B alone has {', '.join(alone)}" if alone else "these cannot be laid over each other"
        )
        figure.add_annotation(text=told, xref="paper", yref="paper", x=0, y=1.08, showarrow=False)
    return figure


def _named(which: str, trace: Record) -> Record:
    name = f"{which} {trace.get('name') or ''}".rstrip()
    return trace | {"name": name, "legendgroup": name}


def _change(a: Record, b: Record) -> Record:
    """The heatmap of B − A; of A alone, if they differ in shape."""
    before, after = numbers(a["z"]), numbers(b["z"])
    if before.shape != after.shape:
        return a
    change = after - before
    most = max(np.nanmax(np.abs(change), initial=0), 1e-12)
    look = {"zmin": -most, "zmax": most, "colorscale": CHANGE, "colorbar_title_text": "B − A"}
    return merged(a, {"z": change} | look)


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

    def named(run: Path) -> str:
        for name, path in known.items():
            if path.resolve() == run.resolve():
                return name
        known[str(run)] = run
        return str(run)

    b = named(find_run(b, results)) if b else next(iter(known))
    beside = [name for name, run in known.items() if run.parent == known[b].parent and name != b]
    a = named(find_run(a, results)) if a else (beside or [b])[0]
    compared = cache(lambda a, b: compare(known[a], known[b], results))
    kept = [read_json(run / "metrics.json", MetricsFile) for run in known.values()]
    figures = dict.fromkeys(name for found in kept for name in found.get("figures", {}))

    def compute(a: str, b: str, figure: str) -> Data:
        found = compared(a, b)
        return found, figure if figure in found.figures else METRICS

    def command(a: str, b: str, figure: str) -> tuple[str, str]:
        paths = [str(known[name]) for name in (a, b)]
        turned = "" if figure == METRICS else f" -p figure={quote(figure)}"
        return (
            f"moelab view runs {' '.join(map(quote, paths))}{turned}",
            f"from moelab.viz import views\nviews.runs(*{paths!r}).set(figure={figure!r})",
        )

    return Detailed(
        "runs",
        {
            "a": menu("run A", a, [*known]),
            "b": menu("run B", b, [*known]),
            "figure": menu("figure", METRICS, [METRICS, *figures]),
        },
        compute,
        lambda data: draw(*data),
        _rows,
        command,
        _words,
        plays=("figure",),
        label="metric",
        names=lambda data: [METRICS, *(m.name for m in data[0].metrics)],
        tell=_tell,
    )


def _words(data: Data) -> tuple[str, str]:
    found, figure = data
    differ = ", ".join(f"{name} {a} / {b}" for name, (a, b) in found.params.items()) or "none"
    kept = f" {found.figures[figure][0]['caption']}" if figure != METRICS else ""
    names = f"A: {found.names[0]}, B: {found.names[1]}"
    return f"{names}; parameters that differ: {differ}.{kept}", f"{names}: {figure}"


def _rows(data: Data) -> Rows:
    found, _ = data
    params = [
        {"metric": name, "kind": "parameter", "A": str(a), "B": str(b)}
        for name, (a, b) in found.params.items()
    ]
    return params + [dict(zip((*HEAD, "A", "B", "B ÷ A"), cells)) for cells in found.cells]


def _tell(data: Data, name: str) -> Detail:
    found, _ = data
    params = [[name, "", "parameter", *map(str, of), ""] for name, of in found.params.items()]
    cells = params + found.cells
    if name != METRICS:
        cells = [of for of in found.cells if of[0] == name]
    return Detail(html_rows([*HEAD, "A", "B", ""], cells))
