"""`moelab check`: compares the newest run of every notebook with the committed baseline.

    exact, paper          equal
    simulated, modelled   within a relative tolerance, 2 % unless the baseline's metric has its own
                          "tolerance"
    measured              never fails; shown as a ratio to the baseline

A metric that is missing, one whose kind or unit changed, and a run with other parameters than the
baseline's fail. What differs is printed, and of a notebook in which nothing does, one line;
measured metrics with `--all` only. `--update` writes the baselines from the newest runs and keeps
the tolerances that were set by hand."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from moelab.base.arguments import described
from moelab.base.files import read_json, results_root, write_json
from moelab.base.records import Record
from moelab.base.table import text_table
from moelab.comparison import (
    MetricsFile,
    are_numbers,
    finished_runs,
    resolved,
)
from moelab.lab.results import SCHEMA
from notebooks.compare import Metric, side_by_side

TOLERANCE = 0.02
HEAD = ["metric", "kind", "baseline", "now", "", ""]


class Row(NamedTuple):
    """One compared metric; `verdict` is "ok", "FAILED", "shown" or "new"."""

    name: str
    kind: str
    baseline: Any
    now: Any
    verdict: str
    note: str = ""


def compare(baseline: Record, found: Record) -> list[Row]:
    """Compare a baseline and a run's metrics.json: {"params", "seed", "metrics": {name: {"value",
    "unit", "kind"}}}."""
    params, metrics = side_by_side(baseline, found)
    rows = [Row(name, "", *of, "FAILED", "another parameter") for name, of in params.items()]
    for of in metrics:
        tolerance = baseline["metrics"].get(of.name, {}).get("tolerance", TOLERANCE)
        rows.append(Row(of.name, of.kind, *of.values, *_judged(of, tolerance)))
    return rows


def _judged(metric: Metric, tolerance: float) -> tuple[str, str]:
    """(verdict, note)."""
    was, now = metric.values
    if was is None:
        return "new", "not in the baseline; --update adds it"
    if now is None:
        return "FAILED", "missing in the run"
    if "/" in metric.kind or " / " in metric.unit:
        return "FAILED", f"was {metric.kind} [{metric.unit}]".replace(" / ", " and is ")
    if metric.kind == "measured":
        return "shown", metric.note
    if metric.kind in ("simulated", "modelled") and are_numbers(was, now):
        ok = abs(now - was) <= tolerance * abs(was)
        return "ok" if ok else "FAILED", f"{metric.note or 'differs'}, {tolerance:.2%} allowed"
    return ("ok", "") if was == now else ("FAILED", "must be equal")


def _newest(notebook: str, results: Path) -> Record | None:
    """metrics.json of the newest finished run; None where there is none."""
    runs = finished_runs(notebook, results)
    return read_json(runs[-1] / "metrics.json", MetricsFile) if runs else None


def _update(path: Path, found: Record, busy: bool) -> None:
    """Write a baseline from the metrics of a run; tolerances in it stay. ValueError: the run's
    machine was busy, and that was not said to be all right."""
    if (why := found.get("env", {}).get("busy")) and not busy:
        raise ValueError(
            f"{path.stem} ran on a busy machine ({why}), so its times would mean little: run it "
            "again on a quiet one, or give --busy"
        )
    old = read_json(path, MetricsFile)["metrics"] if path.exists() else {}
    metrics = {
        name: metric | {k: v for k, v in old.get(name, {}).items() if k == "tolerance"}
        for name, metric in found["metrics"].items()
    }
    about = {"schema": SCHEMA, "notebook": path.stem}
    about |= {"params": found["params"], "seed": found["seed"]}
    print(f"wrote {write_json(path, about | {'metrics': metrics})}")


add_arguments = described(__file__)


def _check(name: str, results: Path, everything: bool) -> bool | None:
    """Print how a notebook's newest run compares with its baseline; whether it failed, None where
    there is no baseline."""
    path = results / "baseline" / f"{name}.json"
    found = _newest(name, results)
    if found is None:
        print(f"{name}: FAILED, no finished run with run.save(); `moelab run {name}` makes one")
        return True
    if not path.exists():
        print(f"{name}: no baseline; `moelab check {name} --update` writes it")
        return None
    rows = compare(read_json(path, MetricsFile), found)
    bad = sum(row.verdict == "FAILED" for row in rows)
    print(f"{name}: {f'{bad} FAILED' if bad else 'ok'}, {len(rows)} compared")
    if shown := [row for row in rows if everything or row.verdict in ("FAILED", "new")]:
        print(text_table(HEAD, shown))
    return bad > 0


def main(args: argparse.Namespace) -> int:
    results = results_root()
    known = {path.stem for path in (results / "baseline").glob("*.json")}
    known |= {of.name for of in (results / "runs").glob("*") if finished_runs(of.name, results)}
    if not known:
        raise ValueError(
            f"nothing to check: no baseline and no run in {results}; first: moelab reproduce"
        )
    names = [resolved(of, known) for of in args.notebooks] or sorted(known)
    if args.update:
        for name in names:
            if (found := _newest(name, results)) is not None:
                _update(results / "baseline" / f"{name}.json", found, args.busy)
            else:
                print(f"{name}: no finished run; its baseline stays as it is")
        return 0
    judged = [_check(name, results, args.all) for name in names]
    compared = [failed for failed in judged if failed is not None]
    print(f"{len(compared)} notebooks compared, {sum(compared)} failed")
    return 1 if any(compared) or not compared else 0
