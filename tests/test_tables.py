"""The tables of README and docs are what results/ say; what is older than its code is told."""

import warnings

import pytest

from docs import tables
from moelab.base.files import CHECKOUT
from moelab.bench import results


@pytest.fixture(autouse=True)
def committed(monkeypatch):
    monkeypatch.setenv("MOELAB_RESULTS", str(CHECKOUT / "results"))


@pytest.mark.parametrize("page", tables.pages(), ids=lambda page: page.name)
def test_a_page_has_the_tables_that_results_give(page):
    text = page.read_text(encoding="utf-8")
    assert tables.filled(text) == text, "run `make tables`"


def test_every_table_is_on_a_page_and_has_numbers():
    pages = "".join(page.read_text() for page in tables.pages())
    assert {found[2] for found in tables.MARK.finditer(pages)} == tables.tables().keys()
    for table in tables.tables().values():
        assert len(table["columns"]) == len(table["head"]) - 1
        rows = [[tables.cell(*place) for place in row] for row in tables.places(table)]
        assert rows and all({"–", ""} < {"–", "", *row} for row in rows)


def test_results_that_are_older_than_what_they_measured_are_a_warning():
    for said in tables.stale():
        warnings.warn(said, stacklevel=1)


def test_a_table_that_there_is_not_is_refused():
    with pytest.raises(ValueError, match="no table speed; there are resident"):
        tables.filled("<!-- table: speed -->\n<!-- end of table -->")


def test_code_that_changed_after_a_measurement_is_told(monkeypatch, tmp_path):
    run = results.provenance({}) | {"git": "a" * 40 + "+changes"}
    path = results.write(tmp_path / "a.json", "b", run, {"s": {"n": 1}})
    asked = []
    monkeypatch.setattr(tables, "git", lambda *words: asked.append(words) or "2")
    (said,) = tables.older_than(path, ["moelab/fast"])
    assert "2 commits" in said
    assert asked == [("rev-list", "--count", f"{'a' * 40}..HEAD", "--", "moelab/fast")]
