"""Two runs side by side: parameters, and metrics with their spread.

views.runs()                    the two newest            views.runs("01",
                                                          "results/runs/01_calibration/2025…")
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from shlex import quote

from moelab.comparison import HEAD, Comparison, Metric, are_numbers, compare, find_run, saved_runs
from moelab.files import results_root
from moelab.records import Rows
from moelab.viz.charts import by_row, hover, interval, point_look
from moelab.viz.plotly_json import Figure
from moelab.viz.views.base import menu
from moelab.viz.views.detailed import Detail, Detailed, html_rows

METRICS = "all metrics"


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

    def command(a: str, b: str) -> tuple[str, str]:
        paths = [str(known[name]) for name in (a, b)]
        return (
            f"moelab view runs {' '.join(map(quote, paths))}",
            f"from moelab.viz import views\nviews.runs(*{paths!r})",
        )

    return Detailed(
        "runs",
        {"a": menu("run A", a, [*known]), "b": menu("run B", b, [*known])},
        compared,
        draw,
        _rows,
        command,
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
