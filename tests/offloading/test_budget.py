"""Budgets as people write them, and what a container leaves."""

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.offloading import budget
from moelab.offloading.budget import RESERVE, available, parse_budget


@pytest.mark.parametrize(
    "budget, wanted",
    [
        ("2GB", 2_000_000_000),
        ("2 gb", 2_000_000_000),
        ("800MiB", 800 << 20),
        ("1.5GiB", 3 << 29),
        ("64kB", 64_000),
        ("4096000", 4096000),
        ("4096B", 4096),
        ("50%", 500),
        ("16gb", 16 * 10**9),
        ("16G", 16 * 10**9),
        ("16g", 16 * 10**9),
        ("16GiB", 16 << 30),
        ("16Gi", 16 << 30),
        ("1.5e9", 1_500_000_000),
        ("1E9B", 10**9),
        ("16,5GB", 16_500_000_000),
        ("16_000_000_000", 16 * 10**9),
        ("\t8 gib\n", 8 << 30),
        ("2TB", 2 * 10**12),
        ("1Ti", 1 << 40),
        (".5GB", 5 * 10**8),
        ("16.GB", 16 * 10**9),
        ("64Kib", 64 << 10),
        (np.int64(10**7), 10**7),
        (np.float32(0.5), 500),
        ("1_000,5MB", 1_000_500_000),
        ("0.5", 500),
        (" 2GB ", 2_000_000_000),
        ("12.5 %", 125),
        (0.25, 250),
        (1.0, 1000),
        (1, 1000),
        (4096, 4096),
        ("100%", 1000),
        ("0%", 0),
        ("0", 0),
        ("0GB", 0),
        ("0.0", 0),
        (0, 0),
    ],
)
def test_budgets(budget, wanted):
    assert parse_budget(budget, everything=1000, others=10) == wanted


@pytest.mark.parametrize(
    "budget",
    [
        "",
        "two GB",
        "2XB",
        "-1GB",
        "GB",
        "inf",
        "nan",
        "200%",
        "100.5 %",
        -1,
        -0.5,
        float("nan"),
        float("inf"),
        True,
        None,
        [2],
        b"2GB",
        "16,000GB",
        "16 000MB",
        "1__6GB",
        "1e999",
        "16GB/s",
        "0x10",
        "+16GB",
        "16 G B",
        "１６GB",
        "1e-3",
    ],
)
def test_what_is_no_budget(budget):
    with pytest.raises(ValueError, match=r"the budget is .*; it must be bytes, a fraction .*'2GB'"):
        parse_budget(budget, 1000, 10)


@pytest.mark.parametrize("budget", ["16", " 16 ", "1.5", "1,5", "999999", 16, 1.5, 1000])
def test_a_bare_number_that_is_no_size_is_refused_with_what_was_meant(budget):
    with pytest.raises(ValueError, match=r"would be .* bytes: write '[\d.]+GB'"):
        parse_budget(budget, 10**12, 10)


def test_auto_leaves_room_for_the_rest(monkeypatch):
    monkeypatch.setattr("moelab.offloading.budget.available", lambda: 5 << 30)
    assert (
        parse_budget("auto", 10**12, 1 << 30)
        == parse_budget(" AUTO", 10**12, 1 << 30)
        == (4 << 30) - RESERVE
    )
    assert parse_budget("auto", 10**12, 6 << 30) == 0


@pytest.mark.parametrize(
    "files",
    [
        {
            "memory.max": "3000000\n",
            "memory.current": "1200000",
            "memory.stat": "anon 5\ninactive_file 200000\n",
        },
        {
            "memory/memory.limit_in_bytes": "3000000\n",
            "memory/memory.usage_in_bytes": "1200000",
            "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 200000\n",
        },
    ],
    ids=["v2", "v1"],
)
def test_a_container_s_limit_counts(tmp_path, files):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    if "memory/memory.stat" in files:
        (tmp_path / "memory/memory.stat").write_text("total_inactive_file 200000\n")
    assert available(tmp_path) == 2_000_000


@given(
    st.booleans(),
    st.lists(
        st.tuples(st.none() | st.integers(10**5, 10**6), st.integers(0, 10**5)),
        min_size=1,
        max_size=4,
    ),
)
def test_the_least_limit_of_all_groups_around_the_process_counts(tmp_path_factory, v1, groups):
    """Comfy-Org/ComfyUI pull request 15927, dask/distributed issue 1712."""
    root = tmp_path_factory.mktemp("cgroup")
    folder = root / "memory" if v1 else root
    own = "/".join(f"g{i}" for i in range(len(groups)))
    for i, (limit, used) in enumerate(groups):
        (folder := folder / f"g{i}").mkdir(parents=True)
        (
            folder / ("memory.limit_in_bytes" if v1 else "memory.high" if i % 2 else "memory.max")
        ).write_text(str(limit or ("9223372036854771712" if v1 else "max")))
        (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(str(used))
        (folder / "memory.stat").write_text("anon 1\ntotal_inactive_file 0\n")
    (root / "own").write_text(
        f"4:memory,cpu:/{own}\n0::/\n" if v1 else f"1:name=systemd:/else\n0::/{own}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "OWN", root / "own")
        free = available(root)
    bounds = [limit - used for limit, used in groups if limit]
    assert free == min(bounds) if bounds else free > 10**7


def test_no_limit(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    free = psutil.virtual_memory().available
    assert 0.5 * free < available(tmp_path) <= 1.5 * free
