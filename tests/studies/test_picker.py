"""The picker of notebook 08: what it picks is the fastest that is allowed, and llama.cpp stands beside it."""

import pytest

from moelab.base.files import CHECKOUT
from moelab.bench.results import sections_of
from notebooks.studies import end_to_end, picker


@pytest.fixture(scope="module")
def there():
    return end_to_end.titled(sections_of(CHECKOUT / "results" / "bench" / "end_to_end.json"))


def ran(rows):
    """Seconds of a token of ours, but of the one that no memory limits."""
    of = {name: row["TPOT s"] for name, row in rows.items() if "TPOT s" in row}
    return {n: s for n, s in of.items() if end_to_end.names_us(n) and n != end_to_end.RESIDENT}


def test_with_any_loss_it_is_the_fastest_that_ran(there):
    for title, rows in there.items():
        found, ours = picker.pick(there, *title.split(", "), "any"), ran(rows)
        assert found["best"] == min(ours, key=ours.get)
        seconds = [row["TPOT s"] for row in found["rows"].values()]
        assert seconds == sorted(seconds) and {*ours} < {*found["rows"]}


def test_without_loss_what_is_faster_loses(there):
    def loses(name, rows):
        return rows[name]["KL"] > 1e-3 or any(form in name for form in ("int", "fp8", "mxfp4"))

    for title, rows in there.items():
        best, ours = picker.pick(there, *title.split(", "), "none")["best"], ran(rows)
        assert not loses(best, rows)
        assert all(loses(name, rows) for name, took in ours.items() if took < ours[best])


def test_the_view_turns_and_says_why(there):
    view = picker.view(there)
    assert "Pick" in view.words[0] and "llama.cpp" in view.words[0]
    memory, disk = list(there)[0].split(", ")
    before = view.rows()
    assert view.set(memory=memory, disk=disk, loss="any").rows() != before
    with pytest.raises(ValueError, match="memory='1 kB'"):
        view.set(memory="1 kB")
