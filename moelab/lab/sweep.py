"""`moelab sweep`: a notebook or a bench at every point of a grid, here or on a cluster, and one
table of it.

Points run one at a time, in processes of their own, since they measure times; `--workers` runs
several at once. Each finished point is in a journal beside the table, so the same command goes on
where it was cut off, and a larger grid adds to what there is. The point of a worker that is lost
runs again; one that fails is told, and tried again by the next call. A row says what was asked,
what was found, and by which commit on which machine.

On several machines, start Dask in a clone of the same commit, one thread a worker, and give its
scheduler's address. Whoever reaches a scheduler without certificates runs code on all workers; with
them, which one configuration file (~/.config/dask/tls.yaml) gives to every command, only who has
one does:

    distributed:
      comm:
        require-encryption: true
        tls:
          ca-file: ca.pem
          scheduler: {cert: node.pem, key: node.key}
          worker: {cert: node.pem, key: node.key}
          client: {cert: node.pem, key: node.key}

    dask scheduler --protocol tls                   # listens on tls://HEAD:8786
    dask worker tls://HEAD:8786 --nthreads 1        # on every machine
    moelab sweep 03 --grid disk_mbs=10,20 seed=0,1,2 --scheduler tls://HEAD:8786

On one machine, `dask scheduler --host 127.0.0.1` needs none: its address is tcp://127.0.0.1:8786.

On SLURM, dask-jobqueue (`pip install dask-jobqueue`) does the first two; a file to start from:

    from dask_jobqueue import SLURMCluster
    with SLURMCluster(
            cores=1, job_cpu=16, memory="64GB", walltime="08:00:00",
            job_extra_directives=["--exclusive"], job_script_prologue=[
                "cd ~/moelab && source .venv/bin/activate"]) as cluster:
        cluster.scale(jobs=8)
        print(f"sweep with --scheduler {cluster.scheduler_address}")
        input("Enter ends the jobs")
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from functools import partial
from ipaddress import ip_address
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, Literal, NamedTuple, TypedDict

from moelab.arguments import output, whole
from moelab.bench import names as benches
from moelab.bench import parser_of, path_of
from moelab.bench.results import environment, metrics_of
from moelab.comparison import KeptMetric, MetricsFile, are_numbers
from moelab.files import CHECKOUT, absolute, atomic, read_json, results_root, writable
from moelab.journal import Journal
from moelab.lab.runner import (
    add_run_options,
    check_parameters,
    child_environment,
    notebooks,
    read_literal,
    run_notebook,
    split_assignments,
)
from moelab.progress import progress
from moelab.records import Record
from moelab.schema import Amount, naming, typed
from moelab.table import text_table

LOST = 3  # times that a worker may be lost without any point being finished
SHOWN_METRICS = 4
Point = Record  # parameter → value
Work = Callable[[Point], Record]  # a point → {"metrics": as in metrics.json, and more provenance}
Found = Iterator[tuple[Point, Record]]  # points as they end, each with its row or {"error": why}


class At(TypedDict):
    """Where, when and by which commit a point was run."""

    host: str
    seconds: Amount


class Row(NamedTuple):
    """A finished point: metrics as in metrics.json; where, when and by which commit it was run."""

    point: Point
    metrics: dict[str, KeptMetric]
    at: At


class _Column(TypedDict):
    """What a column of the table says of itself."""

    role: Literal["point", "metrics", "at"]
    name: str


def grid(axes: list[str], fixed: dict[str, str]) -> list[dict[str, str]]:
    """["a=1,2", "b=x,y"] → every combination, with what is fixed; `;` parts values that have
    commas."""
    values = {
        name: list(dict.fromkeys(part.strip() for part in text.split(";" if ";" in text else ",")))
        for name, text in split_assignments(axes, "--grid").items()
    }
    if twice := fixed.keys() & values.keys():
        raise ValueError(f"{', '.join(sorted(twice))}: both fixed and in the grid")
    if empty := [name for name, found in values.items() if "" in found]:
        raise ValueError(f"--grid {empty[0]}: write {empty[0]}=VALUE,VALUE")
    return [fixed | dict(zip(values, of)) for of in product(*values.values())]


def notebook_point(notebook: str, results: str | None, timeout: float, point: Point) -> Record:
    """Run a notebook, by name or path, with these parameters."""
    directory = run_notebook(notebooks([notebook])[0], point, results, timeout)
    return {
        "metrics": read_json(directory / "metrics.json", MetricsFile)["metrics"],
        "run": str(directory),
    }


def bench_point(name: str, point: Point) -> Record:
    """Run a bench with these options in a process of its own, which ends if this one does."""
    code = (
        "import sys, threading; from moelab.lab.execute import exit_with_the_runner as end; "
        "threading.Thread(target=end, daemon=True).start(); from moelab.__main__ import "
        "main; sys.exit(main())"
    )
    with TemporaryFile("w+") as told, TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        given = [f"--output={path}", "--busy", *words(point)]  # a row says what disturbed it
        with subprocess.Popen(
            [sys.executable, "-c", code, "bench", name, *given],
            text=True,
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=told,
        ) as process:
            status = process.wait()
        told.seek(0)
        if status:
            raise RuntimeError(
                (told.read().strip() or f"bench {name} ended with status {status}").splitlines()[-1]
            )
        return {
            "metrics": {
                name: of for name, of in metrics_of(path).items() if of["value"] is not None
            }
        }


def words(point: Point) -> list[str]:
    """A point as options of a command line; "true" is a bare option, "false" is none."""
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in point.items()
        if value is not False
    ]


def attempt(work: Work, point: Point) -> Record:
    """On the worker: the point's metrics and provenance, or {"error": why it has none}."""
    began = datetime.now(UTC)
    start = time.monotonic()
    try:
        found = work(point)
    except Exception as error:  # of any kind: it is told, and the other points go on
        return {"error": str(error) or type(error).__name__}
    about = environment()
    versions = ", ".join(f"{name} {version}" for name, version in about.pop("versions").items())
    return {
        "metrics": found.pop("metrics"),
        "at": {
            "host": platform.node(),
            "started": began.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - start, 3),
        }
        | about
        | {"versions": versions}
        | found,
    }


def locally(work: Work, points: list[Point], workers: int = 1) -> Found:
    """Run points in processes of this machine. A process that is lost takes all of them with it:
    what they had begun is run again, and after `LOST` times without a finished point, the first of
    them counts as failed."""
    left = dict(enumerate(points))
    lost = 0
    while left:
        queue = list(left)
        running = {}
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            try:
                while queue or running:
                    while (
                        queue and len(running) < workers
                    ):  # no more, so that none begins after an interruption
                        i = queue.pop(0)
                        running[pool.submit(attempt, work, left[i])] = i
                    for future in wait(running, return_when=FIRST_COMPLETED).done:
                        found = future.result()
                        lost = 0
                        yield left.pop(running.pop(future)), found
            except BrokenProcessPool:
                lost += 1
        if lost == LOST:
            lost = 0
            first = next(iter(left))
            yield left.pop(first), {"error": f"its worker was lost {LOST} times: out of memory?"}


def on_dask(scheduler: str, work: Work, points: list[Point]) -> Found:
    """Run points on a Dask cluster, which gives those of a lost worker to another one.

    Raises ValueError: workers of several threads, an address of another kind, no certificates for
    tls://; OSError: no scheduler at this address, or it is lost."""
    from distributed import Client, as_completed

    reach(scheduler)
    for name in logging.root.manager.loggerDict:
        if name.partition(".")[0] == "distributed":  # it logs the traceback of a lost scheduler
            logging.getLogger(name).setLevel(logging.CRITICAL)
    with Client(scheduler) as client:
        several = [
            worker
            for worker, about in client.scheduler_info(n_workers=-1)["workers"].items()
            if about["nthreads"] > 1
        ]
        if several:
            raise ValueError(
                f"{', '.join(several)} would run several points at once, and their times "
                "disturb each other; start workers with --nthreads 1, more of them where "
                "that does not matter"
            )
        futures = {client.submit(attempt, work, point, pure=False): point for point in points}
        try:
            for future in as_completed(futures):
                yield (
                    futures[future],
                    (
                        {"error": str(future.exception())}
                        if future.status == "error"
                        else future.result()
                    ),
                )
        except CancelledError:
            raise ConnectionError(
                f"the scheduler at {scheduler} was lost; finished points are kept, and the same "
                "command goes on when it is there again"
            ) from None


def reach(scheduler: str) -> None:
    """Errors of `on_dask` before there is a client, which would be told with tracebacks; warns of
    an open scheduler."""
    import dask.config

    there = re.fullmatch(r"(tcp|tls)://(?:\[(.+)\]|([^:]+)):(\d{1,5})", scheduler)
    if there is None:
        raise ValueError(
            f"--scheduler is {scheduler!r}; write tls://HOST:PORT or, on this machine, "
            "tcp://HOST:PORT"
        )
    protocol = there[1]
    host = there[2] or there[3]
    port = int(there[4])
    missing = (
        [
            name
            for name in ("ca-file", "client.cert", "client.key")
            if not dask.config.get(f"distributed.comm.tls.{name}")
        ]
        if protocol == "tls"
        else []
    )
    if missing:
        raise ValueError(
            f"{scheduler} needs certificates, and dask's configuration has no distributed.comm.tls."
            f"{missing[0]}; `moelab sweep --help` shows the file"
        )
    try:
        with socket.create_connection((host, port), timeout=10) as connected:
            here = ip_address(connected.getpeername()[0]).is_loopback
    except (OSError, OverflowError) as error:
        raise ConnectionError(f"there is no scheduler at {scheduler}: {error}") from None
    if protocol == "tcp" and not here:
        print(
            f"moelab: {scheduler} has no certificates: whoever reaches it can run code on its "
            "workers, and on this machine; `moelab sweep --help` says how to use tls://",
            file=sys.stderr,
        )


def sweep(
    target: str, points: list[Point], table: Path, run: Callable[[list[Point]], Found]
) -> tuple[list[Row], list[tuple[Point, str]]]:
    """Run those points that the journal beside `table` does not have; returns the rows of all, and
    what failed.

    Raises ValueError: the table is of another target, or it or its journal is no sweep's;
    FileExistsError: another sweep is writing it."""
    table = writable(table)
    table.parent.mkdir(parents=True, exist_ok=True)
    if table.exists() and not table.with_suffix(".journal").exists():
        read(table)  # else it is somebody's, and stays
    journal = Journal(table.with_suffix(".journal"))
    failed = []
    try:
        targets = [line for line in journal.lines if isinstance(line, str)]
        if not targets:
            journal.append([target])
        elif targets[0] != target:
            raise ValueError(f"{table} is a sweep of {targets[0]}; give another --table")
        rows = {key(line["point"]): Row(**line) for line in journal.lines if isinstance(line, dict)}
        left = [point for point in points if key(point) not in rows]
        try:
            with progress(
                total=len(points),
                desc=f"sweep of {target}",
                unit="points",
                initial=len(points) - len(left),
            ) as bar:
                for point, found in run(left) if left else ():
                    if "error" in found:
                        failed.append((point, found["error"]))
                    else:
                        row = rows[key(point)] = Row(point, **found)
                        journal.append([row._asdict()])
                    bar.update()
        finally:
            order = {key(point): i for i, point in enumerate(points)}
            write(
                table,
                [rows[name] for name in sorted(rows, key=lambda name: order.get(name, len(order)))],
            )
    finally:
        journal.close()
    return [rows[key(point)] for point in points if key(point) in rows], failed


def key(point: Point) -> str:
    """A point's name in the journal: its parameters as JSON, sorted."""
    return json.dumps(point, sort_keys=True)


def write(path: Path, rows: list[Row]) -> None:
    """Write rows as a Parquet table: a column for each parameter, metric (with kind and unit) and
    provenance. A column of several types is text; a metric that is called like a parameter is
    "metrics NAME", provenance "at NAME"."""
    import pyarrow
    from pyarrow import parquet

    fields = []
    columns = []
    for role in Row._fields:
        for name in dict.fromkeys(name for row in rows for name in getattr(row, role)):
            cells = [getattr(row, role).get(name) for row in rows]
            about = {"role": role, "name": name}
            if role == "metrics":
                one = next(cell for cell in cells if cell)
                about |= {"kind": one["kind"], "unit": one["unit"]}
                cells = [cell and cell["value"] for cell in cells]
            label = f"at {name}" if role == "at" else name
            while label in (field.name for field in fields):
                label = f"{role} {label}"
            columns.append(pyarrow.array(_of_one_type(cells)))
            fields.append(pyarrow.field(label, columns[-1].type, metadata=about))
    with atomic(path) as part:
        parquet.write_table(pyarrow.Table.from_arrays(columns, schema=pyarrow.schema(fields)), part)


def _of_one_type(cells: list[Any]) -> list[Any]:
    """Cells of a column: texts where they are of several types, numbers all whole or none."""
    types = {type(cell) for cell in cells if cell is not None}
    if types == {int, float}:
        return [None if cell is None else float(cell) for cell in cells]
    if len(types) <= 1 and types <= {int, float, str, bool}:
        return cells
    return [cell if cell is None or isinstance(cell, str) else json.dumps(cell) for cell in cells]


def read(path: str | Path) -> list[Row]:
    """The rows of a sweep's table. ValueError: no such file, or not of a sweep."""
    from pyarrow import parquet

    with naming(path, "table of a sweep", "`moelab sweep`"):
        table = parquet.read_table(absolute(path))
        rows = [Row({}, {}, {})._asdict() for _ in range(table.num_rows)]
        for field, column in zip(table.schema, table.columns):
            about = typed(
                {name.decode(): text.decode() for name, text in (field.metadata or {}).items()},
                _Column,
            )
            for row, cell in zip(rows, column.to_pylist()):
                if cell is not None:
                    row[about["role"]][about["name"]] = (
                        cell
                        if about["role"] != "metrics"
                        else {"value": cell, "unit": about.get("unit"), "kind": about.get("kind")}
                    )
        return typed(rows, list[Row])


def varied(rows: Sequence[Row]) -> list[str]:
    """The parameters that differ between points."""
    return [
        name
        for name in dict.fromkeys(name for row in rows for name in row.point)
        if len({key({name: row.point.get(name)}) for row in rows}) > 1
    ]


def extremes(rows: Sequence[Row]) -> list[Record]:
    """Of each metric that is a number and differs: the least and the most, at which points, and
    their ratio."""
    names = varied(rows)
    found = []
    for metric in dict.fromkeys(metric for row in rows for metric in row.metrics):
        cells = [(row.metrics[metric]["value"], row) for row in rows if metric in row.metrics]
        if are_numbers(*(value for value, _ in cells)) and len({value for value, _ in cells}) > 1:
            (low, least), (high, most) = (of(cells, key=lambda cell: cell[0]) for of in (min, max))
            where = [
                ", ".join(f"{name}={row.point.get(name)}" for name in names)
                for row in (least, most)
            ]
            about = least.metrics[metric]
            found.append(
                {
                    "metric": metric,
                    "unit": about["unit"],
                    "kind": about["kind"],
                    "least": low,
                    "at": where[0],
                    "most": high,
                    "at ": where[1],
                    "÷": high / low if low > 0 else None,
                }
            )
    return found


def told(rows: Iterable[Row]) -> str:
    """Rows as text: what differs between points, and their first metrics."""
    rows = list(rows)
    names = varied(rows)
    shown = list(dict.fromkeys(name for row in rows for name in row.metrics))[:SHOWN_METRICS]
    return text_table(
        [*names, *shown, "s", "host"],
        [
            [
                *(row.point.get(name) for name in names),
                *(row.metrics.get(name, {}).get("value") for name in shown),
                row.at["seconds"],
                row.at["host"],
            ]
            for row in rows
        ],
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + "\n\n" + __doc__[__doc__.index("Points run") :]
    parser.add_argument("target", help="a notebook, by its number, name or path, or a bench")
    parser.add_argument(
        "--grid",
        nargs="+",
        required=True,
        metavar="NAME=VALUE,VALUE",
        help="values of parameters or options, of which every combination is run",
    )
    parser.add_argument("--workers", type=whole(1), default=1, help="processes here (%(default)s)")
    parser.add_argument(
        "--scheduler",
        metavar="tls://HOST:PORT",
        help="of a Dask cluster, which runs the points instead; tcp:// on this machine",
    )
    parser.add_argument(
        "--table",
        type=output,
        metavar="FILE",
        help="the table (results/sweeps/TARGET.parquet); its journal lies beside it",
    )
    add_run_options(parser)


def main(args: argparse.Namespace) -> int:
    points = grid(args.grid, split_assignments(args.parameter))
    if path_of(args.target):
        target = f"bench {Path(args.target).stem}"
        work = partial(bench_point, args.target)
        points = [{name: read_literal(text) for name, text in point.items()} for point in points]
        for point in points:
            parser_of(args.target).parse_args(words(point))
    else:
        (path,) = notebooks([args.target], benches())
        points = [check_parameters(path, point) for point in points]
        given = path.stem if CHECKOUT and path.parent == CHECKOUT / "notebooks" else str(path)
        target = path.stem
        work = partial(notebook_point, given, args.results, args.timeout)
    run = (
        partial(on_dask, args.scheduler, work)
        if args.scheduler
        else partial(locally, work, workers=args.workers)
    )
    table = (
        args.table or results_root(args.results) / "sweeps" / f"{target.replace(' ', '_')}.parquet"
    )
    rows, failed = sweep(target, points, table, run)
    print(told(rows))
    for point, error in failed:
        print(f"\nFAILED {point}: {error}", file=sys.stderr)
    if len(commits := {row.at["git"] for row in rows}) > 1:
        print(
            f'\nthese points were run by {len(commits)} commits; see the table\'s column "at git"'
        )
    print(f"\n{len(rows)} of {len(points)} points: {table}")
    return 1 if failed else 0
