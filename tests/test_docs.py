"""The maps of `docs/`: every link leads to the line that defines what it names.

`python -m tests.test_docs` moves the links to where the definitions are now."""

import ast
import re
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
def test_links_lead_to_definitions(page):
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert links
    wrong = [(name, file) for name, file, line in links if line_of(name, file) != int(line)]
    assert wrong == [], "python -m tests.test_docs moves these links"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_link_to_code_is_checked(page):
    text = page.read_text(encoding="utf-8")
    assert len(re.findall(r"\]\(\.\./moelab/", text)) == len(LINK.findall(text))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_map_is_short(page):
    """What it links to is all that one must read: fewer than 5,000 lines."""
    files = {file for _, file, _ in LINK.findall(page.read_text(encoding="utf-8"))}
    assert sum(len((ROOT / file).read_text(encoding="utf-8").splitlines()) for file in files) < 5000


if __name__ == "__main__":
    for path in PAGES:
        told = path.read_text(encoding="utf-8")
        path.write_text(
            LINK.sub(lambda m: f"[`{m[1]}`](../{m[2]}#L{line_of(m[1], m[2])})", told),
            encoding="utf-8",
        )
