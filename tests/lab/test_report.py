import json
import re
from html.parser import HTMLParser

import pytest

from moelab.__main__ import main
from moelab.files import write_json
from moelab.lab import report
from moelab.lab.report import write_report
from tests.lab.conftest import GOOD

pytest.importorskip("plotly")
from moelab.viz.theme import plotly_js

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


def test_reproduce_runs_side_by_side_goes_on_after_a_failure_and_writes_a_report(
    notebook, results, tmp_path, capsys
):
    """The report has everything and needs no network."""
    one, other = (
        str(tmp_path / "one"),
        str(tmp_path / "other"),
    )  # neither notebook ends before the other began
    bad = notebook(
        "bad", MEET.format(one, other), "raise ValueError('broken')", tags=["side-by-side"]
    )
    good = notebook("good", MEET.format(other, one), *GOOD, tags=["side-by-side"])
    assert main(["reproduce", str(bad), str(good), "-p", "seed=5", "--timeout", "100"]) == 1
    told = capsys.readouterr()
    assert "experts 3 experts [exact]" in told.out and str(results / "report.html") in told.out
    assert "ValueError: broken" in told.out and "Traceback" in told.err
    library = plotly_js()
    text = (results / "report.html").read_text()
    assert text.count(library) == 1
    text = text.replace(library, "")  # megabytes that the parser would read slowly
    page = Page(text)
    assert page.all("html") == [{"lang": "en"}] and len(page.all("h1")) == 1
    assert [a["id"] for a in page.all("h2")] == ["good", "claims"]
    words = " ".join(page.text)
    for expected in (
        "A line & its end [exact]",
        "experts",
        "measured",
        "seed",
        "contradicted by the source itself",
    ):
        assert expected in words
    order = [
        text.index(one)
        for one in (
            "<strong>3</strong> experts &amp; <code>code</code>",
            "A line &amp; its end",
            "<caption>Metrics",
            "<caption>Parameters",
        )
    ]
    assert order == sorted(order)  # what is concluded, then figures, then numbers and parameters
    (plot,) = [a for a in page.all("div") if a.get("role") == "img"]
    assert plot["aria-label"] == 'It rises from 1 to 2, "always"'
    assert text.count("Plotly.newPlot(") == text.count('Plotly.newPlot("good-line"') == 1
    assert (
        not any("src" in a for a in page.all("script"))
        and not page.all("link")
        and not page.all("img")
    )
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


def kept_run(folder, word):
    """A run in whose every text, key and name there is this word."""
    name = re.sub("[/\0]", "", word) or "x"
    run = folder / "runs" / f"n{name}" / f"20250101{name}"
    write_json(
        run / "figures" / "a.json",
        {
            "caption": word,
            "alt": word,
            "figure": {"data": [{"name": word, word: word}], "layout": {"title": {"text": word}}},
        },
    )
    write_json(
        run / "metrics.json",
        {
            "params": {word: word},
            "seed": 0,
            "takeaways": [{"text": f"**{word}** `{word}` {word}"}],
            "metrics": {word: {"value": word, "unit": word, "kind": "exact"}},
            "figures": {word: {"file": "figures/a.json", "caption": word}},
            "tables": {word: [[word, "b"], [word, word]]},
        },
    )
    write_json(
        run / "run.json",
        {
            "parameters": {word: word, "b": [word]},
            "seconds": 1.0,
            "env": {"git": word, "versions": {word: word}, "device": word, "cpu": word, "cores": 4},
        },
    )


@pytest.mark.parametrize("word", HOSTILE)
def test_no_element_of_a_report_comes_from_what_a_run_says(word, tmp_path, monkeypatch):
    monkeypatch.setattr("moelab.viz.theme.plotly_js", lambda: "")
    monkeypatch.setattr(report.claims, "rows", lambda **_: [])
    pages = {}
    for kind, said in (("plain", "word"), ("hostile", word)):
        kept_run(tmp_path / kind, said)
        pages[kind] = Page(write_report(tmp_path / kind).read_text(encoding="utf-8"))
    found = {
        kind: [(tag, sorted(attributes)) for tag, attributes in page.elements]
        for kind, page in pages.items()
    }
    code = [element for element in found["hostile"] if element[0] not in ("strong", "em", "code")]
    assert code == [
        element for element in found["plain"] if element[0] not in ("strong", "em", "code")
    ]
    scripts = re.findall(
        r"<script>figures.*?</script>",
        (tmp_path / "hostile" / "report.html").read_text("utf-8"),
        re.S,
    )
    assert len(scripts) == 1 and "<!--" not in scripts[0] and scripts[0].count("<") == 2
    parts = [json.loads(part) for part in re.findall(r"newPlot\((\".*?\"), \[", scripts[0])]
    assert parts == [f"n{re.sub('[/]', '', word)}-{word}"]


@pytest.mark.parametrize(
    "content",
    [
        {"cores": "<script>alert(1)</script>"},
        {"cores": -1.5},
        {"git": 3},
        {"versions": {"a": ["<script>"]}},
        {"device": None},
    ],
)
def test_a_run_that_is_not_of_its_form_is_named(content, tmp_path, monkeypatch):
    kept_run(tmp_path, "word")
    (path,) = tmp_path.rglob("run.json")
    about = json.loads(path.read_text())
    write_json(path, about | {"env": about["env"] | content})
    with pytest.raises(ValueError, match="run.json cannot be read"):
        write_report(tmp_path)


@pytest.mark.parametrize("word", HOSTILE)
def test_no_element_of_an_exported_notebook_comes_from_a_name(word, monkeypatch):
    """As nbconvert exports what cells display: tables, takeaways, captions, advice."""
    filters = pytest.importorskip("nbconvert.filters")
    from moelab.lab.results import Run
    from moelab.viz import notebook
    from moelab.viz.plotly_json import Figure

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
    allowed = {
        "p",
        "strong",
        "em",
        "code",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "dl",
        "dt",
        "dd",
    }
    links = [
        attributes for tag, attributes in found if tag == "a"
    ]  # of an address in the text itself
    assert {tag for tag, _ in found} <= allowed | {tag for tag in ["a"] if links} and all(
        len(attributes) == 1 and attributes[0][1].startswith("http://") for attributes in links
    )
    assert [one for one in found if one[1] and one[0] != "a"] == [one for one in plain if one[1]]


@pytest.mark.parametrize("word", HOSTILE)
def test_no_element_of_a_view_comes_from_a_name(word):
    from moelab.viz.plotly_json import Figure
    from moelab.viz.views.base import View
    from moelab.viz.views.detailed import html_rows

    pages = {}
    for said in ("word", word):
        view = View(
            said,
            {},
            lambda: said,
            lambda data: Figure().add_bar(x=[data], y=[1], name=data),
            lambda data: [],
            lambda: ("", ""),
            lambda data: (data, data),
        )
        html = re.sub(r"(?s)<script[^>]*>/\*\*.*?</script>", "", view.html())
        texts = [
            html,
            html_rows([said, said], [[said, said]], said),
        ]
        pages[said] = [
            [(tag, sorted(attributes)) for tag, attributes in Page(text).elements] for text in texts
        ]
    assert pages[word] == pages["word"]
