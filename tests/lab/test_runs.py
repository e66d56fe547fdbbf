"""The commands `list` and `compare`."""

from moelab.__main__ import main
from moelab.base.files import write_json
from notebooks.compare import find_run


def put(results, run_id, value, smoke=True, notebook="01_calibration", **more):
    folder = results / "runs" / notebook / run_id
    metrics = {"hits": value, "name": "lru"} | more
    write_json(
        folder / "metrics.json",
        {
            "params": {"smoke": smoke},
            "seed": 0,
            "seconds": 3.0,
            "metrics": {
                name: {"value": of, "unit": "", "kind": "exact"} for name, of in metrics.items()
            },
        },
    )
    return folder


def test_runs_are_listed_and_compared(results, capsys):
    folders = [
        put(results, run_id, value) for run_id, value in (("20250101-1", 4), ("20250102-1-lab", 6))
    ]
    assert main(["list"]) == 0
    told = capsys.readouterr().out
    assert "20250102-1-lab" in told and "smoke=True" in told and "02_compression_entropy" in told
    assert main(["compare", "1"]) == 0
    told = capsys.readouterr().out
    assert "1.500 ×" in told and "lru" in told and "parameter" not in told
    assert main(["compare", *map(str, folders)]) == 0 and capsys.readouterr().out == told
    assert main(["compare", "2"]) == 2 and "two runs are compared" in capsys.readouterr().err
    assert (
        main(["compare", "1", "2"]) == 2 and "There are: 01_calibration" in capsys.readouterr().err
    )


def test_parameters_that_differ_come_first_and_notebooks_stand_for_their_newest_run(
    results, capsys
):
    put(results, "20250101-1", 4)
    full = put(results, "20250102-1", 6, smoke=False)
    other = put(results, "20250103-1", 8, notebook="02_other")
    assert find_run("1") == find_run("01_calibration") == full and find_run("02") == other
    assert main(["compare", "1", "2"]) == 0
    told = capsys.readouterr().out
    assert told.index("smoke") < told.index("hits") and "01_calibration 20250102-1" in told
