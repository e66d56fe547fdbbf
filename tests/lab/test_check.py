import json

import pytest

from moelab.__main__ import main
from moelab.base.files import write_json
from notebooks.check import compare


def content(params=None, seed=0, **metrics):
    """{"m": (value, kind)} as metrics.json has it."""
    return {
        "params": params or {},
        "seed": seed,
        "notebook": "01_x",
        "metrics": {k: {"value": v[0], "unit": "s", "kind": v[1]} for k, v in metrics.items()},
    }


@pytest.mark.parametrize(
    "was, now, kind, verdict",
    [
        (3, 3, "exact", "ok"),
        (3, 4, "exact", "FAILED"),
        (0.1, 0.1 + 1e-12, "exact", "FAILED"),
        ("1", 1, "exact", "FAILED"),
        (True, False, "exact", "FAILED"),
        (100.0, 101.9, "simulated", "ok"),
        (100.0, 102.1, "simulated", "FAILED"),
        (100.0, 97.9, "modelled", "FAILED"),
        (-100.0, -101.0, "modelled", "ok"),
        (0, 1e-9, "simulated", "FAILED"),
        ("lru", "fifo", "simulated", "FAILED"),
        (1.0, 50.0, "measured", "shown"),
        (86, 87, "paper", "FAILED"),
    ],
)
def test_each_kind_has_its_rule(was, now, kind, verdict):
    (row,) = compare(content(m=(was, kind)), content(m=(now, kind)))
    assert row.verdict == verdict


def test_missing_new_and_changed():
    def verdicts(a, b):
        return [row.verdict for row in compare(a, b)]

    one, other = content(m=(1, "exact")), content(n=(1, "exact"))
    assert verdicts(one, other) == ["FAILED", "new"]
    assert verdicts(one, content(m=(1, "measured"))) == ["FAILED"]
    assert verdicts(one, content(params={"smoke": True}, m=(1, "exact"))) == ["FAILED", "ok"]
    assert verdicts(one, content(seed=1, m=(1, "exact"))) == ["FAILED", "ok"]
    one = content(m=(100.0, "simulated"))
    one["metrics"]["m"]["tolerance"] = 0.1
    assert verdicts(one, content(m=(109.0, "simulated"))) == ["ok"]
    assert verdicts(one, content(m=(111.0, "simulated"))) == ["FAILED"]


def put_run(results, name, run_id, found):
    write_json(results / "runs" / name / run_id / "metrics.json", found)


def test_on_the_command_line(results, capsys):
    put_run(results, "01_x", "20250101-1", content(m=(1, "exact"), s=(5.0, "simulated")))
    assert main(["check"]) == 1  # there is no baseline to compare with
    assert main(["check", "--update"]) == 0
    assert main(["check"]) == 0 and main(["check", "1"]) == 0 and main(["check", "01_x"]) == 0

    put_run(results, "01_x", "20250102-1", content(m=(2, "exact"), s=(5.0, "simulated")))
    capsys.readouterr()
    assert main(["check", "01"]) == 1  # the newest run counts
    assert "1 FAILED" in capsys.readouterr().out
    for run in ("20250103-1@host@1.part", "failed"):
        put_run(results, "01_x", run, content(m=(1, "exact"), s=(5.0, "simulated")))
    assert main(["check"]) == 1  # unfinished and failed ones do not

    path = results / "baseline" / "01_x.json"
    baseline = json.loads(path.read_text())
    baseline["metrics"]["s"]["tolerance"] = 0.5
    path.write_text(json.dumps(baseline))
    assert main(["check", "--update"]) == 0
    updated = json.loads(path.read_text())["metrics"]
    assert updated["m"]["value"] == 2 and updated["s"]["tolerance"] == 0.5
    assert main(["check"]) == 0


def test_bad_input(results, capsys):
    assert main(["check"]) == 2 and "reproduce" in capsys.readouterr().err
    write_json(results / "baseline" / "02_y.json", content(m=(1, "exact")))
    assert main(["check"]) == 1  # a baseline without a run
    assert main(["check", "09"]) == 2 and "02_y" in capsys.readouterr().err


def test_times_of_a_busy_machine_become_no_baseline_unless_that_is_said(results, capsys):
    env = {"git": None, "versions": {}, "device": "cpu", "cpu": "x", "cores": 2}
    env["busy"] = "the load average is 9.0 on 2 cores"
    found = content(m=(1, "exact")) | {"env": env}
    put_run(results, "01_x", "20250101-1", found)
    assert main(["check", "--update"]) == 2 and "9.0 on 2 cores" in capsys.readouterr().err
    assert not (results / "baseline" / "01_x.json").exists()
    assert main(["check", "--update", "--busy"]) == 0
