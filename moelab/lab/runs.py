"""`moelab list`: the notebooks, and of each its finished runs, those in JupyterLab (-lab)
included."""

from __future__ import annotations

import argparse

from moelab.comparison import RunFile, finished_runs
from moelab.files import read_json, results_root
from moelab.lab.runner import memory_of, notebooks
from moelab.table import text_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--results", metavar="FOLDER", help="where results lie (results/, or $MOELAB_RESULTS)"
    )


def main(args: argparse.Namespace) -> int:
    root = results_root(args.results)
    rows = []
    names = {path.stem for path in notebooks()} | {
        path.name for path in (root / "runs").glob("*") if path.is_dir()
    }
    for name in sorted(names):
        runs = finished_runs(name, root, lab=True)
        abouts = [
            read_json(run / "run.json", RunFile) if (run / "run.json").exists() else {}
            for run in runs
        ]
        rows += [
            [
                name,
                run.name,
                f"{about['seconds']:.0f} s" if about else "",
                memory_of(about),
                " ".join(f"{key}={value}" for key, value in about.get("parameters", {}).items()),
            ]
            for run, about in zip(runs, abouts)
        ] or [[name, "no finished run", "", "", ""]]
    print(text_table(["notebook", "run", "took", "peak memory", "parameters"], rows))
    return 0
