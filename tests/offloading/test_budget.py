"""Budgets as people write them, and what a container leaves."""

import psutil
import pytest

from moelab.offloading.budget import RESERVE, available, parse_budget


@pytest.mark.parametrize("budget, wanted", [
    ("2GB", 2_000_000_000), ("2 gb", 2_000_000_000), ("800MiB", 800 << 20), ("1.5GiB", 3 << 29), ("64kB", 64_000),
    ("4096", 4096), ("50%", 500), ("0.5", 500), (" 2GB ", 2_000_000_000),
    ("12.5 %", 125), (0.25, 250), (1.0, 1000), (1, 1000), (4096, 4096), ("100%", 1000),
    ("0%", 0), ("0", 0), ("0GB", 0), ("0.0", 0), (0, 0)])
def test_budgets(budget, wanted):
    assert parse_budget(budget, everything=1000, others=10) == wanted


@pytest.mark.parametrize("budget", ["", "two GB", "2XB", "-1GB", "GB", "inf", "nan", "200%", "100.5 %", -1, -0.5, float("nan"),
                                    float("inf"), True, None, [2], b"2GB"])
def test_what_is_no_budget(budget):
    with pytest.raises(ValueError, match=r"the budget is .*; it must be bytes, a fraction .*'2GB'"):
        parse_budget(budget, 1000, 10)


def test_auto_leaves_room_for_the_rest(monkeypatch):
    monkeypatch.setattr("moelab.offloading.budget.available", lambda: 5 << 30)
    assert parse_budget("auto", 10**12, 1 << 30) == parse_budget(" AUTO", 10**12, 1 << 30) == (4 << 30) - RESERVE
    assert parse_budget("auto", 10**12, 6 << 30) == 0


@pytest.mark.parametrize("files", [
    {"memory.max": "3000000\n", "memory.current": "1200000", "memory.stat": "anon 5\ninactive_file 200000\n"},
    {"memory/memory.limit_in_bytes": "3000000\n", "memory/memory.usage_in_bytes": "1200000",
     "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 200000\n"}], ids=["v2", "v1"])
def test_a_container_s_limit_counts(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if "memory/memory.stat" in files:
        (tmp_path / "memory/memory.stat").write_text("total_inactive_file 200000\n")
    assert available(tmp_path) == 2_000_000


def test_no_limit(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    free = psutil.virtual_memory().available
    assert 0.5 * free < available(tmp_path) <= 1.5 * free
