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

from moelab.comparison import MetricsFile, are_numbers, finished_runs, is_named
from moelab.files import read_json, results_root, write_json
from moelab.lab.results import SCHEMA
from moelab.records import Record
from moelab.registry import require
from moelab.table import text_table

TOLERANCE = 0.02


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
    rows = [
        Row(name, "", baseline[name], found[name], "FAILED", "the run had other parameters")
        for name in ("params", "seed")
        if baseline[name] != found[name]
    ]
    for name, old in baseline["metrics"].items():
        new = found["metrics"].get(name)
        if new is None:
            rows.append(Row(name, old["kind"], old["value"], None, "FAILED", "missing in the run"))
        elif (new["kind"], new["unit"]) != (old["kind"], old["unit"]):
            note = f"was {old['kind']} [{old['unit']}], is {new['kind']} [{new['unit']}]"
            rows.append(Row(name, new["kind"], old["value"], new["value"], "FAILED", note))
        else:
            rows.append(
                Row(
                    name,
                    old["kind"],
                    old["value"],
                    new["value"],
                    *_compare_values(old, new["value"]),
                )
            )
    return rows + [
        Row(name, new["kind"], None, new["value"], "new", "not in the baseline; --update adds it")
        for name, new in found["metrics"].items()
        if name not in baseline["metrics"]
    ]


def _compare_values(old: Record, now: Any) -> tuple[str, str]:
    """(verdict, note)."""
    was = old["value"]
    kind = old["kind"]
    numbers = are_numbers(was, now)
    if kind == "measured":
        return "shown", f"{now / was:.2f} × the baseline" if numbers and was else ""
    if kind in ("simulated", "modelled") and numbers:
        tolerance = old.get("tolerance", TOLERANCE)
        off = abs(now - was) / abs(was) if was else float(now != was)
        return (
            "ok" if off <= tolerance else "FAILED",
            f"{off:.2%} off, {tolerance:.2%} allowed" if off else "",
        )
    same = was == now and isinstance(was, str) == isinstance(now, str)
    return ("ok", "") if same else ("FAILED", "must be equal")


def _newest_metrics(notebook: str, results: Path) -> Record | None:
    """metrics.json of the newest finished run; None where there is no run."""
    runs = finished_runs(notebook, results)
    if runs and not (runs[-1] / "metrics.json").exists():
        raise ValueError(f"{runs[-1]} has no metrics.json; the notebook must end with run.save()")
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
    write_json(
        path,
        {
            "schema": SCHEMA,
            "notebook": path.stem,
            "params": found["params"],
            "seed": found["seed"],
            "metrics": metrics,
        },
    )
    print(f"wrote {path}")


def _names(wanted: list[str], results: Path) -> list[str]:
    """Notebooks by name or number, among those that have a baseline or a run; all without
    `wanted`."""
    known = {path.stem for path in (results / "baseline").glob("*.json")}
    known |= {
        path.name for path in (results / "runs").glob("*") if finished_runs(path.name, results)
    }
    names = []
    for want in wanted:
        matches = [name for name in known if is_named(name, want)]
        if len(matches) != 1:
            require("baseline or run of a notebook", want, sorted(known))
        names += matches
    return names if wanted else sorted(known)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "notebooks", nargs="*", help="names or numbers; all that have a baseline if none"
    )
    parser.add_argument(
        "--update", action="store_true", help="write the baselines from the newest runs"
    )
    parser.add_argument(
        "--busy", action="store_true", help="update them from runs on a busy machine, too"
    )
    parser.add_argument(
        "--all", action="store_true", help="print every metric, not only those that differ"
    )
    parser.add_argument(
        "--results", metavar="FOLDER", help="where results lie (results/, or $MOELAB_RESULTS)"
    )


def main(args: argparse.Namespace) -> int:
    results = results_root(args.results)
    names = _names(args.notebooks, results)
    if not names:
        raise ValueError(
            f"nothing to check: no baseline and no run in {results}; first: moelab reproduce"
        )
    failed = compared = 0
    for name in names:
        path = results / "baseline" / f"{name}.json"
        found = _newest_metrics(name, results)
        if args.update:
            if found is None:
                print(f"{name}: no finished run; its baseline stays as it is")
            else:
                _update(path, found, args.busy)
        elif not path.exists():
            print(f"{name}: no baseline; `moelab check {name} --update` writes it")
            failed += bool(args.notebooks)  # asked for by name, it is expected to be there
        elif found is None:
            print(f"{name}: FAILED, no finished run; `moelab run {name}` makes one")
            compared = compared + 1
            failed = failed + 1
        else:
            rows = compare(read_json(path, MetricsFile), found)
            bad = sum(row.verdict == "FAILED" for row in rows)
            compared = compared + 1
            failed = failed + bool(bad)
            print(f"{name}: {f'{bad} FAILED' if bad else 'ok'}, {len(rows)} compared")
            if differing := [row for row in rows if args.all or row.verdict in ("FAILED", "new")]:
                print(
                    text_table(
                        ["metric", "kind", "baseline", "now", "", ""],
                        [[r.name, r.kind, r.baseline, r.now, r.verdict, r.note] for r in differing],
                    )
                )
    if args.update:
        return 0
    print(f"{compared} notebooks compared, {failed} failed")
    return 1 if failed or not compared else 0
