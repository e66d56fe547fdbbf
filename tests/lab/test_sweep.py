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
from hypothesis import given
from hypothesis import strategies as st

from moelab.__main__ import main
from moelab.base.journal import Journal
from moelab.comparison import KINDS, finished_runs
from moelab.lab.sweep import frame, grid, key, locally, on_dask, read, sweep
from tests.lab.conftest import GOOD

pandas = pytest.importorskip("pandas")
POINTS = [{"a": a, "b": b} for a in range(4) for b in "xy"]
METRIC = {"value": 1, "unit": "", "kind": "exact"}
AT = {"host": "h", "seconds": 1.0, "git": None}


def area(folder: str, killing: bool, point: dict) -> dict:
    """What a point finds; the first attempt at one in the middle kills its worker, or fails."""
    marker = Path(folder, "lost")
    if point == {"a": 2, "b": "y"} and not marker.exists():
        marker.touch()
        if killing:
            os.kill(os.getpid(), signal.SIGKILL)
        raise MemoryError("no memory")
    return {"metrics": {"area": METRIC | {"value": point["a"] * ord(point["b"])}}, "worker": 1}


def refused(points):
    raise AssertionError(f"finished points are run again: {points}")


def asked(table):
    return table[["a", "b"]].to_dict("records")


def cluster(**how):
    distributed = pytest.importorskip("distributed")
    about = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    return distributed.LocalCluster(**about | {"silence_logs": 50} | how)


@pytest.mark.parametrize("where", ["here", "cluster"])
def test_a_lost_worker_leaves_every_point_done_once(where, tmp_path):
    path = tmp_path / "table.parquet"
    work = partial(area, str(tmp_path), where == "cluster")
    if where == "here":
        table, failed = sweep("area", POINTS, path, partial(locally, work, workers=2))
        assert failed == [({"a": 2, "b": "y"}, "no memory")] and len(table) == len(POINTS) - 1
        table, failed = sweep("area", POINTS, path, partial(locally, work))
    else:
        with cluster(n_workers=2) as of:
            run = partial(on_dask, of.scheduler_address, work)
            table, failed = sweep("area", POINTS, path, run)
    assert (tmp_path / "lost").exists() and not failed and asked(table) == POINTS
    assert table["area"].tolist() == [a * ord(b) for a in range(4) for b in "xy"]
    journal = Journal(path.with_suffix(".journal"))
    assert sorted(key(line["point"]) for line in journal.lines[1:]) == sorted(map(key, POINTS))
    journal.close()
    again, failed = sweep("area", POINTS, path, refused)
    assert not failed and again.equals(table) and read(path).equals(table)
    assert {"at host", "at git", "at date", "at worker"} <= {*table.columns}


@pytest.fixture
def certificates(tmp_path):
    """Dask's configuration with an authority and a certificate of a scheduler, a worker and a
    client."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make certificates with")
    key, pem = tmp_path / "node.key", tmp_path / "node.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    command = [*make.split(), "-subj", "/CN=localhost", "-keyout", key, "-out", pem]
    subprocess.run(command, check=True, capture_output=True)
    own = {"cert": str(pem), "key": str(key)}
    return {
        "distributed.comm.require-encryption": True,
        "distributed.comm.tls.ca-file": str(pem),
    } | {f"distributed.comm.tls.{role}": own for role in ("scheduler", "worker", "client")}


def counted(point):
    time.sleep(0.2)
    return {"metrics": {"n": METRIC}}


def test_a_cluster_with_certificates_takes_only_who_has_one(certificates, tmp_path, capsys):
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")
    with dask.config.set(certificates):
        with cluster(protocol="tls://", security=distributed.Security()) as of:
            address = of.scheduler_address
            run = partial(on_dask, address, counted)
            table, failed = sweep("n", POINTS[:2], tmp_path / "t.parquet", run)
            assert address.startswith("tls://127.0.0.1") and len(table) == 2 and not failed
            assert capsys.readouterr().err.count("certificates") == 0
    for gone in (address, "tcp://127.0.0.1:1", "inproc://x"):
        with pytest.raises(ConnectionError, match="moelab sweep --help"):
            next(on_dask(gone, counted, POINTS[:1]))


def test_a_scheduler_that_is_lost_keeps_what_is_finished(tmp_path):
    path = tmp_path / "t.parquet"
    with cluster() as of:

        def losing(points):
            for i, found in enumerate(on_dask(of.scheduler_address, counted, points)):
                yield found
                if i == 1:
                    of.close()

        with pytest.raises(ConnectionError, match="Finished points are kept"):
            sweep("n", POINTS, path, losing)
    assert 2 <= len(read(path)) < len(POINTS)


def run_some(points, stop=None):
    for i, point in enumerate(points):
        if i == stop:
            raise KeyboardInterrupt
        yield point, {"metrics": {"n": METRIC | {"value": i}}, "at": AT}


def test_an_interrupted_sweep_goes_on_and_a_larger_grid_adds_to_it(tmp_path):
    path = tmp_path / "t.parquet"
    with pytest.raises(KeyboardInterrupt):
        sweep("x", POINTS[:7], path, partial(run_some, stop=5))
    assert asked(read(path)) == POINTS[:5]
    given = []
    table, _ = sweep("x", POINTS, path, lambda left: given.extend(left) or run_some(left))
    assert given == POINTS[5:] and asked(table) == POINTS == asked(read(path))
    with pytest.raises(ValueError, match="is a sweep of x; give another --table"):
        sweep("y", POINTS, path, refused)


def test_what_belongs_to_somebody_else_stays(tmp_path):
    table, diary = tmp_path / "diary.parquet", tmp_path / "diary.journal"
    for file, words in ((diary, "is no journal"), (table, "is no readable table of a sweep")):
        file.write_text("Dear diary,\n")
        with pytest.raises(ValueError, match=words):
            sweep("area", POINTS, table, refused)
        assert [path.read_text() for path in tmp_path.iterdir()] == ["Dear diary,\n"]
        file.unlink()


def test_a_damaged_line_of_the_journal_costs_its_point_and_no_other(tmp_path):
    path = tmp_path / "table.parquet"
    table, _ = sweep("area", POINTS, path, lambda points: run_some([*points]))
    raw = (journal := path.with_suffix(".journal")).read_bytes()
    lines = [line for line in raw.split(b"\n\n") if line]
    journal.write_bytes(raw.replace(lines[3], lines[3].replace(b'"', b"'", 1)))
    with pytest.warns(UserWarning, match="1 records in .* are damaged"):
        again, failed = sweep("area", POINTS, path, run_some)
    assert not failed and again["n"].tolist() == [0, 0, 2, 3, 4, 5, 6, 7]


cells = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
cells |= st.text() | st.booleans()


@given(st.lists(st.tuples(cells | st.none(), cells | st.none()), min_size=1, max_size=4))
def test_a_table_is_read_as_it_was_written(tmp_path_factory, values):
    """Metrics of any types, also one that is called like a parameter."""
    rows = []
    for i, both in enumerate(values):
        kept = {n: METRIC | {"value": of} for n, of in zip(("a", "m"), both) if of is not None}
        rows.append({"point": {"a": i}, "metrics": kept, "at": AT})
    path = tmp_path_factory.mktemp("table") / "t.parquet"
    frame(rows).to_parquet(path)
    table = read(path)
    pandas.testing.assert_frame_equal(table, frame(rows), check_dtype=False)
    assert table.attrs == frame(rows).attrs and table["a"].tolist() == [*range(len(rows))]
    for i, (_, value) in enumerate(values):
        if value is not None:
            assert table["m"][i] == value or table["m"][i] == str(value)


def test_a_grid_is_every_combination():
    every = [{"c": "9", "a": "1", "b": "x"}, {"c": "9", "a": "2", "b": "x"}]
    assert grid(["a=1,2", "b=x"], {"c": "9"}) == every
    assert grid(["budgets=0.2,0.5;0.3,0.6"], {}) == [{"budgets": "0.2,0.5"}, {"budgets": "0.3,0.6"}]
    for axes, said in ((["a"], "--grid a: write"), (["a=1,"], "write a="), (["c=1"], "both fixed")):
        with pytest.raises(ValueError, match=said):
            grid(axes, {"c": "2"})


def test_a_notebook_is_swept_and_its_parameters_checked_first(notebook, results, capsys):
    path = notebook("good", *GOOD)
    assert main(["sweep", str(path), "--grid", "seed=3,x"]) == 2
    assert not finished_runs("good", results)
    assert "parameter seed is 'x'" in capsys.readouterr().err
    assert main(["sweep", str(path), "--grid", "seed=3", "-p", "smoke=false"]) == 0
    table, (run,) = read(results / "sweeps" / "good.parquet"), finished_runs("good", results)
    assert table["seed"].tolist() == [3] and table["at run"].tolist() == [str(run)]
    assert table["experts"].tolist() == [3]
    assert table.attrs["metrics"]["experts"] == ["experts", "exact"]
    assert "1 of 1 points" in capsys.readouterr().out


def test_a_bench_is_swept(results):
    with pytest.raises(SystemExit):
        main(["sweep", "ane_accuracy", "--grid", "no_such=1"])
    few = ["tasks=needle", "prompts=2", "tokens=64", "chunk=32", "calibration=1"]
    assert main(["sweep", "ane_accuracy", "--grid", "drop=0.1", *few]) == 0
    table = read(results / "sweeps" / "bench_ane_accuracy.parquet")
    assert table["drop"].tolist() == [0.1]
    assert {kind for _, kind in table.attrs["metrics"].values()} <= {*KINDS}
