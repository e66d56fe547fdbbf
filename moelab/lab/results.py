"""What a notebook finds, in a form that can be compared: metrics and figures of one run.

    run = moelab.lab.open_run("01_calibration", globals())
    run.metric("imbalance_prefill", 1.8, "busiest ÷ mean", "exact")
    run.metrics_of({"share_0": 0.3, "share_1": 0.2}, "of routings", "exact")
    run.figure("heatmap", fig, caption="…", alt="…")
    run.table("Experts by layer", ["layer", "experts"], [0, 8], [1, 4])
    run.takeaway("The busiest expert has **{busiest:.1f} times** the mean load.", busiest=1.8)
    run.verdicts()                  # the sources' claims that this notebook answers
    run.save()

A run is one directory: `metrics.json`, which also keeps takeaways, tables and what it ran on, and
`figures/*.json`. The runner names it in MOELAB_RUN_DIR. In JupyterLab, and where papermill is called
directly, it is `results/runs/<notebook>/<time>-lab/` once it is saved: listed, reported and
compared like any other, but `check` and `claims` judge the runner's only
(`moelab.comparison.finished_runs`)."""

from __future__ import annotations

import builtins
import math
import os
import platform
import re
import resource
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from moelab.base.files import remove_leftovers, results_root, write_json
from moelab.base.records import Numbers, Record, Records
from moelab.base.registry import require
from moelab.bench.results import environment, load_average, why_busy
from moelab.comparison import KINDS, LAB, run_number

SCHEMA = "moelab.metrics/1"


def new_run_id(folder: Path) -> str:
    """A name for a new run in a folder: one more than the last, whatever the clock says, and the
    time (UTC)."""
    last = max((run_number(path) for path in folder.glob("[0-9]*")), default=0)
    return f"{last + 1:04d}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"


def open_run(notebook: str, params: Record) -> Run:
    """The run that a notebook, such as "01_calibration", writes to.

    params : the parameters that determine the metrics; runs where they differ are not compared. Of
        a notebook's `globals()`: what its cells annotate, `name: type = value`.
    """
    shell = getattr(builtins, "get_ipython", lambda: None)()
    if "__builtins__" in params:
        params = {name: params[name] for name in annotated(shell.user_ns["In"])}
    params = dict(params)
    seed = params.pop("seed")
    busy = None if shell is None else why_busy()
    if busy:
        print(f"This machine is busy: {busy}. Times below mean little.", file=sys.stderr)
    if given := os.environ.get("MOELAB_RUN_DIR"):
        return Run(notebook, params, seed, Path(given), busy=busy)
    if shell is not None:
        from moelab.viz.notebook import follow_the_theme

        follow_the_theme()
    folder = results_root() / "runs" / notebook
    remove_leftovers(folder)
    name = new_run_id(folder) + LAB
    return Run(notebook, params, seed, folder / part_name(name), folder / name, busy)


def part_name(run: str) -> str:
    """What a run's directory is called until it is finished: by it, `remove_leftovers` knows who
    writes there."""
    return f"{run}@{platform.node()}@{os.getpid()}.part"


def annotated(cells: Iterable[str]) -> list[str]:
    """The names that a notebook's cells assign as `name: type = value`: its parameters."""
    names = [
        match for cell in cells for match in re.findall(r"^(\w+): [^=\n]+ = ", cell, re.MULTILINE)
    ]
    return list(dict.fromkeys(names))


@dataclass
class Run:
    """The findings of one execution of a notebook; `open_run` makes one.

    home : what `directory` is renamed to by `save`; None where the runner does it. busy : why times
        mean little, if they do.
    """

    notebook: str
    params: Record
    seed: int
    directory: Path
    home: Path | None = None
    busy: str | None = None
    opened: float = field(default_factory=time.monotonic, repr=False)
    metrics: Records = field(default_factory=dict)
    figures: dict[str, dict[str, str]] = field(default_factory=dict)
    takeaways: list[Record] = field(default_factory=list)
    tables: dict[str, list[list[Any]]] = field(default_factory=dict)

    def metric(
        self,
        name: str,
        value: float | int | str,
        unit: str = "",
        kind: str = "measured",
        readings: Numbers | None = None,
    ) -> None:
        """Note one finite number, text or truth value; the same name again replaces it.

        readings : what it is by other choices, by their names, where the source leaves one open;
            claims are to hold by each (`moelab.claims`).
        """
        require("kind of number", kind, KINDS)
        self.metrics[name] = {"value": _plain(name, value), "unit": unit, "kind": kind}
        if readings:
            kept = {of: _plain(name, other) for of, other in readings.items()}
            self.metrics[name]["readings"] = kept

    def metrics_of(
        self, values: Mapping[str, float | int | str], unit: str = "", kind: str = "measured"
    ) -> None:
        """Note several of one unit and kind: {name: value}."""
        for name, value in values.items():
            self.metric(name, value, unit, kind)

    def takeaway(self, text: str, **numbers: float | int | str) -> None:
        """Show what a section concludes, and keep it with its numbers.

        text : Markdown whose fields are filled as by `str.format`: "{gain:.2f} ×" with gain=1.5.
        """
        said = text.format(**numbers)
        self.takeaways.append(
            {"text": said, "numbers": {name: _plain(name, of) for name, of in numbers.items()}}
        )
        from moelab.viz.notebook import say

        say(f"**Takeaway.** {said}")

    def table(
        self, title: str, first: Iterable[Mapping[str, Any]] | Sequence[str], *rows: Sequence[Any]
    ) -> None:
        """Show a table under its title, and keep it: of dictionaries, column → cell, or of a head
        and its rows."""
        from moelab.base.table import format_value, head_and_rows, markdown_table
        from moelab.viz.notebook import say

        head, rows = (list(first), rows) if rows else head_and_rows(first)
        self.tables[title] = [head, *([format_value(cell) for cell in row] for row in rows)]
        say(f"**{title}**\n\n{markdown_table(head, rows)}")

    def answered(self) -> list[Any]:
        """The sources' claims that this notebook's metrics answer: rows of `moelab.claims`."""
        from moelab import claims

        own = [of for of in claims.ledger() if of.metric[:1] == (self.notebook,)]
        return claims.rows(own, own={self.notebook: self.metrics}) if own else []

    def verdicts(self) -> None:
        """Show them beside what was found."""
        from moelab import claims
        from moelab.viz.notebook import say, table

        if rows := self.answered():
            say(
                f"**{claims.summary(rows)}** Rules are those of `moelab.claims`, numbers of "
                "this run's parameters."
            )
            table(claims.HEAD, *(row.cells for row in rows))

    def figure(self, name: str, fig: Any, caption: str, alt: str) -> None:
        """Show a plotly figure in the notebook and keep it.

        name : a file name without suffix. caption : what it shows, and the kind of its numbers. alt
        : it in words."""
        from moelab.viz import theme
        from moelab.viz.notebook import show

        if not (re.fullmatch(r"[\w-]+", name) and caption.strip() and alt.strip()):
            raise ValueError(
                f"figure {name!r} needs a name of letters, digits, - and _, a caption, and a text that "
                "describes it (alt)"
            )
        content = {"caption": caption, "alt": alt, "figure": theme.to_json(fig)}
        write_json(self.directory / "figures" / f"{name}.json", content)
        self.figures[name] = {"file": f"figures/{name}.json", "caption": caption, "alt": alt}
        show(fig, caption, alt, name)

    def save(self) -> Path:
        """Write metrics.json; returns its path. Call it in the last cell; a cell may be run again
        afterwards."""
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB, but on macOS bytes
        content = {
            "schema": SCHEMA,
            "notebook": self.notebook,
            "params": self.params,
            "seed": self.seed,
            "seconds": round(time.monotonic() - self.opened, 1),
            "peak_bytes": most * (1 if sys.platform == "darwin" else 1024),
            "env": environment() | {"busy": self.busy, "load": load_average()},
            "packages": sorted(f"{d.name}=={d.version}" for d in metadata.distributions()),
        }
        for name in ("takeaways", "metrics", "figures", "tables"):
            content[name] = getattr(self, name)
        write_json(self.directory / "metrics.json", content)
        if self.home is not None:
            os.replace(self.directory, self.home)
            self.directory, self.home = self.home, None
        return self.directory / "metrics.json"


def _plain(name: str, value: Any) -> float | int | str | bool:
    """`value` as JSON knows it: numpy and torch scalars become Python's."""
    if getattr(value, "size", 0) == 1 or getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, (int, float, str)) or value in (math.inf, -math.inf) or value != value:
        raise ValueError(
            f"{name!r} is {value!r}; it must be one finite number, text or truth value, so say in "
            "words what happened instead"
        )
    return value
