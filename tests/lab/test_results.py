import json

import numpy as np
import pytest

from moelab.base.files import write_json
from moelab.comparison import finished_runs
from moelab.lab import open_run
from moelab.lab.results import new_run_id


def test_a_run_in_lab_is_a_run_once_it_is_saved_but_judges_nothing(results):
    run = open_run("01_x", {"a": 1, "seed": 3})
    run.metric("n", 1, "", "exact")
    write_json(run.directory / "figures" / "kept.json", {})
    assert not finished_runs("01_x", lab=True)
    path = run.save()
    (folder,) = finished_runs("01_x", lab=True)
    assert path == folder / "metrics.json" and (folder / "figures" / "kept.json").is_file()
    assert folder.parent == results / "runs" / "01_x" and not finished_runs("01_x")
    content = json.loads(path.read_text())
    assert content["seed"] == 3 and {"git", "versions", "device", "cpu", "cores"} <= set(
        content["env"]
    )
    assert content["params"] == {"a": 1} and content["seconds"] >= 0

    run.metric("n", 2, "", "exact")  # a cell that is run again
    assert run.save() == path and json.loads(path.read_text())["metrics"]["n"]["value"] == 2
    assert [of.name for of in folder.parent.iterdir()] == [folder.name]


def test_takeaways_and_tables_are_kept_as_they_are_shown(capsys):
    run = open_run("x", {"seed": 4, "smoke": True})
    run.metrics_of({"a": 1, "b": 2.5}, "B", "exact")
    run.takeaway("It gains **{gain:.1f} %** with {by}.", gain=np.float64(12.34), by="LRU")
    run.table("By layer", [{"layer": 0, "bytes": 1234}, {"layer": 1}])
    run.table("By name", ["name", "n"], ["a", 1.5])
    with pytest.raises(ValueError, match="finite"):
        run.takeaway("{gain}", gain=float("nan"))
    found = json.loads(run.save().read_text())
    assert found["seed"] == 4 and found["params"] == {"smoke": True}
    assert found["metrics"]["b"] == {"value": 2.5, "unit": "B", "kind": "exact"}
    assert found["takeaways"][0] == {
        "text": "It gains **12.3 %** with LRU.",
        "numbers": {"gain": 12.34, "by": "LRU"},
    }
    assert found["tables"] == {
        "By layer": [["layer", "bytes"], ["0", "1,234"], ["1", "–"]],
        "By name": [["name", "n"], ["a", "1.5"]],
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, [1], np.ones(2), {"a": 1}])
def test_other_values_are_refused(value):
    with pytest.raises(ValueError, match="'m' is"):
        open_run("x", {"seed": 0}).metric("m", value, "B", "exact")


def folder_of(run):
    run.mkdir(parents=True)
    (run / "metrics.json").touch()


def test_finished_runs_are_sorted_and_only_saved_ones(tmp_path):
    runs = tmp_path / "runs" / "n"
    for name in ("20250102-1", "20250101-2", "20250103-1@h@1.part", "failed", "20250101-9-lab"):
        folder_of(runs / name)
    (runs / "20250105-1").mkdir()
    assert [path.name for path in finished_runs("n", tmp_path)] == ["20250101-2", "20250102-1"]
    found = [path.name for path in finished_runs("n", tmp_path, lab=True)]
    assert found == ["20250101-2", "20250101-9-lab", "20250102-1"]


def test_the_newest_run_is_the_last_one_whatever_the_clock_said(tmp_path):
    """Runs of a clock that was wrong, before and since runs are counted; more than four digits;
    failed ones count."""
    folder, given = tmp_path / "runs" / "n", []
    for stale in (
        "20990101-000000-000000",
        "0003-20990101-000000-000000",
        "0004-20200101-000000-000000.failed",
    ):
        folder_of(folder / stale)
    for _ in range(3):
        given.append(new_run_id(folder))
        folder_of(folder / given[-1])
    assert [name[:5] for name in given] == ["0005-", "0006-", "0007-"]
    folder_of(folder / "9999-20200101-000000-000000")
    folder_of(folder / new_run_id(folder))
    names = [path.name for path in finished_runs("n", tmp_path)]
    assert names[:5] == ["20990101-000000-000000", "0003-20990101-000000-000000", *given]
    assert names[5].startswith("9999-") and names[6].startswith("10000-")
