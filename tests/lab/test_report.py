from html.parser import HTMLParser

import pytest

from moelab.__main__ import main
from moelab.lab.report import write_report
from tests.lab.conftest import GOOD

pytest.importorskip("plotly")
from moelab.viz.theme import plotly_js  # noqa: E402

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Checks that elements nest, and collects what the tests ask for."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.text = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        if "script" not in self.open:
            self.text.append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]


MEET = """from pathlib import Path
import time
Path({!r}).touch()
while not Path({!r}).exists():
    time.sleep(0.1)"""


def test_reproduce_runs_side_by_side_goes_on_after_a_failure_and_writes_a_report(notebook, results, tmp_path, capsys):
    """The report has everything and needs no network."""
    one, other = str(tmp_path / "one"), str(tmp_path / "other")         # neither notebook ends before the other began
    bad = notebook("bad", MEET.format(one, other), "raise ValueError('broken')", tags=["side-by-side"])
    good = notebook("good", MEET.format(other, one), *GOOD, tags=["side-by-side"])
    assert main(["reproduce", str(bad), str(good), "-p", "seed=5", "--timeout", "100"]) == 1
    told = capsys.readouterr()
    assert "experts 3 experts [exact]" in told.out and str(results / "report.html") in told.out
    assert "ValueError: broken" in told.out and "Traceback" in told.err
    library = plotly_js()
    text = (results / "report.html").read_text()
    assert text.count(library) == 1
    text = text.replace(library, "")        # megabytes that the parser would read slowly
    page = Page(text)
    assert page.all("html") == [{"lang": "en"}] and len(page.all("h1")) == 1
    assert [a["id"] for a in page.all("h2")] == ["good", "claims"]
    words = " ".join(page.text)
    for expected in ("A line & its end [exact]", "experts", "measured", "seed", "contradicted by the source itself"):
        assert expected in words
    order = [text.index(one) for one in ("<strong>3</strong> experts &amp; <code>code</code>", "A line &amp; its end",
                                         "<caption>Metrics", "<caption>Parameters")]
    assert order == sorted(order)               # what is concluded, then figures, then numbers and parameters
    plot, = [a for a in page.all("div") if a.get("role") == "img"]
    assert plot["aria-label"] == 'It rises from 1 to 2, "always"'
    assert text.count("Plotly.newPlot(") == text.count('Plotly.newPlot("good-line"') == 1
    assert not any("src" in a for a in page.all("script")) and not page.all("link") and not page.all("img")
    assert not list(results.glob("*.part"))


def test_a_report_of_nothing(results):
    (results / "runs" / "x" / "20250101-1@h@1.part").mkdir(parents=True)
    assert "No notebook has finished yet." in Page(write_report().read_text().replace(plotly_js(), "")).text


def test_reproduce_refuses_a_parameter_that_no_notebook_has(notebook, results, capsys):
    assert main(["reproduce", str(notebook("good", *GOOD)), "-p", "sede=5"]) == 2
    assert "no notebook has a parameter 'sede'; they have seed, smoke" in capsys.readouterr().err
    assert not (results / "runs").exists()
