"""The maps of `docs/`: every link leads to the line that defines what it names. The site: links that
leave docs/ are rewritten, those that lead nowhere are found, nothing of a run becomes HTML. That it
builds without a warning is `make docs`.

`python -m tests.test_docs` moves the links to where the definitions are now."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("how_*.md"))
LINK = re.compile(r"\[`([\w.]+)`\]\(\.\./([\w./]+\.py)#L(\d+)\)")


def definitions(file):
    """{qualified name: line} of the classes and functions of a file."""
    found = {}

    def visit(node, prefix):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found[prefix + child.name] = child.lineno
                visit(child, f"{prefix}{child.name}.")

    visit(ast.parse(file.read_text(encoding="utf-8")), "")
    return found


def line_of(name, file):
    known = definitions(ROOT / file)
    assert name in known, f"{file} defines no {name}: name in the map what replaces it"
    return known[name]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_to_code_lead_to_definitions(page):
    text = page.read_text(encoding="utf-8")
    links = LINK.findall(text)
    assert links and len(links) == len(re.findall(r"\]\(\.\./moelab/", text))
    wrong = [(name, file) for name, file, line in links if line_of(name, file) != int(line)]
    assert wrong == [], "python -m tests.test_docs moves these links"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_map_is_short(page):
    """What it links to is all that one must read: fewer than 5,000 lines."""
    files = {file for _, file, _ in LINK.findall(page.read_text(encoding="utf-8"))}
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files) < 5000


@pytest.fixture
def site(monkeypatch):
    """The modules of docs/_site by name."""
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return lambda name: import_module(f"_site.{name}")


@pytest.mark.parametrize(
    "written, page, expected",
    [
        ("[`f`](../moelab/api.py#L52)", "how", '<a class="reference internal" href="source/moelab/api.py.html#L-52">`f`</a>'),
        ("[a](../../notebooks/01_calibration.ipynb)", "guide/a", "[a](../tutorials/01_calibration.ipynb)"),
        ("[a](../results.md#x) [b](b.md)", "guide/a", "[a](../results.md#x) [b](b.md)"),
        ("[a](../README.md) [b](../tests/depth.py)", "how", "[a](index.md) b"),
        ("![a](../results/findings/bf12.png) [b](https://a.b/c)", "how", None),
        ("```\n[`f`](../moelab/api.py)\n```", "how", None),
    ],
)  # fmt: skip
def test_links_are_rewritten_for_the_site(site, written, page, expected):
    folder = (ROOT / "docs" / page).parent
    assert site("links").rewritten(written, folder, page) == (expected or written)


def test_links_that_lead_nowhere_are_found(site, tmp_path):
    (tmp_path / "a.html").write_text(
        '<a id="x" href="b%20c.html#y"></a><a href="#z"></a><img alt="" src="no.png">'
        '<a href="https://a.b"></a><a href="b%20c.html#x"></a>'
    )
    (tmp_path / "b c.html").write_text("<p id='y'><a href='a.html#x'></a></p>")
    found = site("links").broken(tmp_path)
    assert [line.rpartition(" ")[2] for line in found] == ["#z", "b%20c.html#x", "no.png"]


def test_nothing_of_a_run_becomes_html(site):
    word = "</script><img src=x onerror=alert(1)>"
    of = {
        "application/vnd.plotly.v1+json": {"data": [{"name": word}], "layout": {}},
        "text/plain": f'[Figure: "{word}]',
    }
    shown = site("tutorials").output({"data": of})["data"]["text/html"]
    assert "<img" not in shown and shown.count("</script>") == 1


if __name__ == "__main__":
    for path in PAGES:
        told = path.read_text(encoding="utf-8")
        path.write_text(
            LINK.sub(lambda m: f"[`{m[1]}`](../{m[2]}#L{line_of(m[1], m[2])})", told),
            encoding="utf-8",
        )
