"""The study of sending and computing in place: its arms do what they are named for."""

from notebooks.studies import hybrid as study


def test_arms_send_all_none_or_what_is_measured():
    ((_, rows),) = study.run(memory="30%", rates=[1.0], tokens=4, rounds=1).items()
    assert list(rows) == list(study.ARMS)
    assert rows["all sent"]["in place %"] == [0] and rows["all sent"]["MB a token"] > 0
    assert rows["all in place"]["in place %"] == [100] and rows["all in place"]["MB a token"] == 0
    assert all(len(row["TPOT s"]) == 1 for row in rows.values())
    assert rows["balanced"]["simulated TPOT s"] > 0
