"""The JSON files of runs and benches, as types that `moelab.schema` validates.

read_json(run / "metrics.json", MetricsFile)        # or ValueError, which names the file
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from moelab.schema import Amount, Count, Must

#: exact: a count or a bit-for-bit check; measured: on this machine; simulated: our policies on a
#: device card; modelled: a fitted formula; paper: a source's figure
KINDS = ("exact", "measured", "simulated", "modelled", "paper")
Value = float | str | bool
#: a row of a table: column → cell; an object of JSON
Record = dict[str, Any]
Rows = list[Record]
#: rows by name, as in a section of a bench's results
Records = dict[str, Record]
#: a row of numbers
Numbers = dict[str, float]


class Metric(TypedDict):
    """One finite number, text or truth value."""

    value: Value
    unit: str
    kind: Literal[KINDS]
    readings: NotRequired[dict[str, Value]]
    tolerance: NotRequired[Amount]


class KeptFigure(TypedDict):
    """The file that keeps a figure, beside metrics.json."""

    file: Annotated[str, Must(re.compile(r"figures/[\w-]+\.json").fullmatch, "figures/NAME.json")]
    caption: NotRequired[str]


class Takeaway(TypedDict):
    text: str


class MetricsFile(TypedDict):
    """metrics.json, or the baseline of a notebook."""

    params: dict[str, Any]
    seed: int
    metrics: dict[str, Metric]
    figures: NotRequired[dict[str, KeptFigure]]
    takeaways: NotRequired[list[Takeaway]]
    tables: NotRequired[
        dict[
            str,
            Annotated[
                list[list[Any]],
                Must(
                    lambda lines: lines and len({*map(len, lines)}) == 1 and lines[0],
                    "a head and rows as long as it",
                ),
            ],
        ]
    ]


class Environment(TypedDict):
    git: str | None
    versions: dict[str, str]
    device: str
    cpu: str
    cores: int | None


class RunFile(TypedDict):
    """run.json."""

    parameters: dict[str, Any]
    seconds: Amount
    env: Environment
    peak_anonymous_bytes: NotRequired[Count]


class Plot(TypedDict):
    data: list[dict[str, Any]]
    layout: dict[str, Any]


class FigureFile(TypedDict):
    """figures/NAME.json."""

    caption: str
    alt: str
    figure: Plot


class BenchRun(TypedDict):
    """How and on what something was measured, as far as it is known: `moelab.results.provenance`."""

    git: str | None
    date: str | None
    system: str
    cpu: str
    cores: int | None
    versions: dict[str, str]
    parameters: dict[str, Any]
    conditions: dict[str, Any]
    quiet: NotRequired[bool | None]


class BenchRecord(TypedDict):
    """One value that a run has found; samples : what it is the median of."""

    run: Count
    section: str
    row: str
    metric: str
    value: Value | None
    unit: str
    kind: Literal[KINDS]
    spread: NotRequired[list[float]]
    samples: NotRequired[list[float]]


class BenchFile(TypedDict):
    """results/bench/NAME.json."""

    bench: str
    runs: list[BenchRun]
    records: list[BenchRecord]
