"""Budgets as people write them, and what a container leaves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.offloading import budget
from moelab.offloading.budget import RESERVE, available, parse_budget

TEXTS = {
    "2GB 2000MB 2_000_000_000 2e9 2g 2,0GB": 2 * 10**9,
    "3GiB 3Gi 3072MiB": 3 << 30,
    "4096B": 4096,
    "50% 0.5 .5": 500,
    "1_000,5MB": 1_000_500_000,
    "0": 0,
}
NUMBERS = {0.25: 250, 1: 1000, 4096: 4096, 0: 0, np.int64(10**7): 10**7, np.float32(0.5): 500}
BUDGETS = [(text, wanted) for texts, wanted in TEXTS.items() for text in texts.split()]


@pytest.mark.parametrize("budget, wanted", [*BUDGETS, ("\t8 gib\n", 8 << 30), *NUMBERS.items()])
def test_budgets(budget, wanted):
    assert parse_budget(budget, everything=1000, others=10) == wanted


NONE = [
    "",
    -1,
    float("inf"),
    True,
    None,
    [2],
    *["2XB", "-1GB", "inf", "200%", "16,000GB", "1__6GB", "１６GB", "1e-3"],
]


@pytest.mark.parametrize("budget", NONE)
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


@given(
    st.booleans(),
    st.lists(
        st.tuples(
            st.none() | st.integers(10**5, 10**6), st.integers(10**4, 10**5), st.integers(0, 10**4)
        ),
        min_size=1,
        max_size=4,
    ),
)
def test_the_least_limit_of_all_groups_around_the_process_counts(tmp_path_factory, v1, groups):
    """Comfy-Org/ComfyUI pull request 15927, dask/distributed issue 1712."""
    root = tmp_path_factory.mktemp("cgroup")
    folder = root / "memory" if v1 else root
    own = "/".join(f"g{i}" for i in range(len(groups)))
    for i, (limit, used, cached) in enumerate(groups):
        (folder := folder / f"g{i}").mkdir(parents=True)
        (
            folder / ("memory.limit_in_bytes" if v1 else "memory.high" if i % 2 else "memory.max")
        ).write_text(str(limit or ("9223372036854771712" if v1 else "max")))
        (folder / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(str(used))
        stat = f"inactive_file {'7' if v1 else cached}\n"
        (folder / "memory.stat").write_text(stat + f"total_inactive_file {cached}\n" * v1)
    (root / "own").write_text(
        f"4:memory,cpu:/{own}\n0::/\n" if v1 else f"1:name=systemd:/else\n0::/{own}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "OWN", root / "own")
        free = available(root)
    bounds = [limit - used + cached for limit, used, cached in groups if limit]
    assert free == min(bounds) if bounds else free > 10**7
