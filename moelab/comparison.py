"""What runs keep, as types that `moelab.base.schema` validates, and two runs side by side: the parameters
that differ, and every metric with its spread.

A run is its folder; a notebook's name or number stands for its newest one. The spread of a metric
is the least and the most that it was in the runs of the same notebook with the same parameters: one
run says nothing about the noise."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

from moelab.base.files import absolute, read_json, results_root
from moelab.base.records import Record, Value
from moelab.base.registry import require
from moelab.base.schema import Amount, Count
from moelab.base.table import format_value

#: exact: a count or a bit-for-bit check; measured: on this machine; simulated: our policies on a
#: device card; modelled: a fitted formula; paper: a source's figure
KINDS = ("exact", "measured", "simulated", "modelled", "paper")


class KeptMetric(TypedDict):
    """One finite number, text or truth value."""

    value: Value
    unit: str
    kind: Literal[KINDS]
    readings: NotRequired[dict[str, Value]]
    tolerance: NotRequired[Amount]


class MetricsFile(TypedDict):
    """metrics.json, or the baseline of a notebook."""

    params: dict[str, Any]
    seed: int
    metrics: dict[str, KeptMetric]
    env: NotRequired[dict[str, Any]]
    seconds: NotRequired[Amount]
    peak_bytes: NotRequired[Count]
    figures: NotRequired[dict[str, dict[str, str]]]
    takeaways: NotRequired[list[dict[str, Any]]]
    tables: NotRequired[dict[str, list[list[Any]]]]


Spread = tuple[float, float]

#: how the name of a run ends whose cells a person executed, in JupyterLab or with papermill itself
LAB = "-lab"


def finished_runs(
    notebook: str, results: str | Path | None = None, lab: bool = False
) -> list[Path]:
    """The finished runs of a notebook that were saved, oldest first: those of the runner, and with
    `lab` those of people, too.

    A person may run cells in any order, so what judges, `check` and `claims`, counts the runner's
    only."""
    saved = (results_root(results) / "runs" / notebook).glob("[0-9]*/metrics.json")
    runs = [path.parent for path in saved if path.parent.suffix not in (".part", ".failed")]
    runs = [run for run in runs if lab or not run.name.endswith(LAB)]
    return sorted(runs, key=lambda run: (run_number(run), run.name))


def run_number(run: Path) -> int:
    """The place of a run among those of its notebook; 0 for one of when only a clock told."""
    number = re.match(r"(\d+)-\d{8}-\d{6}-", run.name)
    return int(number[1]) if number else 0


def resolved(name: str, known: Iterable[str], what: str = "notebook") -> str:
    """The notebook that a name or number means: "01_calibration", "01" or "1". ValueError lists
    those that are known."""
    known = sorted(known)
    for one in known:
        if name == one or name.isdigit() and name.zfill(2) == one.split("_")[0]:
            return one
    return require(what, name, known)


#: columns of `Comparison.cells`, beside the names of the runs
HEAD = ("metric", "unit", "kind")


class Metric(NamedTuple):
    """One metric in both runs; None where a run lacks it, units and kinds that differ joined by
    " / ". spreads : least and most, None where it never differed."""

    name: str
    unit: str
    kind: str
    values: tuple[Any, Any]
    spreads: tuple[Spread | None, Spread | None] = (None, None)

    @property
    def note(self) -> str:
        """The second over the first, or that they differ; "" where they are equal."""
        a, b = self.values
        if are_numbers(a, b) and a:
            return f"{b / a:.3f} ×"
        return "" if a == b else "only one has it" if None in (a, b) else "differs"


class Comparison(NamedTuple):
    """Runs A and B. params : name → values, of parameters that differ."""

    runs: tuple[Path, Path]
    params: dict[str, tuple[Any, Any]]
    metrics: list[Metric]

    @property
    def names(self) -> tuple[str, str]:
        """What the runs are called: by their time, and by their notebooks where these differ."""
        same = self.runs[0].parent.name == self.runs[1].parent.name
        return tuple(run.name if same else f"{run.parent.name} {run.name}" for run in self.runs)

    @property
    def cells(self) -> list[list[Any]]:
        """A row a metric: `HEAD`, both values with their spreads, and how they differ."""
        return [
            [m.name, m.unit, m.kind, *map(_cell, m.values, m.spreads), m.note] for m in self.metrics
        ]


def differing(a: Record, b: Record) -> dict[str, tuple[Any, Any]]:
    """Parameters that differ → both values. What one does not know is "" in it: a text that may be
    left empty says nothing of what was before there was such a parameter."""
    both = {name: (a.get(name, ""), b.get(name, "")) for name in a | b}
    return {name: of for name, of in both.items() if of[0] != of[1]}


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


def compare(a: str | Path, b: str | Path) -> Comparison:
    """Two runs, each a folder or a notebook. ValueError: there is no such run, or it was never
    saved."""
    runs = find_run(a), find_run(b)
    found = [read_json(run / "metrics.json", MetricsFile) for run in runs]
    params, metrics = side_by_side(*found)
    spreads = [_spreads(run) for run in runs]
    metrics = [m._replace(spreads=tuple(of.get(m.name) for of in spreads)) for m in metrics]
    return Comparison(runs, params, metrics)


def find_run(run: str | Path) -> Path:
    """The folder of a run, or of the newest saved run of a notebook given by name or number."""
    folder = absolute(run)
    if (folder / "metrics.json").is_file():
        return folder
    root = results_root()
    saved = {
        path.name: finished_runs(path.name, root, lab=True) for path in (root / "runs").glob("*")
    }
    names = [name for name, of in saved.items() if of]
    return saved[resolved(str(run), names, "saved run of a notebook, or folder of one,")][-1]


def are_numbers(*values: Any) -> bool:
    """Whether all are numbers; a truth value, which Python counts among them, is none."""
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


def _spreads(run: Path) -> dict[str, Spread]:
    """Metric → (least, most) over the runs beside this one with the same parameters, where they
    differ."""
    own = read_json(run / "metrics.json", MetricsFile)
    beside = [read_json(path, MetricsFile) for path in run.parent.glob("[0-9]*/metrics.json")]
    values: dict[str, list[float]] = {}
    for of in beside:
        for name, metric in of["metrics"].items():
            same = of["params"] == own["params"] and of["seed"] == own["seed"]
            if same and are_numbers(metric["value"]):
                values.setdefault(name, []).append(metric["value"])
    return {name: (min(of), max(of)) for name, of in values.items() if min(of) < max(of)}


def _cell(value: Any, spread: Spread | None) -> str:
    text = format_value(value)
    return text if spread is None else f"{text} ({' to '.join(map(format_value, spread))})"
