"""What runs keep, as types that `moelab.base.schema` validates, and which there are. A run is its
folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from moelab.base.files import results_root
from moelab.base.records import Record, Value
from moelab.base.registry import require
from moelab.base.schema import Amount, Count

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

    params: Record
    seed: int
    metrics: dict[str, KeptMetric]
    env: NotRequired[Record]
    seconds: NotRequired[Amount]
    peak_bytes: NotRequired[Count]
    figures: NotRequired[dict[str, dict[str, str]]]
    takeaways: NotRequired[list[Record]]
    tables: NotRequired[dict[str, list[list[Any]]]]


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


def differing(a: Record, b: Record) -> dict[str, tuple[Any, Any]]:
    """Parameters that differ → both values. What one does not know is "" in it: a text that may be
    left empty says nothing of what was before there was such a parameter."""
    both = {name: (a.get(name, ""), b.get(name, "")) for name in a | b}
    return {name: of for name, of in both.items() if of[0] != of[1]}


def are_numbers(*values: Any) -> bool:
    """Whether all are numbers; a truth value, which Python counts among them, is none."""
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)
