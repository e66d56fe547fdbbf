"""`moelab arena`: a class of a file on traces of files, as a table and a page."""

import numpy as np
import pytest

from moelab.__main__ import main
from moelab.cache.policies import POLICIES
from moelab.trace import RoutingTrace
from moelab.viz.views import standings

MINE = """
from moelab.cache.policies import LRU


class Mine(LRU):
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with mine.py and two traces."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    rng = np.random.default_rng(0)
    for name in ("a", "deep/b"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        np.savez(tmp_path / f"{name}.npz", ids=rng.random((40, 3, 16)).argsort(2)[..., :2])
    (tmp_path / "notes.txt").write_text("not a trace")
    return tmp_path


def test_a_row_a_trace_and_memory_with_all_policies(folder, capsys):
    assert main(["arena", "mine:Mine", "--traces", ".", "--shares", "0.25,0.5"]) == 0
    head, _, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert {"Mine, yours", "yours below it", *POLICIES} <= {one.strip() for one in head.split("  ")}
    assert [row.split("  ")[1] for row in rows] == [
        "a, 25 %",
        "a, 50 %",
        "deep/b, 25 %",
        "deep/b, 50 %",
    ]


def test_mine_is_as_what_it_copies_and_below_the_ceiling(folder):
    view = standings.arena(standings.class_of("mine:Mine"), standings.traces_of("a.npz"), share=0.3)
    (row,) = view.rows()
    assert row["Mine, yours"] == row["lru"] <= row["belady"]
    assert row["yours below it"] == row["belady"] - row["lru"]


def test_the_page(folder, tab):
    told = ["arena", "mine:Mine", "--traces", "a.npz", "--shares", "0.5", "--output", "arena.html"]
    assert main(told) == 0
    tab.goto((folder / "arena.html").as_uri())
    assert "Mine is number" in tab.inner_text("body")


def test_what_is_no_trace_is_refused(folder, capsys):
    (folder / "deep" / "b.npz").unlink()
    assert main(["arena", "mine:Mine", "--traces", "deep"]) == 2
    assert "deep has no trace" in capsys.readouterr().err


def test_shipped_traces_are_of_real_models():
    found = standings.traces_of("all")
    assert len(found) >= 4 and all(isinstance(one, RoutingTrace) for one in found.values())
    for name, trace in found.items():
        assert name.startswith(trace.spec.name) and trace.spec.L >= 24 and len(trace) > 100
