"""The frame of the views: what a figure shows after it was changed in place, errors, exports,
headless."""

import csv
import io
import re
from base64 import b64decode
from types import SimpleNamespace

import pytest
from PIL import Image

pytest.importorskip("plotly")
pytest.importorskip("anywidget")
from plotly.graph_objects import Figure

from moelab.viz import theme
from moelab.viz.charts import finish
from moelab.viz.views.base import View, menu, several, slider
from moelab.viz.views.command import turned


def powers(n, kind, who, fails):
    if fails:
        raise ValueError("it shall fail")
    return [(i, i**2 if kind == "square" else -i) for i in range(n)], who


def lines(data):
    figure = Figure()
    for name in data[1]:
        figure.add_scatter(x=[x for x, _ in data[0]], y=[y for _, y in data[0]], name=name)
    return [finish(figure, "x", "y")]


@pytest.fixture
def view():
    controls = {
        "n": slider("n (items)", 5, 1, 20),
        "kind": menu("kind", "square", ["square", "minus"]),
        "who": several("who", ["p"], ["p", "q"]),
        "fails": menu("fails", False, [False, True]),
    }
    return View(
        "demo",
        controls,
        powers,
        lines,
        lambda data: [{"x": x, "y": y} for x, y in data[0]],
        lambda **values: f"moelab demo {values['n']}",
        lambda data: (f"{len(data[0])} <b>", "alt"),
        ("kind", "who"),
    )


def test_without_a_widget(view):
    view.set(n=3, kind="minus")
    assert (
        view.data == ([(0, 0), (1, -1), (2, -2)], ("p",))
        and view.command(**view.values) == "moelab demo 3"
    )
    assert list(csv.reader(io.StringIO(view.csv()))) == [
        ["x", "y"],
        ["0", "0"],
        ["1", "-1"],
        ["2", "-2"],
    ]
    with pytest.raises(ValueError, match="there is no control 'm'.*There are: n, kind"):
        view.set(m=3)
    assert "widget" not in vars(view)


def test_turning_a_control_changes_the_picture_and_keeps_it(view):
    view.widget
    picture = view.pictures[0]
    view._built["n"].value, view._built["who"].value = 3, ("p", "q")
    first, second = picture.figure["data"]
    assert view.pictures[0] is picture and (first["name"], second["name"]) == ("p", "q")
    assert second["y"] == [0, 1, 4] and view._tools.shell == "moelab demo 3"
    view.set(n=7, who=("q",))
    (only,) = picture.figure["data"]
    assert view._built["n"].value == 7 and only["x"] == list(range(7))
    assert "7 &lt;b&gt;" in view._caption.value


def test_an_error_is_shown_and_breaks_nothing(view):
    view.widget
    view._built["fails"].value = True
    (error,) = view.errors.outputs
    assert error["output_type"] == "error" and error["evalue"] == "it shall fail"
    assert view.pictures[0].figure["data"][0]["x"] == list(range(5))
    view._built["fails"].value = False
    assert view.errors.outputs == ()


def test_headless_it_is_a_figure_and_no_widget(view, monkeypatch):
    told = []
    monkeypatch.setenv("MOELAB_HEADLESS", "1")
    monkeypatch.setattr("moelab.viz.notebook.display", lambda bundle, **how: told.append(bundle))
    view._ipython_display_()
    assert (
        theme.PLOTLY in told[0] and told[1]["text/plain"] == "5 <b>" and "widget" not in vars(view)
    )


def test_a_saved_notebook_has_words_and_the_browsers_last_picture(view, monkeypatch):
    """The live view, and beside it what hides while that is shown."""
    told, updates = [], []
    handle = SimpleNamespace(update=lambda bundle, **how: updates.append(bundle["text/html"]))

    def display(bundle, **how):
        told.append(bundle)
        return handle

    monkeypatch.setattr("moelab.viz.notebook.display", display)
    monkeypatch.setattr("moelab.viz.views.base.display", display)
    view._ipython_display_()
    live, still = told
    assert live["application/vnd.jupyter.widget-view+json"]["model_id"] == view.widget.model_id
    assert "alt" in live["text/plain"] and "VBox" not in live["text/plain"]
    assert (
        f"class={view._tools.still}" in still["text/html"] and "5 &lt;b&gt;" in still["text/html"]
    )
    view.pictures[0]._handle_custom_msg({"curve": 0, "point": 1, "data": None}, [])
    Image.new("RGBA", (1, 1)).save(dot := io.BytesIO(), "PNG")
    view.pictures[0]._handle_custom_msg({"png": True}, [memoryview(dot.getvalue())])
    view.set(n=3)
    view.pictures[0]._handle_custom_msg({"png": True}, [memoryview(dot.getvalue())])
    assert len(updates) == 2 and "3 &lt;b&gt;" in updates[1]
    (png,) = re.findall(r"base64,([^\"]+)", updates[1])
    assert b64decode(png)[:8] == b"\x89PNG\r\n\x1a\n"


def test_files_are_made_when_they_are_asked_for(view, monkeypatch):
    view.widget
    sent = {}
    monkeypatch.setattr(
        view._tools, "send", lambda of, buffers: sent.update({of["name"]: bytes(buffers[0])})
    )
    for kind in ("csv", "html"):
        view._tools._handle_custom_msg({"file": kind}, [])
    assert sent["demo.csv"] == view.csv().encode() and b"<h1>demo</h1>" in sent["demo.html"]


def test_a_page_has_all_that_its_controls_show(view, tab, tmp_path):
    """But what is several of something cannot be computed before."""
    assert "<td" in view.html() and "3 &lt;b&gt;" in view.set(n=3).html()
    (tmp_path / "view.html").write_text(view.html())
    tab.goto((tmp_path / "view.html").as_uri())
    marks = tab.locator("svg.plot path")
    marks.first.wait_for()
    square = marks.first.get_attribute("d")
    assert tab.locator("#controls output").inner_text() == "kind: square"
    tab.keyboard.press("ArrowRight")
    assert tab.locator("#controls output").inner_text() == "kind: minus"
    assert marks.first.get_attribute("d") != square
    assert tab.locator("#caption").inner_text() == "3 <b>"


def test_a_page_begins_with_a_value_between_its_steps(view, tab, tmp_path):
    view.controls["n"], view.plays = slider("n", 5, 1, 200), ("n",)
    (tmp_path / "view.html").write_text(view.set(n=37).html())
    tab.goto((tmp_path / "view.html").as_uri())
    output = tab.locator("#controls output")
    output.wait_for()
    assert output.inner_text() == "n: 37"
    shown = []
    tab.keyboard.press("Home")
    while output.inner_text() not in shown:
        shown.append(output.inner_text())
        assert tab.locator("#command").inner_text() == f"moelab demo {shown[-1][3:]}"
        tab.keyboard.press("ArrowRight")
    places = [int(text[3:]) for text in shown]
    assert places == sorted(places) and 37 in places and len(places) > 15


def test_a_page_that_would_be_large_has_fewer_places(view):
    texts = iter(range(10**9))
    view.controls["n"], view.plays = slider("n", 5, 1, 61), ("n",)
    view.words_of = lambda _: ("".join(f"{hash((i, next(texts)))}" for i in range(700)), "alt")
    assert len(view.html()) < 300_000


def test_a_control_is_set_to_nothing_that_its_widget_could_not_have():
    """At first, too, and from a command line."""
    controls = {
        "n": slider("n", 3, 1, 9),
        "x": slider("x", 1.0, 0.5, 2.0),
        "rate": slider("rate", 1.0, 0.5, 2.0, log=True),
        "of": menu("of", "a", "ab"),
        "some": several("some", ["a"], ["a", "b"]),
    }
    rest = [
        lambda **values: values,
        lambda _: [Figure()],
        lambda _: [],
        lambda **_: "",
        lambda _: ("", ""),
    ]
    view = View("v", controls, *rest)
    good = {"n": 1}, {"x": 2.0}, {"of": "b"}, {"some": ("a", "b")}, {"some": ()}, {"rate": 900.0}
    for values in good:
        assert view.set(**values).values.items() >= values.items()
    assert view.set(rate=1 / 3).values["rate"] == 0.3333  # as a command has it
    before = dict(view.values)
    for name, value in [
        *(("n", value) for value in (0, "3", None)),
        *(("x", value) for value in (float("nan"), float("inf"), 0.0)),
        *(("of", value) for value in ("c", None)),
        *(("rate", value) for value in (0.0, -1.0)),
        ("some", ("c",)),
    ]:
        with pytest.raises(ValueError, match="it must be"):
            view.set(**{name: value})
        assert view.values == before
        with pytest.raises(ValueError, match="it must be"):
            View("v", {name: controls[name]._replace(value=value)}, *rest)
    for words in ("n=", "n", "n=x", "n=1e3", "of=c", "q=1", "", "x=nan"):
        with pytest.raises(ValueError):
            turned(view, [words])
