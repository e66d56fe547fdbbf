"""The commands `list` and `compare`."""

from moelab.__main__ import main
from moelab.files import write_json


def put(results, run_id, value):
    folder = results / "runs" / "01_calibration" / run_id
    write_json(folder / "metrics.json", {"metrics": {"hits": {"value": value, "unit": "", "kind": "exact"},
                                                     "name": {"value": "lru", "unit": "", "kind": "exact"}}})
    write_json(folder / "run.json", {"seconds": 3.0, "parameters": {"smoke": True}})
    return folder


def test_runs_are_listed_and_compared(results, capsys):
    folders = [put(results, run_id, value) for run_id, value in (("20250101-1", 4), ("20250102-1", 6))]
    assert main(["list"]) == 0
    told = capsys.readouterr().out
    assert "20250102-1" in told and "smoke=True" in told and "02_compression_entropy" in told
    assert main(["compare", "1"]) == 0
    told = capsys.readouterr().out
    assert "1.500 ×" in told and "lru" in told
    assert main(["compare", *map(str, folders)]) == 0 and capsys.readouterr().out == told
    assert main(["compare", "2"]) == 2 and "two are compared" in capsys.readouterr().err


def test_a_truth_value_is_no_number_to_divide_by(results, capsys):
    folders = [put(results, run_id, True) for run_id in ("20250101-1", "20250102-1")]
    assert main(["compare", *map(str, folders)]) == 0
    told = capsys.readouterr().out
    assert "yes" in told and "×" not in told
