"""The journal: whatever a kill leaves of it, what is read is a prefix of what was written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.journal import Journal

RECORDS = [{"n": i, "text": "tab\t and\nline" * i} for i in range(6)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "x.part.jsonl"
    journal = Journal(path)
    journal.append(RECORDS[:2])
    journal.append(RECORDS[2:])
    journal.close()
    return path


@given(data=st.data())
def test_any_cut_or_flip_leaves_a_prefix(written, tmp_path_factory, data):
    raw = written.read_bytes()
    cut, flip = data.draw(st.integers(0, len(raw))), data.draw(st.integers(0, len(raw) - 1))
    path = tmp_path_factory.mktemp("cut") / "j"
    for damaged, whole in ((raw[:cut], raw[:cut].count(b"\n")),
                           (raw[:flip] + bytes([raw[flip] ^ 1]) + raw[flip + 1:], raw[:flip].count(b"\n"))):
        path.write_bytes(damaged)
        journal = Journal(path)
        assert journal.lines == RECORDS[:whole]
        journal.append([{"more": 1}])                                   # and goes on from there
        journal.close()
        journal = Journal(path)
        assert journal.lines == [*RECORDS[:whole], {"more": 1}]
        journal.close()


def test_fresh_and_held(tmp_path):
    first = Journal(tmp_path / "x.part.jsonl")
    first.append(RECORDS)
    with pytest.raises(FileExistsError, match="another process is writing .*x.part; wait"):
        Journal(tmp_path / "x.part.jsonl")
    first.close()
    second = Journal(tmp_path / "x.part.jsonl", fresh=True)
    assert second.lines == []
    second.remove()
    assert not list(tmp_path.iterdir())
