"""`moelab sweep`: a notebook or a bench at every point of a grid, here or on a cluster, and one
table of it.

Points run one at a time, each in a process of its own, since they measure times; `--workers` runs
several at once. Each finished point is in a journal beside the table, so the same command goes on
where it was cut off, and a larger grid adds to what there is. A point that fails is told, and tried
again by the next call. The table is Parquet, for pandas: a row a point, with what was asked, what
was found, and by which commit on which machine.

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
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from functools import partial
from itertools import product
from multiprocessing.pool import ThreadPool
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from moelab.base.arguments import described
from moelab.base.files import (
    CHECKOUT,
    absolute,
    atomic,
    child_environment,
    read_json,
    results_root,
    writable,
)
from moelab.base.journal import Journal
from moelab.base.progress import progress
from moelab.base.records import Record
from moelab.base.schema import naming
from moelab.base.table import text_table
from moelab.bench import names as benches
from moelab.bench import parser_of, path_of
from moelab.bench.results import environment, metrics_of
from moelab.comparison import MetricsFile
from moelab.lab import runner
from moelab.lab.runner import (
    check_parameters,
    notebooks,
    read_literal,
    run_notebook,
    split_assignments,
)

SHOWN_METRICS = 4
Point = Record  # parameter → value
Work = Callable[[Point], Record]  # a point → {"metrics": as in metrics.json, and more provenance}
#: points as they end, each with {"metrics": …, "at": its provenance} or {"error": why it has none}
Found = Iterator[tuple[Point, Record]]


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


def notebook_point(notebook: str, timeout: float, point: Point) -> Record:
    """Run a notebook, by name or path, with these parameters."""
    directory = run_notebook(notebooks([notebook])[0], point, timeout)
    return {
        "metrics": read_json(directory / "metrics.json", MetricsFile)["metrics"],
        "run": str(directory),
    }


def bench_point(name: str, point: Point) -> Record:
    """Run a bench with these options in a process of its own."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        given = [f"--output={path}", "--busy", *words(point)]  # a row says what disturbed it
        command = [sys.executable, "-m", "moelab", "bench", name, *given]
        how = {"env": child_environment() | {"MOELAB_WARM": "0"}, "capture_output": True}
        done = subprocess.run(command, text=True, **how)
        if done.returncode:
            raise RuntimeError(f"bench {name} failed: {done.stderr.strip().rpartition(chr(10))[2]}")
        return {"metrics": {n: of for n, of in metrics_of(path).items() if of["value"] is not None}}


def words(point: Point) -> list[str]:
    """A point as options of a command line; "true" is a bare option, "false" is none."""
    return [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in point.items()
        if value is not False
    ]


def attempt(work: Work, point: Point) -> tuple[Point, Record]:
    """The point with its metrics and provenance, or {"error": why it has none}."""
    start = time.monotonic()
    try:
        found = work(point)
    except Exception as error:  # of any kind: it is told, and the other points go on
        return point, {"error": str(error) or type(error).__name__}
    at = {"host": platform.node(), "seconds": round(time.monotonic() - start, 3)} | environment()
    at["versions"] = ", ".join(map(" ".join, at["versions"].items()))
    return point, {"metrics": found.pop("metrics"), "at": at | found}


def locally(work: Work, points: list[Point], workers: int = 1) -> Found:
    """Run points on this machine; the work of each is a process of its own."""
    with ThreadPool(workers) as pool:  # its threads end with the process, as after Ctrl-C
        yield from pool.imap_unordered(partial(attempt, work), points)


def on_dask(scheduler: str, work: Work, points: list[Point]) -> Found:
    """Run points on a Dask cluster, which gives those of a lost worker to another one.

    Raises ConnectionError: no scheduler at this address, no certificates for it, workers of several
    threads, or it is lost."""
    from distributed import Client, as_completed

    for name in logging.root.manager.loggerDict:
        if name.partition(".")[0] == "distributed":  # it logs the traceback of a lost scheduler
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if not scheduler.startswith(("tls://", "tcp://127.", "tcp://localhost")):
        print(
            f"moelab: {scheduler} has no certificates: whoever reaches it can run code on its "
            "workers, and on this machine; `moelab sweep --help` says how to use tls://",
            file=sys.stderr,
        )
    try:
        with Client(scheduler, timeout=10) as client:
            workers = client.scheduler_info(n_workers=-1)["workers"]
            if several := [name for name, about in workers.items() if about["nthreads"] > 1]:
                raise ValueError(f"{', '.join(several)} run several points at once: --nthreads 1")
            futures = {client.submit(attempt, work, point, pure=False): point for point in points}
            for future in as_completed(futures):
                lost = future.status == "error"
                error = {"error": str(future.exception())} if lost else None
                yield (futures[future], error) if lost else future.result()
    except (CancelledError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConnectionError(
            f"the scheduler at {scheduler!r} cannot be used, or was lost ({error}); write "
            "tls://HOST:PORT, with the certificates that `moelab sweep --help` shows, or "
            "tcp://HOST:PORT on this machine. Finished points are kept, the same command goes on"
        ) from None


def sweep(
    target: str, points: list[Point], path: Path, run: Callable[[list[Point]], Found]
) -> tuple[Any, list[tuple[Point, str]]]:
    """Run those points that the journal beside the table `path` does not have; returns the table of
    all these points (`frame`), and what failed.

    Raises ValueError: the table is of another target, or it or its journal is no sweep's;
    FileExistsError: another sweep is writing it."""
    path = writable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.with_suffix(".journal").exists():
        read(path)  # else it is somebody's, and stays
    order = {key(point): i for i, point in enumerate(points)}
    rows, failed = {}, []
    with closing(Journal(path.with_suffix(".journal"))) as journal:
        of_target = [line for line in journal.lines if isinstance(line, str)] or [target]
        if of_target[0] != target:
            raise ValueError(f"{path} is a sweep of {of_target[0]}; give another --table")
        if not journal.lines:
            journal.append([target])
        rows |= {key(of["point"]): of for of in journal.lines if isinstance(of, dict)}
        left = [point for point in points if key(point) not in rows]
        try:
            with progress(total=len(points), desc=f"sweep of {target}", unit="points") as bar:
                bar.update(len(points) - len(left))
                for point, found in run(left) if left else ():
                    if "error" in found:
                        failed.append((point, found["error"]))
                    else:
                        rows[key(point)] = {"point": point, **found}
                        journal.append([rows[key(point)]])
                    bar.update()
        finally:
            known = sorted(rows, key=lambda name: order.get(name, len(order)))
            with atomic(path) as part:
                frame([rows[name] for name in known]).to_parquet(part)
    return frame([rows[name] for name in order if name in rows]), failed


def key(point: Point) -> str:
    """A point's name in the journal: its parameters as JSON, sorted."""
    return json.dumps(point, sort_keys=True)


def frame(rows: list[Record]) -> Any:
    """Rows {"point", "metrics", "at"} as a pandas table: a column for each parameter, each metric
    (of a parameter's name: "metric NAME") and each word of provenance ("at NAME").

    `attrs` has "point", the parameters' columns, and "metrics", column → [unit, kind]."""
    import pandas

    asked = dict.fromkeys(name for row in rows for name in row["point"])
    lines, metrics = [], {}
    for row in rows:
        found = {f"metric {n}" if n in asked else n: of for n, of in row["metrics"].items()}
        metrics |= {name: [of["unit"], of["kind"]] for name, of in found.items()}
        values = {name: of["value"] for name, of in found.items()}
        lines.append(row["point"] | values | {f"at {name}": of for name, of in row["at"].items()})
    table = pandas.DataFrame(lines).convert_dtypes()
    for name in table.select_dtypes("object").columns:  # Parquet's columns are of one type
        table[name] = table[name].map(str, na_action="ignore")
    table.attrs = {"point": [*asked], "metrics": metrics}
    return table


def read(path: str | Path) -> Any:
    """The table of a sweep. ValueError: it is none; FileNotFoundError."""
    import pandas

    with naming(path, "table of a sweep", "`moelab sweep`"):
        table = pandas.read_parquet(absolute(path))
        if not {"point", "metrics"} <= table.attrs.keys():
            raise ValueError("no parameters and metrics are named in it")
        return table


def told(table: Any) -> str:
    """The table as text: what differs between points, and their first metrics."""
    asked = table[table.attrs["point"]]
    varied = asked.columns[asked.nunique(dropna=False) > 1]
    shown = [*varied, *[*table.attrs["metrics"]][:SHOWN_METRICS], "at seconds", "at host"]
    cells = table[shown].astype(object).where(table[shown].notna(), None)
    return text_table(shown, cells.values.tolist())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (parser.epilog or "") + "\n\n" + __doc__[__doc__.index("Points run") :]
    described(__file__)(parser)
    described(runner.__file__, "how")(parser)


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
        work = partial(notebook_point, given, args.timeout)
    run = (
        partial(on_dask, args.scheduler, work)
        if args.scheduler
        else partial(locally, work, workers=args.workers)
    )
    table = args.table or results_root() / "sweeps" / f"{target.replace(' ', '_')}.parquet"
    found, failed = sweep(target, points, table, run)
    if len(found):
        print(told(found))
    for point, error in failed:
        print(f"\nFAILED {point}: {error}", file=sys.stderr)
    print(f"\n{len(found)} of {len(points)} points: {table}")
    return 1 if failed else 0
