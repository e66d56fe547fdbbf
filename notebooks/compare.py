"""`moelab compare`: two runs side by side, the two newest of a notebook or any two: the parameters
that differ, and every metric with its spread.

The spread of a metric is the least and the most that it was in the runs of the same notebook with
the same parameters: one run says nothing about the noise."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from moelab.base.arguments import described
from moelab.base.files import absolute, read_json, results_root
from moelab.base.records import Record
from moelab.base.table import format_value, text_table
from moelab.comparison import MetricsFile, are_numbers, differing, finished_runs, resolved
from moelab.lab.runner import notebooks

Spread = tuple[float, float]


class Metric(NamedTuple):
    """One metric in both runs; None where a run lacks it, units and kinds that differ joined by
    " / "."""

    name: str
    unit: str
    kind: str
    values: tuple[Any, Any]

    @property
    def note(self) -> str:
        """The second over the first, or that they differ; "" where they are equal."""
        a, b = self.values
        if are_numbers(a, b) and a:
            return f"{b / a:.3f} ×"
        return "" if a == b else "only one has it" if None in (a, b) else "differs"


def side_by_side(a: Record, b: Record) -> tuple[dict[str, tuple[Any, Any]], list[Metric]]:
    """(parameters that differ, every metric) of the contents of two metrics.json."""
    metrics = []
    for name in a["metrics"] | b["metrics"]:
        both = [of["metrics"].get(name, {}) for of in (a, b)]
        there = [of for of in both if of]
        unit, kind = (
            " / ".join(dict.fromkeys(of[key] for of in there)) for key in ("unit", "kind")
        )
        metrics.append(Metric(name, unit, kind, tuple(of.get("value") for of in both)))
    return differing(*(of["params"] | {"seed": of["seed"]} for of in (a, b))), metrics


add_arguments = described(__file__)


def main(args: argparse.Namespace) -> int:
    if len(args.runs) == 1:
        runs = finished_runs(notebooks(args.runs)[0].stem, lab=True)[-2:]
    else:
        runs = [*map(find_run, args.runs)]
    if len(runs) != 2:
        raise ValueError(
            f"two runs are compared, and there are {len(runs)}; `moelab run NOTEBOOK` makes one, "
            "`moelab list` shows those there are"
        )
    found = [read_json(run / "metrics.json", MetricsFile) for run in runs]
    spreads = [*map(spreads_beside, runs, found)]
    same = runs[0].parent.name == runs[1].parent.name
    names = [run.name if same else f"{run.parent.name} {run.name}" for run in runs]
    params, metrics = side_by_side(*found)
    if params:
        rows = [[name, *map(str, of)] for name, of in params.items()]
        print(text_table(["parameter", *names], rows), end="\n\n")
    rows = []
    for of in metrics:
        cells = [_cell(value, by.get(of.name)) for value, by in zip(of.values, spreads)]
        rows.append([of.name, of.unit, of.kind, *cells, of.note])
    print(text_table(["metric", "unit", "kind", *names, ""], rows))
    return 0


def find_run(run: str | Path) -> Path:
    """The folder of a run, or of the newest saved run of a notebook given by name or number."""
    folder = absolute(run)
    if (folder / "metrics.json").is_file():
        return folder
    folders = (results_root() / "runs").glob("*")
    saved = {path.name: finished_runs(path.name, lab=True) for path in folders}
    names = [name for name, of in saved.items() if of]
    return saved[resolved(str(run), names, "saved run of a notebook, or folder of one,")][-1]


def spreads_beside(run: Path, own: Record) -> dict[str, Spread]:
    """Metric → (least, most) over the runs beside this one with the same parameters, where they
    differ."""
    values: dict[str, list[float]] = {}
    for path in run.parent.glob("[0-9]*/metrics.json"):
        beside = read_json(path, MetricsFile)
        if beside["params"] == own["params"] and beside["seed"] == own["seed"]:
            for name, metric in beside["metrics"].items():
                if are_numbers(metric["value"]):
                    values.setdefault(name, []).append(metric["value"])
    return {name: (min(of), max(of)) for name, of in values.items() if min(of) < max(of)}


def _cell(value: Any, spread: Spread | None) -> str:
    text = format_value(value)
    return text if spread is None else f"{text} ({' to '.join(map(format_value, spread))})"
