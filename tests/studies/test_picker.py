"""The picker of notebook 08: what it picks is the fastest that is allowed, and llama.cpp stands beside it."""

import re

import pytest

from moelab.base.files import CHECKOUT
from moelab.bench.results import sections_of
from notebooks.studies import end_to_end, picker

BENCH = CHECKOUT / "results" / "bench"


@pytest.fixture(scope="module")
def there():
    return picker.recorded(BENCH)


def ran(memory, disk):
    """Seconds of a token of ours, from the records themselves."""
    if "file" in memory:
        limit = float(memory.split()[0])
        found = {}
        for title, rows in sections_of(BENCH / "llama_cpp.json").items():
            for arm, row in rows.items() if "prompt 128" in title else ():
                if arm.startswith("moelab") and "undisturbed s" in row and "as it is" in disk:
                    name = f"{arm}, {title.split(',')[0]}"
                    fits = float(re.findall(r"([\d.]+) GB", row["result"])[0]) <= limit
                    found.setdefault(name, []).extend([row["undisturbed s"]] if fits else [])
        return {name: min(of) for name, of in found.items() if of}
    rows = sections_of(BENCH / "end_to_end.json")[f"{memory.split()[0]} of experts, {disk}"]
    return {
        n: row["TPOT s"] for n, row in rows.items() if "TPOT s" in row and end_to_end.names_us(n)
    }


def test_with_any_loss_it_is_the_fastest_that_ran(there):
    for title in there:
        found, ours = picker.pick(there, *title.split(", "), "any"), ran(*title.split(", "))
        assert found["best"] == min(ours, key=ours.get, default=None)
        seconds = [row["TPOT s"] for row in found["rows"].values()]
        assert seconds == sorted(seconds) and {*ours} <= {*found["rows"]}


def test_within_a_loss_what_is_faster_loses_more(there):
    broad = sections_of(BENCH / "rounding.json")["broad: formats (measured)"]

    def loses(name):
        kind = re.search(r"Q\d\w*|mxfp4", name)
        if kind is None:
            return 0.0
        how = "to nearest" if kind[0] == "mxfp4" else "llama.cpp"
        return broad[f"{kind[0].removesuffix('_M')}, {how}"]["loss increase, high"]

    for title in there:
        ours = ran(*title.split(", "))
        for loss, most in (("none", 0), ("0.0005", 5e-4), ("0.001", 1e-3)):
            found = picker.pick(there, *title.split(", "), loss)
            may = {name: s for name, s in ours.items() if loses(name) <= most}
            assert found["best"] == min(may, key=may.get, default=None)
            assert all(loses(name) <= most for name in found["rows"])


def test_the_view_turns_and_says_why(there):
    view = picker.view(there)
    assert "Pick" in view.words[0] and "llama.cpp" in view.words[0]
    memory, disk = list(there)[0].split(", ")
    before = view.rows()
    assert view.set(memory=memory, disk=disk, loss="any").rows() != before
    with pytest.raises(ValueError, match="memory='1 kB'"):
        view.set(memory="1 kB")
    assert len(view.html()) < 300_000


def test_what_nobody_measured_is_said_and_never_guessed(there, tmp_path):
    view = picker.view(there)
    *_, files = [title.split(", ")[0] for title in there]
    view.set(memory=files, disk="250 MB/s", loss="any")
    assert view.words[0].startswith("Not measured: moelab")
    assert all("llama" in row["configuration"] for row in view.rows())
    first = next(title.split(", ")[0] for title in there if "file" in title)
    view.set(memory=first, disk="the disk as it is", loss="none")
    assert "Not measured" in view.words[0] and view.figures
    assert picker.recorded(tmp_path) == {}
    unknown = picker.told({"a, b": {"mxfp4": {"TPOT s": 1.0, "result": ""}}}, {})
    assert picker.pick(unknown, "a", "b", "0.001")["best"] is None
    assert picker.pick(unknown, "a", "b", "any")["best"] == "mxfp4"
