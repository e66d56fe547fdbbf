"""Progress: a bar that is gone at its end, a line now and then elsewhere."""

import io
import sys
from types import SimpleNamespace

import pytest

from moelab.base import progress as module
from moelab.base.progress import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_bar_vanishes_when_it_is_done(monkeypatch):
    monkeypatch.delenv("MOELAB_HEADLESS", raising=False)
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    assert list(progress([1, 2, 3], "reading", unit="layer")) == [1, 2, 3]
    shown = screen.getvalue()
    assert "reading" in shown and "0/3" in shown
    assert "\n" not in shown and not shown.rsplit("\r", 2)[-2].strip() and shown.endswith("\r")


def test_elsewhere_short_work_says_nothing_and_long_work_a_line(monkeypatch, capsys):
    monkeypatch.setenv("MOELAB_HEADLESS", "1")
    list(progress(range(3), "reading"))
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(module, "EVERY", 0.0)
    with progress(total=3e9, desc="reading", unit="B") as bar:
        bar.note("half")
        bar.update(1.5e9)
    *lines, end = capsys.readouterr().err.split("\n")
    assert "reading:  50% 1.50G/3.00G [" in lines[1] and "half" in lines[1]
    assert end == "" and "\r" not in "".join(lines)


def test_in_a_notebook_it_is_a_bar(monkeypatch):
    IPython = pytest.importorskip("IPython")
    monkeypatch.delenv("MOELAB_HEADLESS", raising=False)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    assert list(progress([1, 2], "reading")) == [1, 2]
    assert "reading" in screen.getvalue() and "\n" not in screen.getvalue()
