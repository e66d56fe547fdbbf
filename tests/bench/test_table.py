"""What `moelab bench NAME` prints for a person."""

import json

from moelab import bench
from moelab.__main__ import main


def test_figures_are_written_by_what_they_are(monkeypatch, capsys):
    class Measured:
        """A bench."""

        @staticmethod
        def run(n: int = 3):
            return {
                "conditions": {
                    "load average before": None,
                    "runs": 10_000,
                    "all equal": True,
                    "time, seconds": 1.5,
                    "peak bytes": 2_500_000,
                    "peer": "not installed",
                },
                "samples": {"arm": [0.001, 0.002]},
                "table": {"a": {"x": 0.25}, "b": {"y": n, "x": [3.5, 2, 0.25]}},
            }

    monkeypatch.setattr(bench, "import_module", lambda name: Measured)
    assert main(["bench", "store"]) == 0
    *told, last = capsys.readouterr().out.splitlines()
    said = {" ".join(line.split()) for line in told}
    assert {
        "load average before –",
        "runs 10,000",
        "all equal yes",
        "time, seconds 1.500 s",
        "peak bytes 2 MB",
        "peer not installed",
        "arm 1.00 … 2.00 ms",
        "a 0.25 –",
        "b 0.25 … 3.5 3",
    } <= said
    assert json.loads(last)["results"]["conditions"]["runs"] == 10_000
