"""`moelab reproduce`: runs the notebooks, prints a table and builds the site with what they found.

Notebooks that measure times run one after the other; those tagged `side-by-side` then two at a
time, unless a model is given, of which there may be memory for one only. A notebook that fails does
not stop the others, but sets the exit status. Parameters given with `-p` go to every notebook that
has them."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from multiprocessing.pool import ThreadPool
from pathlib import Path

from moelab.comparison import MetricsFile
from moelab.files import CHECKOUT, read_json, results_root
from moelab.lab.runner import (
    NotebookFailed,
    add_run_options,
    check_parameters,
    inspect,
    is_side_by_side,
    notebooks,
    run_notebook,
    split_assignments,
)
from moelab.table import format_value, text_table

SHOWN_METRICS = 3


def build_site(results: Path) -> str:
    """Build docs/ with the newest runs of a folder of results; where the site is, or how to get it."""
    if CHECKOUT is None or not (find_spec("sphinx") and find_spec("myst_nb")):
        return "The site shows all of it: pip install -e '.[lab,docs]' in a clone, then make docs"
    site = CHECKOUT / "build" / "site"
    command = [sys.executable, "-m", "sphinx", "-q", "docs", str(site)]
    own = os.environ | {"MOELAB_RESULTS": str(results)}
    built = subprocess.run(command, cwd=CHECKOUT, env=own)
    return f"Site: {site / 'found.html'}" if built.returncode == 0 else "The site was not built"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebooks", nargs="*", help="numbers or names; all if none")
    parser.add_argument(
        "--full",
        action="store_true",
        help="the large setting of every notebook that has one (-p full=true)",
    )
    add_run_options(parser)


def main(args: argparse.Namespace) -> int:
    paths = notebooks(args.notebooks)
    if not paths:
        raise FileNotFoundError(
            "there are no notebooks in notebooks/; run this from a clone of the repository"
        )
    given = split_assignments(args.parameter + ["full=true"] * args.full)
    valid = {path: inspect(path) for path in paths}
    known = sorted({name for parameters in valid.values() for name in parameters})
    for name in given:
        if name not in known:
            raise ValueError(
                f"no notebook has a parameter {name!r}; they have {', '.join(known) or 'none'}"
            )
    parameters = {
        path: check_parameters(
            path, {name: value for name, value in given.items() if name in valid[path]}
        )
        for path in paths
    }
    errors = []

    def run(path: Path) -> list[str]:
        at = f"[{paths.index(path) + 1}/{len(paths)}] {path.stem}"
        print(f"{at} …", flush=True)
        start = time.monotonic()
        status = "ok"
        first = ""
        try:
            metrics = (
                run_notebook(path, parameters[path], args.results, args.timeout) / "metrics.json"
            )
            found = read_json(metrics, MetricsFile)["metrics"] if metrics.exists() else {}
            first = "; ".join(
                f"{name} {format_value(m['value'])} {m['unit']} [{m['kind']}]"
                for name, m in list(found.items())[:SHOWN_METRICS]
            )
        except NotebookFailed as failure:
            status = "FAILED"
            first = failure.error.splitlines()[0]
            errors.append(str(failure))
        took = f"{time.monotonic() - start:.1f} s"
        print(f"{at}: {status}, {took}", flush=True)
        return [path.stem, status, took, first]

    together = [] if given.get("model") else [path for path in paths if is_side_by_side(path)]
    rows = [run(path) for path in paths if path not in together]
    with ThreadPool(2) as pool:  # its threads end with the process, as after Ctrl-C
        rows = sorted(rows + pool.map(run, together, chunksize=1), key=lambda row: row[0])
    for error in errors:
        print(f"\n{error}", file=sys.stderr)
    print("\n" + text_table(["notebook", "status", "time", "first metrics"], rows))
    print(f"\n{build_site(results_root(args.results))}")
    return 1 if errors else 0
