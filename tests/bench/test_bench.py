"""Benches by name, of the project's studies, and of a user's own file; what one must have."""

import json

import pytest

from moelab import bench
from moelab.__main__ import main
from moelab.bench import STUDIES

OWN = '''"""Counts to n. Slowly."""

from moelab.base.arguments import whole

KIND = "exact"
OPTIONS = {"n": (whole(1), "to count to")}


def run(n=3):
    return {"counts": {"row": {"bytes": n}}}
'''


def test_a_bench_is_a_file(tmp_path, capsys):
    path = tmp_path / "own_counts.py"
    path.write_text(OWN)
    out = tmp_path / "found.json"
    assert main(["bench", str(path), "--n", "5", "--busy", "--output", str(out)]) == 0
    (row,) = json.loads(out.read_text())["records"]
    assert (row["value"], row["kind"]) == (5, "exact") and "Counts to n." in capsys.readouterr().out
    assert bench.purpose(str(path)) == "Counts to n."
    default = bench.parser_of(str(path)).get_default("output")
    assert default.name == "own_counts.json" and default.parent.name == "bench"


@pytest.mark.parametrize(
    "name, source, said",
    [
        ("lacks_run.py", "OPTIONS = {}", "no run"),
        ("lacks_option.py", OWN.replace("def run(n=3)", "def run(m=3)"), "OPTIONS has n"),
        ("json.py", OWN, "rename it"),
        ("nowhere.py", None, "no bench 'nowhere.py'"),
        ("popularit", None, "mean 'popularity'"),
    ],
)
def test_what_a_bench_lacks_is_told(name, source, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if source:
        (tmp_path / name).write_text(source)
    assert main(["bench", name]) == 2 and said in capsys.readouterr().err


def test_studies_are_benches_by_name():
    assert {"plans", "store", "experts"} < set(bench.names()) and "ane" not in bench.names()
    assert bench.path_of("plans") == bench.STUDIES / "plans.py" and not bench.path_of("nothing")


def test_studies_import_one_another_as_their_package():
    """`moelab bench` finds them beside the notebooks, where nothing is called `notebooks`."""
    lines = [line for path in STUDIES.glob("*.py") for line in path.read_text("utf-8").splitlines()]
    assert not [line for line in lines if line.startswith(("from notebooks", "import notebooks"))]
