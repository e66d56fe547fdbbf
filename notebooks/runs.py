"""`moelab list`: the notebooks, and of each its saved runs, those in JupyterLab (-lab)
included."""

from __future__ import annotations

import argparse

from moelab.base.files import read_json, results_root
from moelab.base.table import duration, size, text_table
from moelab.comparison import MetricsFile, finished_runs
from moelab.lab.runner import notebooks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def main(args: argparse.Namespace) -> int:
    root = results_root()
    rows = []
    names = {path.stem for path in notebooks()} | {path.name for path in (root / "runs").glob("*")}
    for name in sorted(names):
        runs = finished_runs(name, root, lab=True)
        for run in runs:
            about = read_json(run / "metrics.json", MetricsFile)
            took, memory = about.get("seconds"), about.get("peak_bytes")
            given = " ".join(f"{key}={value}" for key, value in about["params"].items())
            took, memory = took and duration(took), memory and size(memory)
            rows.append([name, run.name, took, memory, f"{given} seed={about['seed']}"])
        if not runs:
            rows.append([name, "no finished run", None, None, ""])
    print(text_table(["notebook", "run", "took", "peak memory", "parameters"], rows))
    return 0
