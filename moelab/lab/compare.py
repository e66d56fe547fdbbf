"""`python -m moelab compare`: the metrics of two runs side by side, the two newest of a notebook or two folders."""

from __future__ import annotations

import argparse
from pathlib import Path

from moelab.files import finished_runs, read_json, results_root
from moelab.lab.check import are_numbers
from moelab.lab.runner import notebooks
from moelab.table import text_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN",
                        help="the folders of two runs, or one notebook, by name or number, for its two newest")
    parser.add_argument("--results", metavar="FOLDER", help="where results lie (results/, or $MOELAB_RESULTS)")


def main(args: argparse.Namespace) -> int:
    if len(args.runs) == 1:
        path, = notebooks(args.runs)
        runs = finished_runs(path.stem, results_root(args.results))[-2:]
        if len(runs) < 2:
            raise ValueError(f"{path.stem} has {len(runs)} finished run(s), and two are compared; "
                             f"`python -m moelab run {path.stem}` makes one")
    else:
        runs = [Path(run) for run in args.runs]
        if len(runs) > 2:
            raise ValueError(f"{len(runs)} runs are given; two are compared")
    one, other = (read_json(run / "metrics.json")["metrics"] for run in runs)
    rows = []
    for name in one | other:
        a, b = (of.get(name, {}).get("value") for of in (one, other))
        rows.append([name, (one | other)[name]["kind"], a, b, f"{b / a:.3f} ×" if are_numbers(a, b) and a else ""])
    print(text_table(["metric", "kind", *(run.name for run in runs), ""], rows))
    return 0
