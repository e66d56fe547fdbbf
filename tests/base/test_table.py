"""Tables and short numbers."""

import pytest

from moelab.base.table import head_and_rows, markdown_table, ms, percent, span


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
