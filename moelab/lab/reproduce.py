"""`python -m moelab reproduce`: runs the notebooks one after the other, prints a table and writes the report.

A notebook that fails does not stop the others, but sets the exit status. Parameters given with `-p` go to every
notebook that has them.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from moelab.files import read_json
from moelab.lab.report import write_report
from moelab.lab.runner import (NotebookFailed, add_run_options, check_parameters, inspect, notebooks, run_notebook,
                               split_assignments)
from moelab.table import format_value, text_table

SHOWN_METRICS = 3


def share_parameters(paths: list[Path], given: dict[str, Any]) -> dict[Path, dict[str, Any]]:
    """To every notebook the parameters that it has, checked; ValueError for one that none of them has."""
    valid = {path: inspect(path) for path in paths}
    for name in given:
        if not any(name in parameters for parameters in valid.values()):
            known = sorted({name for parameters in valid.values() for name in parameters})
            raise ValueError(f"no notebook has a parameter {name!r}; they have {', '.join(known) or 'none'}")
    return {path: check_parameters(path, {k: v for k, v in given.items() if k in valid[path]}) for path in paths}


def reproduce(paths: list[Path], given: dict[str, Any], results: str | None, timeout: float) -> int:
    """Run, print the table, write the report; returns how many notebooks failed."""
    parameters = share_parameters(paths, given)
    rows, errors = [], []
    for number, path in enumerate(paths, 1):
        print(f"[{number}/{len(paths)}] {path.stem} …", flush=True)
        start, status, main_metrics = time.monotonic(), "ok", ""
        try:
            metrics = run_notebook(path, parameters[path], results, timeout) / "metrics.json"
            found = read_json(metrics)["metrics"] if metrics.exists() else {}
            main_metrics = "; ".join(f"{name} {format_value(m['value'])} {m['unit']} [{m['kind']}]"
                                     for name, m in list(found.items())[:SHOWN_METRICS])
        except NotebookFailed as failure:
            status, main_metrics = "FAILED", failure.error.splitlines()[0]
            errors.append(str(failure))
        rows.append([path.stem, status, f"{time.monotonic() - start:.1f} s", main_metrics])
        print(f"[{number}/{len(paths)}] {path.stem}: {status}, {rows[-1][2]}", flush=True)
    for error in errors:
        print(f"\n{error}", file=sys.stderr)
    print("\n" + text_table(["notebook", "status", "time", "first metrics"], rows))
    print(f"\nReport: {write_report(results)}")
    return len(errors)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebooks", nargs="*", help="numbers or names; all if none")
    parser.add_argument("--full", action="store_true", help="the large setting of every notebook that has one "
                                                            "(-p full=true)")
    add_run_options(parser)


def main(args: argparse.Namespace) -> int:
    paths = notebooks(args.notebooks)
    if not paths:
        raise FileNotFoundError("there are no notebooks in notebooks/; run this from a clone of the repository")
    given = split_assignments(args.parameter + ["full=true"] * args.full)
    return 1 if reproduce(paths, given, args.results, args.timeout) else 0
