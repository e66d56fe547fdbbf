"""`python -m moelab check`: does the newest run of every notebook still find what the committed baseline says?

    exact, paper          equal
    simulated, modelled   within a relative tolerance, 2 % unless the baseline's metric has its own "tolerance"
    measured              never decides; shown as a ratio to the baseline

A metric that is gone, one whose kind changed, and a run with other parameters than the baseline's fail. A metric
that the baseline does not have yet is shown. `--update` writes the baselines from the newest runs and keeps the
tolerances that were set by hand.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelab.files import read_json, results_root, write_json
from moelab.lab.results import SCHEMA, finished_runs
from moelab.table import format_value, text_table

TOLERANCE = 0.02


@dataclass(frozen=True)
class Row:
    """One compared metric; `verdict` is "ok", "FAILED", "shown" or "new"."""

    name: str
    kind: str
    baseline: Any
    now: Any
    verdict: str
    note: str = ""


def compare(baseline: dict[str, Any], found: dict[str, Any]) -> list[Row]:
    """Compare the contents of a baseline and of a run's metrics.json.

    Parameters
    ----------
    baseline, found : {"params", "seed", "metrics": {name: {"value", "unit", "kind"}}}.
    """
    rows = []
    for name in ("params", "seed"):
        if baseline[name] != found[name]:
            rows.append(Row(name, "", baseline[name], found[name], "FAILED", "the run had other parameters"))
    for name, old in baseline["metrics"].items():
        new = found["metrics"].get(name)
        if new is None:
            rows.append(Row(name, old["kind"], old["value"], None, "FAILED", "missing in the run"))
        elif (new["kind"], new["unit"]) != (old["kind"], old["unit"]):
            note = f"was {old['kind']} [{old['unit']}], is {new['kind']} [{new['unit']}]"
            rows.append(Row(name, new["kind"], old["value"], new["value"], "FAILED", note))
        else:
            rows.append(_compare_values(name, old, new["value"]))
    for name, new in found["metrics"].items():
        if name not in baseline["metrics"]:
            rows.append(Row(name, new["kind"], None, new["value"], "new", "not in the baseline; --update adds it"))
    return rows


def _compare_values(name: str, old: dict[str, Any], now: Any) -> Row:
    was, kind = old["value"], old["kind"]
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (was, now))
    if kind == "measured":
        note = f"{now / was:.2f} × the baseline" if numbers and was else ""
        return Row(name, kind, was, now, "shown", note)
    if kind in ("simulated", "modelled") and numbers:
        tolerance = old.get("tolerance", TOLERANCE)
        off = abs(now - was) / abs(was) if was else float(now != was)
        note = f"{off:.2%} off, {tolerance:.2%} allowed" if off else ""
        return Row(name, kind, was, now, "ok" if off <= tolerance else "FAILED", note)
    same = was == now and isinstance(was, str) == isinstance(now, str)
    return Row(name, kind, was, now, "ok" if same else "FAILED", "" if same else "must be equal")


def baseline_path(notebook: str, results: str | Path | None = None) -> Path:
    return results_root(results) / "baseline" / f"{notebook}.json"


def newest_metrics(notebook: str, results: str | Path | None = None) -> dict[str, Any] | None:
    """metrics.json of the newest finished run; None where there is no run.

    Raises
    ------
    ValueError : the newest run wrote no metrics.
    """
    runs = finished_runs(notebook, results)
    if not runs:
        return None
    if not (runs[-1] / "metrics.json").exists():
        raise ValueError(f"{runs[-1]} has no metrics.json; the notebook must end with run.save()")
    return read_json(runs[-1] / "metrics.json")


def update(notebook: str, results: str | Path | None = None) -> Path:
    """Write the baseline of a notebook from its newest run; returns its path."""
    found = newest_metrics(notebook, results)
    if found is None:
        raise FileNotFoundError(f"no finished run of {notebook}; first: python -m moelab run {notebook}")
    path = baseline_path(notebook, results)
    old = read_json(path)["metrics"] if path.exists() else {}
    metrics = {name: metric | ({"tolerance": old[name]["tolerance"]} if "tolerance" in old.get(name, {}) else {})
               for name, metric in found["metrics"].items()}
    write_json(path, {"schema": SCHEMA, "notebook": notebook, "params": found["params"], "seed": found["seed"],
                      "metrics": metrics})
    return path


def _names(wanted: list[str], results: Path) -> list[str]:
    """Notebooks by name or number, among those that have a baseline or a run; all without `wanted`."""
    known = {path.stem for path in (results / "baseline").glob("*.json")}
    known |= {path.name for path in (results / "runs").glob("*") if finished_runs(path.name, results)}
    if not wanted:
        return sorted(known)
    names = []
    for want in wanted:
        matches = [name for name in known if name == want or name.split("_")[0] == want.zfill(2)]
        if len(matches) != 1:
            raise ValueError(f"no notebook {want!r} among the baselines and runs: {', '.join(sorted(known)) or 'none'}")
        names += matches
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebooks", nargs="*", help="names or numbers; all that have a baseline if none")
    parser.add_argument("--update", action="store_true", help="write the baselines from the newest runs")
    parser.add_argument("--results", metavar="FOLDER", help="where results lie (results/, or $MOELAB_RESULTS)")


def main(args: argparse.Namespace) -> int:
    results = results_root(args.results)
    names = _names(args.notebooks, results)
    if not names:
        raise ValueError(f"nothing to check: no baseline and no run in {results}; first: python -m moelab reproduce")
    failed = compared = 0
    for name in names:
        if args.update:
            if finished_runs(name, results):
                print(f"wrote {update(name, results)}")
            else:
                print(f"{name}: no finished run; its baseline stays as it is")
            continue
        if not baseline_path(name, results).exists():
            print(f"{name}: no baseline; `python -m moelab check {name} --update` writes it")
            failed += bool(args.notebooks)      # asked for by name, it is expected to be there
            continue
        compared += 1
        found = newest_metrics(name, results)
        if found is None:
            print(f"{name}: FAILED, no finished run; `python -m moelab run {name}` makes one")
            failed += 1
            continue
        rows = compare(read_json(baseline_path(name, results)), found)
        bad = sum(row.verdict == "FAILED" for row in rows)
        failed += bool(bad)
        print(f"{name}: {f'{bad} FAILED' if bad else 'ok'}, {len(rows)} compared")
        print(text_table(["metric", "kind", "baseline", "now", "", ""],
                         [[r.name, r.kind, format_value(r.baseline), format_value(r.now), r.verdict, r.note]
                          for r in rows]))
    if args.update:
        return 0
    print(f"{compared} notebooks compared, {failed} failed")
    return 1 if failed or not compared else 0
