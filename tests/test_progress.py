"""Progress: a bar that is gone at its end, a line now and then elsewhere."""

import io
import sys
from types import SimpleNamespace

import pytest

from moelab import progress as module
from moelab.progress import progress


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


def test_in_a_notebook_it_is_an_element_that_is_emptied_and_no_widget(monkeypatch):
    IPython = pytest.importorskip("IPython")
    shown = []
    handle = SimpleNamespace(update=lambda data, raw: shown.append(data))
    monkeypatch.delenv("MOELAB_HEADLESS", raising=False)
    monkeypatch.setattr(IPython, "get_ipython", lambda: SimpleNamespace(kernel=None))
    monkeypatch.setattr(
        IPython.display, "display", lambda data, raw, display_id: shown.append(data) or handle
    )
    with progress(total=2, desc="reading <b>", unit="layer") as bar:
        bar.update()
        bar.refresh()
    assert all({*data} == {"text/html", "text/plain"} for data in shown)
    first, *_, second, last = (data["text/html"] for data in shown)
    assert "value=0 max=2" in first and "value=1 max=2" in second and last == ""
    assert "reading &lt;b&gt;:  50% 1/2 [" in second
