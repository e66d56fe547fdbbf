"""Rows that real processes send, and EPLB's balance."""

import pytest

from notebooks.studies import parallel


def test_two_processes_send_what_is_expected():
    volume, balance = parallel.run(tokens=64, ranks=(2,)).values()
    for way, row in volume.items():
        assert row["dispatched"] == pytest.approx(row["expected rows a token"], rel=0.1), way
        assert row["dispatched"] == row["combined"] and row["MB sent"] > 0
    for row in balance.values():
        assert row["in order"] >= row["EPLB, 0 spare"] >= row["EPLB, 64 spare"] >= 1
