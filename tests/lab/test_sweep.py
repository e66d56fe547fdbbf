"""Sweeps: every point once, whatever is killed or interrupted; the table is what was found, on any
kind of workers."""

import os
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moelab.__main__ import main
from moelab.comparison import finished_runs
from moelab.journal import Journal
from moelab.lab import sweep as sweeps
from moelab.lab.results import KINDS
from moelab.lab.sweep import Row, grid, key, locally, on_dask, read, sweep
from tests.lab.conftest import GOOD

POINTS = [{"a": a, "b": b} for a in range(4) for b in "xy"]
METRIC = {"value": 1, "unit": "", "kind": "exact"}


def area(folder: str, point: dict) -> dict:
    """What a point finds; the first attempt at one in the middle kills its worker."""
    marker = Path(folder, "killed")
    if point == {"a": 2, "b": "y"} and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return {
        "metrics": {"area": METRIC | {"value": point["a"] * ord(point["b"])}},
        "worker": os.getpid(),
    }


def refused(points):
    raise AssertionError(f"finished points are run again: {points}")


def test_a_killed_worker_leaves_every_point_done_once_here_and_on_a_cluster(tmp_path):
    distributed = pytest.importorskip("distributed")
    tables = {}
    for where in ("here", "cluster"):
        (folder := tmp_path / where).mkdir()
        table, work = folder / "table.parquet", partial(area, str(folder))
        if where == "here":
            rows, failed = sweep("area", POINTS, table, partial(locally, work, workers=2))
        else:
            with distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address=None, silence_logs=50
            ) as cluster:
                rows, failed = sweep(
                    "area", POINTS, table, partial(on_dask, cluster.scheduler_address, work)
                )
        assert (folder / "killed").exists() and not failed and [row.point for row in rows] == POINTS
        journal = Journal(table.with_suffix(".journal"))
        assert sorted(key(line["point"]) for line in journal.lines[1:]) == sorted(map(key, POINTS))
        journal.close()
        assert sweep("area", POINTS, table, refused) == (rows, [])
        assert read(table) == rows and {"host", "git", "started", "worker"} <= rows[0].at.keys()
        tables[where] = [(row.point, row.metrics) for row in read(table)]
    assert (
        tables["here"]
        == tables["cluster"]
        == [
            ({"a": a, "b": b}, {"area": METRIC | {"value": a * ord(b)}})
            for a in range(4)
            for b in "xy"
        ]
    )


def run_some(points, stop):
    for i, point in enumerate(points):
        if i == stop:
            raise KeyboardInterrupt
        yield point, {"metrics": {"n": METRIC | {"value": i}}, "at": {"host": "h", "seconds": 1.0}}


@pytest.fixture
def certificates(tmp_path):
    """Dask's configuration with an authority and a certificate of a scheduler, a worker and a
    client."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    key, pem = tmp_path / "node.key", tmp_path / "node.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-keyout",
            key,
            "-out",
            pem,
        ],
        check=True,
        capture_output=True,
    )
    own = {"cert": str(pem), "key": str(key)}
    return {
        "distributed.comm.require-encryption": True,
        "distributed.comm.tls.ca-file": str(pem),
    } | {f"distributed.comm.tls.{role}": own for role in ("scheduler", "worker", "client")}


def test_a_cluster_with_certificates_takes_only_who_has_one(certificates, tmp_path, capsys):
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")
    with (
        dask.config.set(certificates),
        distributed.LocalCluster(
            n_workers=1,
            threads_per_worker=1,
            dashboard_address=None,
            silence_logs=50,
            protocol="tls://",
            security=distributed.Security(),
        ) as cluster,
    ):
        address = cluster.scheduler_address
        rows, failed = sweep(
            "n", POINTS[:2], tmp_path / "t.parquet", partial(on_dask, address, counted)
        )
        assert address.startswith("tls://127.0.0.1") and len(rows) == 2 and not failed
        with (
            dask.config.set({"distributed.comm.tls.client.cert": None}),
            pytest.raises(ValueError, match="no distributed.comm.tls.client.cert"),
        ):
            next(on_dask(address, counted, POINTS[:1]))
    assert capsys.readouterr().err.count("certificates") == 0


def counted(point):
    time.sleep(0.2)
    return {"metrics": {"n": METRIC}}


def test_a_scheduler_that_is_lost_keeps_what_is_finished(tmp_path):
    distributed = pytest.importorskip("distributed")
    table = tmp_path / "t.parquet"
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, dashboard_address=None, silence_logs=50
    ) as cluster:

        def losing(points):
            for i, found in enumerate(on_dask(cluster.scheduler_address, counted, points)):
                yield found
                if i == 1:
                    cluster.close()

        with pytest.raises(ConnectionError, match="was lost; finished points are kept"):
            sweep("n", POINTS, table, losing)
    assert 2 <= len(read(table)) < len(POINTS)


@pytest.mark.parametrize(
    "address, told",
    [
        ("tcp://127.0.0.1:1", "there is no scheduler at"),
        ("127.0.0.1:8786", "write tls://HOST:PORT"),
        ("tcp://127.0.0.1", "write tls"),
        ("tcp://127.0.0.1:99999", "there is no scheduler at"),
        ("", "write tls"),
        ("tls://127.0.0.1:1", "needs certificates"),
        ("inproc://x", "write tls"),
    ],
)
def test_a_scheduler_that_is_not_there_is_one_line(address, told):
    pytest.importorskip("dask")
    with pytest.raises((ValueError, ConnectionError), match=told):
        sweeps.reach(address)


def test_an_interrupted_sweep_goes_on_and_a_larger_grid_adds_to_it(tmp_path):
    table = tmp_path / "t.parquet"
    with pytest.raises(KeyboardInterrupt):
        sweep("x", POINTS[:7], table, partial(run_some, stop=5))
    assert [row.point for row in read(table)] == POINTS[:5]
    asked = []
    rows, _ = sweep("x", POINTS, table, lambda left: asked.extend(left) or run_some(left, None))
    assert asked == POINTS[5:] and [row.point for row in rows] == POINTS == [
        row.point for row in read(table)
    ]
    with pytest.raises(ValueError, match="is a sweep of x; give another --table"):
        sweep("y", POINTS, table, refused)


def test_what_belongs_to_somebody_else_stays(tmp_path):
    table, diary = tmp_path / "diary.parquet", tmp_path / "diary.journal"
    for file, words in ((diary, "is no journal"), (table, "is no readable table of a sweep")):
        file.write_text("Dear diary,\n")
        with pytest.raises(ValueError, match=words):
            sweep("area", POINTS, table, refused)
        assert [path.read_text() for path in tmp_path.iterdir()] == ["Dear diary,\n"]
        file.unlink()


def test_a_damaged_line_of_the_journal_costs_its_point_and_no_other(tmp_path):
    table, runs = tmp_path / "table.parquet", []

    def run(points):
        runs.append(points)
        return (
            (point, {"metrics": {"n": METRIC}, "at": {"host": "here", "seconds": 1}})
            for point in points
        )

    rows, _ = sweep("area", POINTS, table, run)
    raw = (journal := table.with_suffix(".journal")).read_bytes()
    lines = [line for line in raw.split(b"\n\n") if line]
    for i in range(1, len(lines)):
        journal.write_bytes(raw.replace(lines[i], lines[i].replace(b'"', b"'", 1)))
        with pytest.warns(UserWarning, match="1 records in .* are damaged"):
            assert sweep("area", POINTS, table, run) == (rows, [])
        assert read(table) == rows
    assert runs == [POINTS, *([point] for point in POINTS)]


def test_a_failed_point_is_told_and_tried_again(tmp_path):
    table, ok = tmp_path / "t.parquet", {"metrics": {"n": METRIC}, "at": {}}
    rows, failed = sweep(
        "x", POINTS[:3], table, lambda left: zip(left, [ok, {"error": "no memory"}, ok])
    )
    assert [row.point for row in rows] == [POINTS[0], POINTS[2]] and failed == [
        (POINTS[1], "no memory")
    ]
    assert sweep("x", POINTS[:3], table, lambda left: zip(left, [ok]))[0][1].point == POINTS[1]


def column(name):
    cells = st.one_of(
        *(
            st.lists(st.none() | of, min_size=3, max_size=3)
            for of in (
                st.integers(-(2**53), 2**53),
                st.floats(allow_nan=False, allow_infinity=False),
                st.text(),
                st.booleans(),
            )
        )
    )
    return st.tuples(st.just(name), cells)


@settings(max_examples=50)
@given(
    st.dictionaries(
        st.tuples(st.sampled_from(Row._fields), st.text(min_size=1)),
        column("").map(lambda c: c[1]),
        max_size=6,
    )
)
def test_a_table_is_read_as_it_was_written(tmp_path_factory, cells):
    rows = [Row({}, {}, {"host": "h", "seconds": 1.0}) for _ in range(3)]
    for (role, name), column in cells.items():
        for row, cell in zip(rows, column):
            if cell is not None:
                getattr(row, role)[name] = METRIC | {"value": cell} if role == "metrics" else cell
    path = tmp_path_factory.mktemp("table") / "t.parquet"
    sweeps.write(path, rows)
    assert read(path) == rows


def test_what_is_no_table_is_said(tmp_path):
    with pytest.raises(FileNotFoundError, match="no table of a sweep"):
        read(tmp_path / "none.parquet")


def test_a_grid_is_every_combination():
    assert grid(["a=1,2", "b=x"], {"c": "9"}) == [
        {"c": "9", "a": "1", "b": "x"},
        {"c": "9", "a": "2", "b": "x"},
    ]
    assert grid(["budgets=0.2,0.5;0.3,0.6"], {}) == [{"budgets": "0.2,0.5"}, {"budgets": "0.3,0.6"}]
    for axes, fixed, said in (
        (["a"], {}, "--grid a: write"),
        (["a=1,"], {}, "write a=VALUE,VALUE"),
        (["a=1"], {"a": "2"}, "both fixed and in the grid"),
    ):
        with pytest.raises(ValueError, match=said):
            grid(axes, fixed)


def test_a_notebook_is_swept_and_its_parameters_checked_first(notebook, results, capsys):
    path = notebook("good", *GOOD)
    assert main(["sweep", str(path), "--grid", "seed=3,x"]) == 2 and not finished_runs(
        "good", results
    )
    assert "parameter seed is 'x'" in capsys.readouterr().err
    assert main(["sweep", str(path), "--grid", "seed=3", "-p", "smoke=false"]) == 0
    (row,), (run,) = read(results / "sweeps" / "good.parquet"), finished_runs("good", results)
    assert row.point == {"smoke": False, "seed": 3} and row.at["run"] == str(run)
    assert row.metrics["experts"] == {"value": 3, "unit": "experts", "kind": "exact"}
    assert "1 of 1 points" in capsys.readouterr().out


def test_a_bench_is_swept(results, capsys):
    with pytest.raises(SystemExit):
        main(["sweep", "ane_accuracy", "--grid", "no_such=1"])
    few = ["tasks=needle", "prompts=2", "tokens=64", "chunk=32", "calibration=1"]
    assert main(["sweep", "ane_accuracy", "--grid", "drop=0.1", *few]) == 0
    (row,) = read(results / "sweeps" / "bench_ane_accuracy.parquet")
    assert row.point["drop"] == 0.1
    assert row.metrics and all(metric["kind"] in KINDS for metric in row.metrics.values())
