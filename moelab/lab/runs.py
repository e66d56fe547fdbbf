"""`moelab list`: the notebooks, and of each its finished runs, those in JupyterLab (-lab)
included."""

from __future__ import annotations

import argparse

from moelab.comparison import RunFile, finished_runs
from moelab.files import read_json, results_root
from moelab.lab.runner import notebooks
from moelab.table import duration, size, text_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", metavar="FOLDER", help="where results lie (results/, or $MOELAB_RESULTS)"
    )


def main(args: argparse.Namespace) -> int:
    root = results_root(args.results)
    rows = []
    names = {path.stem for path in notebooks()} | {path.name for path in (root / "runs").glob("*")}
    for name in sorted(names):
        runs = finished_runs(name, root, lab=True)
        for run in runs:
            path = run / "run.json"
            about = read_json(path, RunFile) if path.exists() else {"parameters": {}}
            given = " ".join(f"{key}={value}" for key, value in about["parameters"].items())
            took = duration(about["seconds"]) if "seconds" in about else None
            memory = size(about["peak_bytes"]) if "peak_bytes" in about else None
            rows.append([name, run.name, took, memory, given])
        if not runs:
            rows.append([name, "no finished run", None, None, ""])
    print(text_table(["notebook", "run", "took", "peak memory", "parameters"], rows))
    return 0
