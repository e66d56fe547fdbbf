"""Pages of views, from a file, in a browser: they play, by mouse and keys, in dark and light, and show
what the view's own functions say."""

import re
from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("plotly")
pytest.importorskip("anywidget")
from moelab import claims as ledger
from moelab.cards import load_model
from moelab.simulation.routing import routing_of
from moelab.viz import views
from moelab.viz.views import budgets, stage
from moelab.viz.views import scrub as scrubber
from tests.depth import in_turn
from tests.models import tiny
from tests.viz.test_theatre_view import TRUE
from tests.viz.test_theatre_view import stage as staged

#: bytes that a page may have
MOST = 300_000
VIEWS = "budget", "scrubber", "theatre", "claims", "model_map"
#: what its slider turns
SLIDERS = {"budget": "share", "theatre": "token", "claims": "claim", "model_map": "colour"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """View → (it, its page)."""
    patch = pytest.MonkeyPatch()
    patch.setattr(budgets, "SHARES", (1, 30, 60, 100))
    patch.setattr(budgets, "DEVICES", ("raspberry-pi-5",))
    spec = load_model("Phi-tiny-MoE")
    trace = routing_of(spec)[0].trace(spec, [8])
    folder = tmp_path_factory.mktemp("pages")
    model = tiny.save("qwen3_moe", folder / "model", torch.bfloat16)
    found = {
        "budget": views.budget(trace),
        "scrubber": views.scrubber(trace),
        "theatre": stage.view_of(staged(TRUE)),
        "claims": views.claims(),
        "model_map": views.model_map(model),
    }
    claim = found["claims"].controls["claim"]
    found["claims"].controls["claim"] = claim._replace(steps=(0, 100, 200, 300))  # quicker
    for name, view in found.items():
        (folder / f"{name}.html").write_text(view.html(), encoding="utf-8")
    yield {name: (view, folder / f"{name}.html") for name, view in found.items()}
    patch.undo()


def caption(tab):
    return tab.locator("#caption").text_content()


def told(tab):
    """Where the slider is, in words."""
    return tab.locator("#controls output, [role=status]").first.text_content()


@pytest.mark.parametrize("name, tab", in_turn(list(VIEWS), ["dark", "light"]), indirect=["tab"])
def test_a_page_plays_from_a_file(made, tab, name):
    view, path = made[name]
    assert path.stat().st_size < MOST
    tab.goto(path.as_uri())
    tab.wait_for_selector("svg.plot, canvas.moelab-player")
    assert caption(tab) == view.words[0]
    assert tab.locator("#command").text_content() == view.command(**view.values)
    assert re.search(
        r"Made by moelab, \d{4}-\d\d-\d\dT.* cores", tab.locator(".note").text_content()
    )
    picture = tab.locator("svg.plot, canvas.moelab-player").first
    assert picture.get_attribute("role") == "img" and picture.get_attribute("aria-label")
    tab.keyboard.press("Home")
    first, drawn = told(tab), picture.screenshot()
    tab.keyboard.press("ArrowRight")
    second = told(tab)
    assert second != first and picture.screenshot() != drawn
    tab.keyboard.press("ArrowLeft")
    assert told(tab) == first
    tab.get_by_title("one on (right arrow)").click()
    assert told(tab) == second
    tab.locator("input[type=range]").press("End")
    last = told(tab)
    tab.locator("h1").click()
    tab.keyboard.press("Home")
    tab.locator("select").last.select_option("30")
    tab.keyboard.press(" ")
    tab.wait_for_function("document.querySelector('[title^=play]').textContent.includes('play')")
    assert told(tab) == last
    backdrop = "getComputedStyle(document.body).backgroundColor"
    before = tab.evaluate(backdrop)
    tab.locator("#theme").click()
    assert tab.evaluate(backdrop) != before


@pytest.mark.parametrize("name", SLIDERS)
def test_what_is_shown_is_what_the_views_own_functions_say(made, tab, name):
    view, path = made[name]
    tab.goto(path.as_uri())
    tab.wait_for_selector("svg.plot")
    turned, control = SLIDERS[name], view.controls[SLIDERS[name]]
    steps = control.steps if name == "model_map" else sorted({*control.steps, control.value})
    tab.keyboard.press("Home")
    for step in steps:
        values = view.values | {turned: step}
        data = view.compute(**values)
        assert told(tab) == f"{control.label}: {step}"
        assert caption(tab) == view.words_of(data)[0]
        assert tab.locator("#command").text_content() == view.command(**values)
        figures = [*view.draw(data)]
        assert tab.locator("svg.plot").count() == len(figures)
        names = Counter(trace.name for figure in figures for trace in figure.data if trace.name)
        shown = set(tab.locator(".legend > span").all_text_contents())
        assert names.keys() <= shown
        tab.keyboard.press("ArrowRight")


def test_numbers_are_told_under_the_pointer(made, tab):
    view, path = made["theatre"]
    tab.goto(path.as_uri())
    tab.wait_for_selector("svg.plot")
    tip = tab.locator(".moelab-tip:not([hidden])")
    for token in (1, 3):
        values = view.values | {"token": token}
        while told(tab) != f"decode step: {token}":
            tab.keyboard.press("ArrowRight")
        works = view.draw(view.compute(**values))
        works = [*works][1].data[0]
        strip = tab.locator("svg.plot").nth(1)
        for i, value in enumerate(works.y):
            bar = strip.locator("rect").nth(i).bounding_box()
            tab.mouse.move(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2)
            assert tip.text_content() == f"{works.customdata[i]}: {value:.2f} ms\nworks"
    bar = strip.locator("rect").nth(0).bounding_box()
    tab.mouse.click(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2)
    assert told(tab) == "decode step: 0"


def test_the_map_opens_and_closes(made, tab):
    view, path = made["model_map"]
    tree = view.data[0]
    tab.goto(path.as_uri())
    tab.wait_for_selector("svg.plot")
    layer = next(node for node in tree if node.parent and not node.leaf)
    tab.locator("svg.plot text", has_text=layer.label).first.click()
    assert tab.locator(".path button").all_text_contents() == [tree[0].label, layer.label]
    tab.mouse.move(*(tab.locator("svg.plot").bounding_box()[side] + 30 for side in "xy"))
    assert " MB" in tab.locator(".moelab-tip:not([hidden])").text_content()
    tab.locator(".path button").first.click()
    assert tab.locator(".path button").count() == 1


def test_claims_are_all_counted():
    view = views.claims()
    every = ledger.rows()
    bars = [trace for trace in view.figures[0].data if trace.type == "bar"]
    counted = {trace.name.split(":")[0]: sum(trace.x) for trace in bars if trace.x}
    assert counted == Counter(row.verdict for row in every)
    assert len(view.rows()) == len(every)
    words = view.set(claim=7).words[0]
    assert all(str(cell) in words for cell in view.rows()[7].values())


def test_without_scripts_a_page_has_its_words_and_numbers(made, tab):
    view, path = made["budget"]
    plain = tab.context.browser.new_page(java_script_enabled=False)
    plain.goto(path.as_uri())
    assert view.words[0] in plain.locator("#caption").text_content()
    assert view.words[1] in plain.locator("noscript").text_content()
    plain.locator("summary").click()
    assert plain.locator("table tbody tr").count() == len(view.rows())


def sticky(F, L, E, K, kept):
    """States of an LRU cache, layer by layer, as experts are routed that often are those before."""
    random = np.random.default_rng(0)
    states = np.zeros((F, L, E), np.uint8)
    for layer in range(L):
        popular = random.permutation(E) ** 1.5 + 8.0
        cached, routed = [*range(kept)], []
        for f in range(F):
            states[f, layer, cached] = scrubber.RESIDENT
            again = [e for e in routed if random.random() < 0.4]
            fresh = random.choice(E, K, replace=False, p=popular / popular.sum())
            routed = [*dict.fromkeys([*again, *fresh.tolist()])][:K]
            for e in routed:
                states[f, layer, e] = scrubber.HIT if e in cached else scrubber.MISSED
                cached = [other for other in cached if other != e][-kept + 1 :] + [e]
    return states


def test_a_large_run_has_a_small_page_and_loses_no_state(made, tab, tmp_path):
    view = made["scrubber"][0]
    F, L, E = shape = 300, 48, 128
    states = sticky(*shape, 8, 64)
    path = tmp_path / "large.html"
    was = view.data
    try:
        view.data = scrubber.Scrub("large", states, [f"word{i} " for i in range(F)], []), 1
        path.write_text(view.html(), encoding="utf-8")
    finally:
        view.data = was
    assert path.stat().st_size < MOST
    tab.goto(path.as_uri())
    tab.wait_for_selector("[type=range]")  # there is one as soon as all states are unpacked
    took = []
    for f in (0, 1, 2, 150, 299):
        tab.evaluate(
            f"() => {{ const r = document.querySelector('[type=range]'); r.value = {f}; r.oninput(); }}"
        )
        counts = (states[f].reshape(-1, 1) == np.arange(6)).sum(0).tolist()
        said = told(tab)
        assert said.startswith(f"pass {f} of 299")
        assert [int(n) for n in re.findall(r"(\d+) (?:routed|prefetched)", said)] == counts[2:]
        start = tab.evaluate("performance.now()")
        tab.keyboard.press("ArrowLeft")
        took.append(tab.evaluate("performance.now()") - start)
    assert min(took) < 500  # ms, however busy the machine is


def test_a_page_is_opened_for_a_person_only(made, tmp_path, monkeypatch):
    import webbrowser

    from moelab.viz.views import command

    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setattr(command.views, "claims", lambda: made["claims"][0])
    from moelab.__main__ import main

    out = tmp_path / "claims.html"
    assert main(["view", "claims", "--output", str(out)]) == 0 and opened == []
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(["view", "claims", "--output", str(tmp_path / "c.csv")]) == 0 and opened == []
    assert main(["view", "claims", "--output", str(out)]) == 0 and opened == [out.as_uri()]
