"""`moelab reproduce`: runs the notebooks and prints a table; `make docs` shows what they found.

Notebooks that measure times run one after the other; those tagged `side-by-side` then two at a
time, unless a model is given, of which there may be memory for one only. A notebook that fails does
not stop the others, but sets the exit status. Parameters given with `-p` go to every notebook that
has them."""

from __future__ import annotations

import argparse
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path

from moelab.base.arguments import described
from moelab.base.registry import require
from moelab.base.table import duration, text_table
from moelab.lab import runner
from moelab.lab.runner import (
    NotebookFailed,
    check_parameters,
    inspect,
    notebooks,
    run_notebook,
    split_assignments,
    tagged,
)

add_arguments = described(runner.__file__, "several", "how")


def main(args: argparse.Namespace) -> int:
    paths = notebooks(args.notebooks)
    if not paths:
        raise FileNotFoundError(
            "there are no notebooks in notebooks/; run this from a clone of the repository"
        )
    given = split_assignments(args.parameter)
    valid = {path: inspect(path) for path in paths}
    for name in given:
        require("parameter of a notebook", name, {of for known in valid.values() for of in known})
    parameters = {
        path: check_parameters(path, {name: of for name, of in given.items() if name in known})
        for path, known in valid.items()
    }
    errors = []

    def run(path: Path) -> list[str]:
        at = f"[{paths.index(path) + 1}/{len(paths)}] {path.stem}"
        print(f"{at} …", flush=True)
        start, status = time.monotonic(), "ok"
        try:
            run_notebook(path, parameters[path], args.timeout)
        except NotebookFailed as failure:
            status = f"FAILED: {failure.error.splitlines()[0]}"
            errors.append(str(failure))
        took = duration(time.monotonic() - start)
        print(f"{at}: {status}, {took}", flush=True)
        return [path.stem, took, status]

    together = (
        [] if given.get("model") else [path for path in paths if tagged(path, "side-by-side")]
    )
    rows = [run(path) for path in paths if path not in together]
    with ThreadPool(2) as pool:  # its threads end with the process, as after Ctrl-C
        rows = sorted(rows + pool.map(run, together, chunksize=1), key=lambda row: row[0])
    for error in errors:
        print(f"\n{error}", file=sys.stderr)
    print("\n" + text_table(["notebook", "time", "status"], rows))
    return 1 if errors else 0
