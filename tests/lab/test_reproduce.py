"""`moelab reproduce`; and names that are HTML or Markdown, in what notebooks and views show."""

import re
from html.parser import HTMLParser

import pytest

from moelab.__main__ import main
from tests.lab.conftest import GOOD

pytest.importorskip("plotly")


class Page(HTMLParser):
    """The elements of a page."""

    def __init__(self, text):
        super().__init__()
        self.elements = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))


MEET = """from pathlib import Path
import time
Path({!r}).touch()
while not Path({!r}).exists():
    time.sleep(0.1)"""


def test_reproduce_runs_side_by_side_and_goes_on_after_a_failure(
    notebook, results, tmp_path, capsys
):
    """Neither notebook ends before the other began."""
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    bad = notebook(
        "bad", MEET.format(one, other), "raise ValueError('broken')", tags=["side-by-side"]
    )
    good = notebook("good", MEET.format(other, one), *GOOD, tags=["side-by-side"])
    assert main(["reproduce", str(bad), str(good), "-p", "seed=5", "--timeout", "100"]) == 1
    told = capsys.readouterr()
    assert "FAILED: ValueError: broken" in told.out and "Traceback" in told.err
    assert not list(results.glob("*.part"))


#: each would run, end what is around it, or hide what follows it, if it were not escaped where it
#: stands
HOSTILE = [
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "&lt;img src=x&gt;",
    "]]><svg onload=alert(1)>",
    "a\u2028b",
    "\\u003c/script>",
    "[x](javascript:alert(1))",
    "![x](http://192.0.2.1/x.png)",
    "`<b>`",
    "**<i>**",
    "\n\n<h1>x</h1>\n",
    "|</td>|",
]


@pytest.mark.parametrize("word", HOSTILE)
def test_no_element_of_an_exported_notebook_comes_from_a_name(word, monkeypatch):
    """As nbconvert exports what cells display: tables, takeaways, captions, advice."""
    filters = pytest.importorskip("nbconvert.filters")
    from plotly.graph_objects import Figure

    from moelab.lab.results import Run
    from moelab.viz import notebook

    shown = []
    monkeypatch.setattr(
        notebook,
        "display",
        lambda what, **_: shown.append(
            what["text/markdown"]
            if isinstance(what, dict) and "text/markdown" in what
            else getattr(what, "data", "")
        ),
    )
    elements = {}
    for said in ("word", word):
        shown.clear()
        run = Run("n", {}, 0, None)
        run.takeaway("The model **{name}** is at {place}.", name=said, place=said)
        run.table(said, ["", said], [said, said], ["x", 1])
        notebook.table([{said: said}])
        notebook.say(f"Notes of {said}: kept in /a/{said}/b")
        notebook.show(Figure(), said, said)
        pages = [
            Page(filters.markdown2html(text)) for text in shown if isinstance(text, str) and text
        ]
        elements[said] = [
            (tag, sorted(attributes.items())) for page in pages for tag, attributes in page.elements
        ]
    plain, found = elements["word"], elements[word]
    allowed = {"p", "strong", "em", "code", "table", "thead", "tbody", "tr", "th", "td"}
    allowed |= {"dl", "dt", "dd"}
    links = [
        attributes for tag, attributes in found if tag == "a"
    ]  # of an address in the text itself
    assert {tag for tag, _ in found} <= allowed | {tag for tag in ["a"] if links} and all(
        len(attributes) == 1 and attributes[0][1].startswith("http://") for attributes in links
    )
    assert [one for one in found if one[1] and one[0] != "a"] == [one for one in plain if one[1]]


@pytest.mark.parametrize("word", HOSTILE)
def test_no_element_of_a_view_comes_from_a_name(word):
    from plotly.graph_objects import Figure

    from moelab.viz.views.base import View

    pages = {}
    for said in ("word", word):
        view = View(
            said,
            {},
            lambda: said,
            lambda data: [Figure().add_bar(x=[data], y=[1], name=data)],
            lambda data: [{data: data}],
            lambda: "",
            lambda data: (data, data),
        )
        html = re.sub(r"(?s)<script[^>]*>/\*\*.*?</script>", "", view.html())
        pages[said] = [(tag, sorted(attributes)) for tag, attributes in Page(html).elements]
    assert pages[word] == pages["word"]
