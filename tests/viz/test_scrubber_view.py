"""The token scrubber: states against the engine's own counts, and the player in a browser, without
a kernel."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("plotly")
pytest.importorskip("anywidget")

from moelab import open_model
from moelab.__main__ import main
from moelab.base.specs import MoESpec
from moelab.cache.pools import Pools
from moelab.cache.residency import Residency
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.simulation.costs import Delays, Machine
from moelab.simulation.simulator import Prefetching, simulate
from moelab.viz import views
from moelab.viz.views import scrub as scrubber
from moelab.viz.views.recorded import Recorded, recorded
from tests.models import tiny


@given(st.integers(2, 4), st.integers(3, 8), st.integers(2, 6), st.integers(0, 8), st.randoms())
def test_states_are_what_the_simulator_did(L, E, n, kept, chance):
    """Prefetches, used and not, by the simulator's own counts; hits and misses by its cache's."""

    def draw():
        return [(layer, dict.fromkeys(chance.sample(range(E), 2), 1)) for layer in range(L)]

    steps = [draw() for _ in range(n)]
    predictions = [[(layer, chance.sample(range(E), 2)) for layer in range(1, L)] for _ in range(n)]
    delays = Delays(2e-3, 0, 0, 0, 1e-3, 0, e_bytes=1000)
    done = simulate(
        steps,
        [(1, "decode")] * n,
        Residency(L, E, Pools(F=kept), "lru"),
        Machine(delays, other=(3e-3, 0.0), head=(1e-3, 0.0)),
        prefetching=Prefetching(predictions, 4),
        staging=4,
    )
    spec = MoESpec("tiny", "tiny", L, tuple(range(L)), E, 2, H=16, I=8)
    run = EngineRun(
        EngineSettings(spec, Pools(F=kept), "lru", "model", 1, 4, 4, (((1000, 0),) * E,) * L, 0),
        Residency(L, E, Pools(F=kept), "lru"),
    )
    run.steps, run.forwards = steps, done.forwards
    for event in done.events:
        run.timeline.add(event)
    found = scrubber.scrub(Recorded("tiny", run, Residency(L, E, Pools(F=kept), "lru")))
    counts = dict(zip(scrubber.STATES, found.counts().sum(0).tolist()))
    assert counts["hit"] == sum(done.counters.hits.values())
    assert counts["missed"] + counts["ahead"] == done.counters.misses
    assert counts["ahead"] == done.fetched.used
    for states, step in zip(found.states, steps):
        routed = np.isin(states, (scrubber.HIT, scrubber.AHEAD, scrubber.MISSED))
        wanted = {(layer, e) for layer, experts in step for e in experts}
        assert {*map(tuple, np.argwhere(routed).tolist())} == wanted


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save("qwen3_moe", tmp_path_factory.mktemp("scrubber") / "model", torch.bfloat16)


def test_of_a_real_run_and_of_a_model_in_memory(folder):
    with open_model(folder, memory="60%", prefetch="none") as lm:
        lm.generate(
            torch.tensor([[3, 4, 5]]),
            attention_mask=torch.ones(1, 3),
            max_new_tokens=3,
            do_sample=False,
        )
        before = lm.moelab.run.counters
        base = before.misses, sum(before.hits.values())
        view = views.scrubber(lm, prompt=[5, 6, 7, 8], tokens=6)
        after = lm.moelab.run.counters
    counts = dict(zip(scrubber.STATES, view.data[0].counts().sum(0).tolist()))
    assert counts["missed"] == after.misses - base[0]
    assert counts["hit"] == sum(after.hits.values()) - base[1]
    assert counts["ahead"] == counts["unused"] == 0
    assert len(view.data[0].words) == 6 == len(view.rows()) and view.data[0].words[0] == "5678"
    view.widget
    (player,) = view.pictures
    assert view.set(token=3) is view and player.token == 3
    player.token = 2  # as when a person moves it in the browser
    assert view.values["token"] == 2 and "token=2" in view.command(**view.values)
    with open_model(folder) as lm:
        found = scrubber.scrub(recorded(lm, [5, 6, 7, 8], 6))
    assert {*np.unique(found.states).tolist()} == {scrubber.RESIDENT, scrubber.HIT}


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "scrubber.html"
    told = ["view", "scrubber", str(folder), "--memory", "60%", "-p", "token=2"]
    assert main([*told, "--output", str(path)]) == 0
    return path


def test_the_page_plays_in_a_browser_without_a_kernel(page, tab):
    tab.goto(page.as_uri())
    status = tab.locator(".moelab-scrubber [role=status]")
    player = tab.locator("canvas.moelab-player")
    assert status.inner_text().startswith("pass 2 of 15") and tab.locator("h1").inner_text()
    first = player.screenshot()
    tab.locator(".moelab-scrubber").focus()
    tab.keyboard.press("ArrowRight")
    assert status.inner_text().startswith("pass 3 of 15") and player.screenshot() != first
    tab.keyboard.press("Home")
    tab.locator("select").select_option("30")
    drawn = int(player.get_attribute("data-frames"))
    tab.keyboard.press(" ")
    tab.wait_for_function(
        "document.querySelector('[role=status]').textContent.startsWith('pass 15 of 15')"
    )
    assert 12 <= int(player.get_attribute("data-frames")) - drawn <= 20


def test_tables_and_bad_controls_on_the_command_line(folder, tmp_path, capsys):
    out = tmp_path / "scrubber.csv"
    of = ["view", "scrubber", str(folder), "--memory", "60%"]
    assert main([*of, "--output", str(out)]) == 0
    assert out.read_text().startswith("pass,text,seconds")
    for words, told in (
        ([*of, "-p", "took=40"], "Did you mean 'token'? There are: token"),
        ([*of, "-p", "token=much"], "like token=1"),
        (["view", "budget", "--output", "x.txt"], ".html, .csv, .png"),
    ):
        assert main(words) == 2 and told in capsys.readouterr().err
