"""The journal: whatever a kill leaves of it is a prefix, damage costs the record that it hit, and
no foreign file is written to."""

from __future__ import annotations

import os
import warnings

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moelab.base.journal import HEADER, Journal

RECORDS = [{"n": i, "text": "tab\t and\nline" * i} for i in range(6)]


def reopened(path, *more):
    """The lines of a journal, and of one that more was added to."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        journal = Journal(path)
    journal.append(list(more))
    journal.close()
    return journal.lines


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("journal") / "x.part.jsonl"
    reopened(path, *RECORDS[:2])
    reopened(path, *RECORDS[2:])
    return path.read_bytes()


def test_every_cut_leaves_a_prefix_to_go_on_from(written, tmp_path):
    path = tmp_path / "j"
    ends = [i for i in range(len(written)) if written[i : i + 1] == b"\n" != written[i - 1 : i]][1:]
    for cut in range(len(written) + 1):
        path.write_bytes(written[:cut])
        whole = sum(end < cut for end in ends)
        assert reopened(path, {"more": 1}) == RECORDS[:whole], cut
        assert reopened(path) == [*RECORDS[:whole], {"more": 1}], cut


def test_damage_at_every_byte_costs_one_record_at_most(written, tmp_path):
    path = tmp_path / "j"
    for i in range(len(written)):
        path.write_bytes(written[:i] + bytes([written[i] ^ 1]) + written[i + 1 :])
        found = reopened(path, {"more": 1})
        assert len(found) >= len(RECORDS) - 1 and [r for r in RECORDS if r in found] == found, i
        assert reopened(path) == [*found, {"more": 1}], i


def test_damage_is_told(written, tmp_path):
    (tmp_path / "j").write_bytes(written.replace(b'"n":2', b'"n":7'))
    with pytest.warns(UserWarning, match="1 records in .*j are damaged and left out"):
        Journal(tmp_path / "j").close()


@given(st.binary(min_size=1, max_size=200))
def test_a_foreign_file_stays_as_it_is(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("foreign") / "diary.journal"
    path.write_bytes(content)
    if HEADER.startswith(content):
        return
    with pytest.raises(ValueError, match="diary.journal is no journal of moelab's"):
        Journal(path)
    assert path.read_bytes() == content


def test_no_file_is_no_place_for_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match="is no file"):
            Journal(path)


def test_a_full_disk_leaves_whole_records(tmp_path, monkeypatch):
    journal = Journal(tmp_path / "j")
    journal.append([1])
    with monkeypatch.context() as full:
        full.setattr(
            os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device"))
        )
        with pytest.raises(OSError, match="No space"):
            journal.append([2])
    journal.append([3])
    journal.close()
    assert reopened(tmp_path / "j") == [1, 3]


def test_held_emptied_and_removed(tmp_path):
    first = Journal(tmp_path / "x.part.jsonl")
    first.append(RECORDS)
    with pytest.raises(FileExistsError, match="another process is writing .*x.part; wait"):
        Journal(tmp_path / "x.part.jsonl")
    first.close()
    second = Journal(tmp_path / "x.part.jsonl")
    assert second.lines == RECORDS
    second.restart([])
    assert second.lines == []
    second.remove()
    assert not list(tmp_path.iterdir())
