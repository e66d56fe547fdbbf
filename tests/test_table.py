"""Tables and short numbers."""

import pytest

from moelab.table import head_and_rows, in_units, markdown_table, ms, percent, slug, span


def test_a_table_has_the_columns_of_all_rows():
    rows = [{"a": "x", "n": 1234}, {"n": 2.5, "ok": True}]
    assert markdown_table(*head_and_rows(rows)).splitlines() == [
        "| a | n | ok |",
        "| --- | --- | --- |",
        "| x | 1,234 | – |",
        "| – | 2.5 | yes |",
    ]


@pytest.mark.parametrize(
    "text, wanted",
    [
        (percent(0.1234), "12.3 %"),
        (percent(0.5, 0), "50 %"),
        (ms(0.0123456), "12.35"),
        (span(0.123456, 2), "0.123–2"),
        (span(1.0001, 1.0002), "1"),
        (slug("groups of 8, prune"), "groups_of_8_prune"),
        (slug("tiers, literal B/E"), "tiers_literal_B_E"),
        (slug("one capacity, 1.25"), "one_capacity_1_25"),
    ],
)
def test_short_numbers_and_names(text, wanted):
    assert text == wanted


def test_no_line_breaks_between_a_number_and_its_unit():
    told = markdown_table(["GB", "rate"], [["58 × 256", "17.9 %"], ["9 Women", "2 GB/s or 3 ms"]])
    assert told.replace("\u00a0", "_").splitlines()[2:] == [
        "| 58_× 256 | 17.9_% |",
        "| 9 Women | 2_GB/s or 3_ms |",
    ]


def test_a_column_is_in_the_unit_in_which_its_least_is_not_below_one():
    rows = [
        {"name": "a", "memory, B": 5_468_400, "TPOT, s": 0.2354, "written, B": 0, "rate": 0.83878},
        {
            "name": "b",
            "memory, B": 16 * 10**9,
            "TPOT, s": 2.4644,
            "written, B": 46_503_987_200,
            "rate": 4144.3,
        },
    ]
    assert in_units(rows) == [
        {"name": "a", "memory, MB": "5.47", "TPOT, ms": "235", "written, GB": "0", "rate": "0.839"},
        {
            "name": "b",
            "memory, MB": "16,000",
            "TPOT, ms": "2,460",
            "written, GB": "46.5",
            "rate": "4,140",
        },
    ]
    assert in_units([]) == []
