"""Records: what is written is read back, rows keep the run that found them, a busy machine is refused."""

from types import SimpleNamespace

import pytest

from moelab import bench
from moelab.base.files import CHECKOUT, read_json
from moelab.bench import results
from moelab.bench.results import BenchFile
from moelab.comparison import KINDS

FILES = sorted((CHECKOUT / "results" / "bench").glob("*.json"))
OURS = {"TPOT s": 0.02, "simulated TPOT s": 0.03, "output": "= eager", "each s": [1.0, 3.0]}
SECTIONS = {
    "conditions": {"rounds": 3},
    "resident": {"ours": OURS, "theirs": {"result": "not installed", "peak GB": None}},
    "plan (exact)": {"hits": 3, "met": True},
}


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(results, "why_busy", lambda: None)


def test_sections_are_read_as_they_were_written(tmp_path, quiet):
    with results.measuring({"rounds": 3}) as run:
        pass
    path = results.write(tmp_path / "a.json", "engine", run, SECTIONS)
    assert results.sections_of(path) == SECTIONS
    found = results.metrics_of(path)
    assert found["resident | ours | TPOT s"] == {"value": 0.02, "unit": "s", "kind": "measured"}
    assert found["resident | ours | simulated TPOT s"]["kind"] == "simulated"
    assert found["plan (exact) | hits"]["kind"] == "exact"
    assert found["resident | ours | each s"]["value"] == 2
    (about,) = read_json(path, BenchFile)["runs"]
    assert about["parameters"] == {"rounds": 3} and len(about["load"]) == 2
    assert about["quiet"] in (True, False) and about["versions"]["torch"] and about["date"]


def test_rows_that_a_run_did_not_measure_keep_their_own_run(tmp_path):
    path, first = tmp_path / "a.json", results.provenance({"n": 1})
    results.write(path, "b", first, {"s": {"x": {"n": 1}, "y": {"n": 1}}, "t": {"n": 1}})
    second = results.provenance({"n": 2})
    results.write(path, "b", second, {"s": {"x": {"n": 2}}})
    both = {"y": {"n": 1}, "x": {"n": 2}}
    assert results.sections_of(path) == {"conditions": {}, "s": both, "t": {"n": 1}}
    found = read_json(path, BenchFile)
    for of in found["records"]:
        assert found["runs"][of["run"]]["parameters"]["n"] == of["value"]
    results.write(path, "b", second, {"s": {"x": {"n": 3}, "y": {"n": 3}}, "t": {"n": 3}})
    assert len(read_json(path, BenchFile)["runs"]) == 1  # nothing is left of the others


def test_a_busy_machine_is_refused_or_said(monkeypatch, capsys):
    monkeypatch.setattr(results, "load_average", lambda: 1000.0)
    with (
        pytest.raises(ValueError, match="busy: the load average is 1000.*--busy"),
        results.measuring({}),
    ):
        raise AssertionError
    with results.measuring({}, busy=True) as run:
        pass
    assert run["quiet"] is False and "busy" in capsys.readouterr().err


@pytest.mark.parametrize("calm", [True, False])
def test_what_was_disturbed_meanwhile_overwrites_nothing(calm, quiet, tmp_path, monkeypatch):
    seconds = iter([0.0, 0.0 if calm else 1e6])
    monkeypatch.setattr(results, "others_seconds", lambda: next(seconds))
    own = tmp_path / f"calm_{calm}.py"
    own.write_text('def run():\n    return {"s": {"n": 1}}\n')
    path = tmp_path / "found.json"
    bench.main(SimpleNamespace(name=str(own), options=["--output", str(path)]))
    assert path.exists() == calm == (not (tmp_path / "found.busy.json").exists())


@pytest.mark.parametrize(
    "metric, section, kind",
    [
        ("simulated ÷ measured", "", "simulated"),
        ("TPOT ÷ limit", "budgets (measured)", "modelled"),
        ("hits", "misses (exact counts)", "exact"),
        ("TPOT s", "budgets", None),
    ],
)
def test_a_metric_is_of_the_least_sure_kind_that_its_name_says(metric, section, kind):
    assert results.kind_of(metric, section) == kind


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_result_says_what_it_is_and_where_it_is_from(path):
    found = read_json(path, BenchFile)
    assert found["records"] and {of["kind"] for of in found["records"]} <= set(KINDS)
    assert {of["run"] for of in found["records"]} <= set(range(len(found["runs"])))
    assert len(results.rows(path)) == len(found["records"])
