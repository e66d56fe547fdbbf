"""JupyterLab in a real browser: every view is opened, every control moved, every button pressed.

Nothing may be told as an error, by the page or by a cell, and each control must change the picture. MOELAB_ARTEFACTS
names a folder that keeps the screenshots and, in `latency.json`, seconds from a control's release to the new picture.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from moelab.comparison import saved_runs
from moelab.files import CHECKOUT, read_json
from tests.depth import STRESS
from tests.lab.test_runs import put

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("jupyterlab")
pytest.importorskip("anywidget")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
if not STRESS:
    pytest.skip("it drives a browser for minutes: `make stress`", allow_module_level=True)
if CHROMIUM is None:
    pytest.skip("there is no Chromium to drive: apt-get install chromium", allow_module_level=True)

OPENING = ["import moelab, moelab.lab\nfrom moelab.viz import views\nfrom moelab.cache.policies import LRU",
           "class Mine(LRU):\n    pass",
           "lm = moelab.open_model(memory='50%')"]
#: what is shown, a cell each
VIEWS = {"budget": "views.budget(lm, tokens=8)", "scrubber": "views.scrubber(lm, tokens=8)",
         "theatre": "views.theatre(lm, tokens=8)", "arena": "moelab.lab.arena(Mine, tokens=64, each=1)",
         "claims": f"views.claims('zipmoe', results={str(CHECKOUT / 'results')!r})",
         "runs": "views.runs()", "model_map": "views.model_map()"}
#: Lab without news and without hiding the cells that are out of sight
SETTINGS = {"notebook-extension/tracker": {"windowingMode": "none"},
            "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
#: of Lab itself, whatever it shows
HARMLESS = ("favicon", "Failed to load resource", "translation", "ResizeObserver")
#: what a view's picture looks like now, as a short text
LOOK = """(view) => {
  const told = [...view.querySelectorAll(".main-svg, .moelab-details")].map((part) => part.innerHTML).join("");
  const drawn = [...view.querySelectorAll("canvas")].map((canvas) => canvas.toDataURL()).join("");
  let hash = 0;
  for (const text of [told, drawn]) for (let i = 0; i < text.length; i++) hash = (hash * 31 + text.charCodeAt(i)) | 0;
  return String(hash);
}"""


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def lab(tmp_path, results):
    """lab(cells, dark=False) starts JupyterLab with a notebook of these cells; returns its address. It ends with the
    test."""
    started = []

    def start(cells, dark=False):
        home, work = tmp_path / "home", tmp_path / "work"
        work.mkdir()
        for name, content in (SETTINGS | ({"apputils-extension/themes": {"theme": "JupyterLab Dark"}} if dark else {})
                              ).items():
            path = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content))
        notebook = nbformat.v4.new_notebook(
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
            cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        nbformat.write(notebook, work / "views.ipynb")
        port = free_port()
        variables = {"PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1", "JUPYTER_CONFIG_DIR": str(home / "config"),
                     "JUPYTER_RUNTIME_DIR": str(home / "runtime"), "IPYTHONDIR": str(home / "ipython"),
                     "PYDEVD_DISABLE_FILE_VALIDATION": "1", "MOELAB_CACHE": str(home / "cache")}
        log = open(tmp_path / "lab.log", "wb")
        started.append(subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--expose-app-in-browser",
             f"--ServerApp.port={port}", "--ServerApp.port_retries=0", "--ServerApp.websocket_ping_interval=600000",
             "--ServerApp.websocket_ping_timeout=600000", "--IdentityProvider.token=",
             f"--ServerApp.root_dir={work}",
             f"--LabApp.user_settings_dir={home / 'settings'}", f"--LabApp.workspaces_dir={home / 'workspaces'}"],
            env=os.environ | variables, stdout=log, stderr=log, start_new_session=True))
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/api", timeout=5).close()
                return f"{address}/lab/tree/views.ipynb", work / "views.ipynb"
            except OSError:
                assert started[0].poll() is None and time.monotonic() < deadline, (tmp_path / "lab.log").read_text()
                time.sleep(0.2)
    yield start
    for process in started:
        os.killpg(process.pid, 15)
        process.wait(30)


@pytest.fixture(params=[(1280, False), (1920, True)], ids=str)
def page(request):
    """A page of a headless browser, in two widths and both themes; `page.complaints` is what it was told as errors."""
    width, dark = request.param
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        page = browser.new_context(viewport={"width": width, "height": 1000}, accept_downloads=True).new_page()
        page.dark, page.complaints = dark, []
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("console", lambda said: page.complaints.append(said.text) if said.type == "error" and not any(
            word in said.text for word in HARMLESS) else None)
        yield page
        browser.close()


def run_all(page):
    """Run all cells as soon as the kernel is there."""
    page.wait_for_function("() => window.jupyterapp && window.jupyterapp.shell.currentWidget?.sessionContext",
                           timeout=60_000)
    page.evaluate("""async () => {
      const panel = window.jupyterapp.shell.currentWidget;
      await panel.context.ready;
      await panel.sessionContext.ready;
      await panel.sessionContext.session?.kernel?.info;
      void window.jupyterapp.commands.execute("notebook:run-all-cells");
    }""")


def look(view):
    return view.evaluate(LOOK)


def changed(view, before, seconds=20.0):
    """Seconds until the picture is another than `before`; None if it stays."""
    begun = time.monotonic()
    while time.monotonic() < begun + seconds:
        if look(view) != before:
            return time.monotonic() - begun
        view.page.wait_for_timeout(10)
    return None


def move(view, control):
    """Turn a control to another value, by keyboard where it has one; returns its label, or None if it has one value."""
    label = (control.locator("label, .widget-label").first.text_content() or "").strip()
    if (handle := control.locator(".noUi-handle")).count():
        handle.first.focus()
        for _ in range(5):
            handle.first.press("PageDown")
    elif (menu := control.locator("select:not([multiple])")).count():
        options = menu.locator("option").count()
        if options < 2:
            return None
        now = menu.evaluate("menu => menu.selectedIndex")
        menu.select_option(index=(now + 1) % options)
    elif (several := control.locator("select[multiple]")).count():
        several.select_option(index=[0])
    elif (box := control.locator("input[type=checkbox]")).count():
        box.click()
    else:
        return None
    return label


def check_view(page, name, view, seconds, seen):
    """Move each control, press each button of one view."""
    view.scroll_into_view_if_needed()
    page.wait_for_timeout(200)
    if seen:
        view.screenshot(path=seen / f"{name} {page.viewport_size['width']}{' dark' if page.dark else ''}.png")
    controls = view.locator(".widget-hslider, .widget-dropdown, .widget-select-multiple, .widget-checkbox")
    for i in range(controls.count()):
        before = look(view)
        label = move(view, controls.nth(i))
        if label is not None:
            took = changed(view, before)
            assert took is not None, f"{name}: {label} changes nothing"
            seconds.setdefault(name, []).append(took)
    for title in ("CSV", "HTML"):
        with page.expect_download(timeout=20_000) as download:
            view.get_by_role("button", name=title, exact=True).click()
        assert Path(download.value.path()).stat().st_size > 20
    view.get_by_role("button", name="copy command").click()
    view.get_by_role("status").filter(has_text="copied").wait_for(timeout=10_000)
    if (details := view.locator("input[list]")).count():
        choice = details.first.evaluate("input => input.list.options[1].value")
        details.first.fill(choice)
        details.first.press("Enter")
        view.locator(".moelab-details table, .moelab-details p, .moelab-details pre").first.wait_for(timeout=10_000)


@pytest.mark.stress
@pytest.mark.timeout(400)
def test_every_view_in_the_browser(page, lab, results):
    for n, (value, smoke) in enumerate(((4, True), (6, False))):
        folder = put(results, f"2025010{n + 1}-1", value, smoke=smoke, time=2.5 * value, figures=("curve",))
        figure = {"data": [{"type": "scatter", "y": [value, 2 * value], "name": "hits"}], "layout": {}}
        (folder / "figures" / "curve.json").write_text(json.dumps({"figure": figure, "caption": "hits"}))
    keep = os.environ.get("MOELAB_ARTEFACTS")
    seen = Path(keep) if keep else None
    if seen:
        seen.mkdir(parents=True, exist_ok=True)
    address, path = lab([*OPENING, *VIEWS.values(), "lm.moelab.close()"], page.dark)
    page.goto(address, timeout=60_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    run_all(page)
    frames = page.locator(".moelab-view")
    for i in range(len(VIEWS)):
        frames.nth(i).wait_for(timeout=120_000)
    page.wait_for_timeout(1000)
    seconds = {}
    for i, name in enumerate(VIEWS):
        check_view(page, name, frames.nth(i), seconds, seen)
    told = page.locator("[data-mime-type='application/vnd.jupyter.error']").all_text_contents()
    assert told == [] and page.complaints == []
    if seen:
        (seen / f"latency {page.viewport_size['width']}.json").write_text(json.dumps(
            {name: {"median": statistics.median(of), "all": of} for name, of in seconds.items()}, indent=1))


@pytest.mark.stress
@pytest.mark.parametrize("page", [(1280, False)], indirect=True)
def test_a_run_in_lab_is_a_run(page, lab, results):
    address, path = lab(["import moelab.lab\nrun = moelab.lab.open_run('01_x', {'a': 1}, 0)",
                         "run.metric('n', 3, '', 'exact')\nrun.save()"])
    page.goto(address, timeout=60_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    run_all(page)
    page.get_by_text("metrics.json").first.wait_for(timeout=60_000)
    run, = saved_runs("01_x")
    assert read_json(run / "metrics.json")["metrics"]["n"]["value"] == 3 and run.name.endswith("-lab")
