"""The prefetching bench: all of it runs, small, and its interval holds its ratio."""

from notebooks.studies import prefetch
from notebooks.studies.grid import synthetic


def test_the_bench_runs(tmp_path):
    spec = synthetic("mini", 3, 16, 2, 64, 64)
    how = {"budgets": [0.5], "ratios": [1.0], "executors": ["fast"], "lengths": [2, 3]}
    found = prefetch.run(tmp_path, **how, rounds=2, spec=spec)
    never = found["never slower (hint ÷ on demand)"]
    assert len(never) == 2
    for row in never.values():
        assert row["2 tokens_from"] <= row["2 tokens"] <= row["2 tokens_to"]
        assert row["3 tokens: ≤ 1.01"] in ("shown", "refuted", "undecided")
