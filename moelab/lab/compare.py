"""`moelab compare`: two runs side by side, the two newest of a notebook or any two."""

from __future__ import annotations

import argparse

from moelab.base.table import text_table
from moelab.comparison import HEAD, compare, finished_runs
from moelab.lab.runner import notebooks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="two runs, each a folder or a notebook, by name or number, for its newest one; or one "
        "notebook, for its two newest",
    )


def main(args: argparse.Namespace) -> int:
    runs = args.runs
    if len(runs) == 1:
        runs = finished_runs(notebooks(runs)[0].stem, lab=True)[-2:]
    if len(runs) != 2:
        raise ValueError(
            f"two runs are compared, and there are {len(runs)}; `moelab run NOTEBOOK` makes one, "
            "`moelab list` shows those there are"
        )
    found = compare(*runs)
    if found.params:
        rows = [[name, *map(str, of)] for name, of in found.params.items()]
        print(text_table(["parameter", *found.names], rows), end="\n\n")
    print(text_table([*HEAD, *found.names, ""], found.cells))
    return 0
