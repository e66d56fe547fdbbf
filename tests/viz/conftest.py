"""A page of a browser, and a small recorded run."""

import shutil

import pytest

from moelab.base.specs import MoESpec
from moelab.cache.pools import Pools
from moelab.offloading.metrics import Forward
from moelab.offloading.run import EngineRun, EngineSettings
from moelab.simulation.traced import as_opened
from moelab.viz.views.recorded import Recorded


@pytest.fixture(scope="module")  # while it runs, nothing else in this thread can use asyncio
def chromium():
    """A browser without a window."""
    api = pytest.importorskip("playwright.sync_api")
    if (path := shutil.which("chromium")) is None:
        pytest.skip("there is no Chromium to open the page in")
    with api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def tab(request, chromium):
    """An empty page of Chromium, 1280 pixels wide, dark or as a test says; the page may complain of
    nothing, and ask for nothing but its file."""
    errors, scheme = [], getattr(request, "param", "dark")
    with chromium.new_context(
        viewport={"width": 1280, "height": 800}, color_scheme=scheme
    ) as context:
        tab = context.new_page()
        tab.on("request", lambda one: one.url.startswith("file:") or errors.append(one.url))
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda message: message.type == "error" and errors.append(message.text))
        yield tab
    assert errors == []


def a_run(steps, E, K=1, kept=0):
    """A prompt and a decode step for each further step, of two or three layers of E experts."""
    L = len(steps[0])
    spec = MoESpec("tiny", "tiny", L, tuple(range(L)), E, K, H=16, I=8)
    settings = EngineSettings(spec, Pools(F=kept), "lru", "model", 1, K, 0, (), 1000)
    run = EngineRun(settings, as_opened(settings))
    run.steps = steps
    phases = ["prefill"] + ["decode"] * (len(steps) - 1)
    run.forwards = [Forward(i, i + 1, 1, phase) for i, phase in enumerate(phases)]
    return Recorded("tiny", run, as_opened(settings), new=[*range(len(steps))])
