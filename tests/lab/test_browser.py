"""JupyterLab in a real browser: every view and every notebook opened, every control moved, every
button pressed.

Nothing may be told as an error, by the page or by a cell, each control must change the picture, and
a saved notebook has a picture of every view; running a notebook leaves git as it was. `make test`
tries one notebook and each control of some views once, `make stress` all."""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from moelab.base.files import CHECKOUT, read_json
from moelab.comparison import finished_runs
from moelab.lab.runner import notebooks
from tests.depth import STRESS, depth
from tests.lab.test_runs import put

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("jupyterlab")
pytest.importorskip("anywidget")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)
if CHROMIUM is None:
    pytest.skip("there is no Chromium to drive: apt-get install chromium", allow_module_level=True)

#: what `make lab` has the server do
HOOKS = re.findall(r"--FileContentsManager\S+", (CHECKOUT / "Makefile").read_text())
OPENING = [
    "import moelab, moelab.lab\nfrom moelab.viz import views\nfrom moelab.cache.policies "
    "import LRU",
    "class Mine(LRU):\n    pass",
    "lm = moelab.open_model(memory='50%')",
]
#: what is shown, a cell each
VIEWS = {
    "budget": "views.budget(lm, tokens=8)",
    "scrubber": "views.scrubber(lm, tokens=8)",
    "theatre": "views.theatre(lm, tokens=8)",
    "arena": "moelab.lab.arena(Mine, tokens=64, each=1)",
    "model_map": "views.model_map()",
}
VIEWS = dict(depth([*VIEWS.items()][::3], VIEWS.items()))
#: Lab without news
SETTINGS = {"apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False}}
#: draws the cells that are out of sight, too
ALL = """() => {
  const { content } = window.jupyterapp.shell.currentWidget;
  content.notebookConfig = { ...content.notebookConfig, windowingMode: "none" };
}"""
#: whether each output that was kept for a view's picture, which names no widget, has it
PICTURED = """() => [...window.jupyterapp.shell.currentWidget.content.model.cells].every((cell) =>
  (cell.toJSON().outputs ?? []).every(({ data }) => {
    const still = [data?.["text/html"] ?? ""].flat().join("");
    return !still.includes("moelab-still") || still.includes("data:image/png");
  }))"""
#: of Lab itself, whatever it shows; the last is plotly's, of a figure that a control has just
#: replaced by the next
HARMLESS = (
    "favicon",
    "Failed to load resource",
    "translation",
    "ResizeObserver",
    "Resize must be passed a displayed",
)
#: controls of a view, and its player
CONTROLS = (
    ".widget-hslider, .widget-dropdown, .widget-select-multiple, .widget-checkbox, .moelab-scrubber"
)
#: controls in a notebook that are of no view, with the picture that they change
INTERACTIVE = ".widget-vbox:not(.moelab-view):has(> .widget-output)"
#: what a view's picture looks like now, as a short text, without the names that plotly makes up for
#: each
LOOK = """(view) => {
  const told = [...view.querySelectorAll(".main-svg, p")].map((part) => part.innerHTML).join("")
    .replace(/url\\([^)]*\\)|id="[^"]*"/g, "");
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
    """lab(path, package=CHECKOUT) starts JupyterLab at a notebook, with the package of
    a checkout; returns its address. It ends with the test."""
    started = []

    def start(path, package=CHECKOUT):
        home = tmp_path / "home"
        for name, content in SETTINGS.items():
            kept = home / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(content))
        port = free_port()
        variables = {
            "PYTHONPATH": str(package),
            "OMP_NUM_THREADS": "1",
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "IPYTHONDIR": str(home / "ipython"),
            "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        }
        own = f"""-m jupyterlab --no-browser --allow-root --expose-app-in-browser
            --ServerApp.port={port} --ServerApp.port_retries=0 --IdentityProvider.token=
            --ServerApp.websocket_ping_interval=600000 --ServerApp.websocket_ping_timeout=600000"""
        folders = {"ServerApp.root_dir": path.parent, "LabApp.workspaces_dir": home / "workspaces"}
        folders["LabApp.user_settings_dir"] = home / "settings"
        words = [*own.split(), *(f"--{name}={folder}" for name, folder in folders.items()), *HOOKS]
        log = open(tmp_path / "lab.log", "wb")
        about = {"env": os.environ | variables, "stdout": log, "stderr": log}
        started.append(subprocess.Popen([sys.executable, *words], start_new_session=True, **about))
        address = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/api", timeout=5).close()
                return f"{address}/lab/tree/{path.name}"
            except OSError:
                assert started[0].poll() is None and time.monotonic() < deadline, (
                    tmp_path / "lab.log"
                ).read_text()
                time.sleep(0.2)

    yield start
    for process in started:
        os.killpg(process.pid, 15)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:  # Jupyter hangs now and then, its kernel gone
            os.killpg(process.pid, 9)
            process.wait(30)


def write(path, cells):
    """A notebook of these cells of code."""
    about = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(metadata={"kernelspec": about}, cells=cells), path)
    return path


@pytest.fixture
def page():
    """A page of a headless browser; `page.complaints` is what it was told as errors."""
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_context(viewport={"width": 1280, "height": 1800}).new_page()
        page.complaints = []

        def said(text):
            if not any(word in text for word in HARMLESS):
                page.complaints.append(text)

        page.on("pageerror", lambda error: said(str(error)))
        page.on("console", lambda message: said(message.text) if message.type == "error" else None)
        yield page
        browser.close()


def run_all(page, address):
    """Open a notebook and run all its cells as soon as the kernel is there; the page's `finished`
    is when they have."""
    page.goto(address, timeout=60_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
    page.wait_for_function(
        "() => window.jupyterapp && window.jupyterapp.shell.currentWidget?.sessionContext",
        timeout=60_000,
    )
    page.evaluate("""async () => {
      const panel = window.jupyterapp.shell.currentWidget;
      await panel.context.ready;
      await panel.sessionContext.ready;
      await panel.sessionContext.session?.kernel?.info;
      void window.jupyterapp.commands.execute("notebook:run-all-cells").then(() => { window.finished = true; });
    }""")


def errors(page):
    """What cells or the page were told as errors."""
    return (
        page.locator("[data-mime-type='application/vnd.jupyter.error']").all_text_contents()
        + page.complaints
    )


def look(view):
    return view.evaluate(LOOK)


def released(view, release, seconds=120.0):
    """Whether the picture changes after a control is let go, and then rests."""
    before, end = look(view), time.monotonic() + seconds
    release()
    while time.monotonic() < end:
        view.page.wait_for_timeout(250)
        if before != (now := look(view)):
            view.page.wait_for_timeout(250)
            if now == look(view):
                return True
    return False


def releases(control, times):
    """(its label, what turns it to another value, up to `times` of them), () if it has one value;
    by keyboard."""
    if control.locator("canvas.moelab-player").count():
        return [lambda: control.press("ArrowRight")] * times
    if (handle := control.locator(".noUi-handle")).count():
        now, most = (handle.first.get_attribute(f"aria-value{of}") for of in ("now", "max"))
        return [lambda: handle.first.press("ArrowLeft" if now == most else "ArrowRight")] * times
    if (menu := control.locator("select:not([multiple])")).count():
        values = menu.locator("option").count()
        now = menu.evaluate("menu => menu.selectedIndex")
        return (
            [
                lambda i=i: menu.select_option(index=(now + i) % values)
                for i in range(1, min(times + 1, values + 1))
            ]
            if values > 1
            else []
        )
    if (several := control.locator("select[multiple]")).count():
        return [
            lambda i=i: several.select_option(index=list(range(i + 1)))
            for i in range(min(times, 3))
        ]
    return [control.locator("input[type=checkbox]").click] * times


def move(page, name, view, times):
    """Let each control of a view go `times`."""
    view.scroll_into_view_if_needed()
    for control in view.locator(CONTROLS).all():
        for release in releases(control, times):
            assert released(view, release), f"{name}: a control changes nothing; {errors(page)}"


def check_view(page, name, view, times):
    """Press each button of a view, and `move` its controls."""
    view.scroll_into_view_if_needed()
    for title in ("CSV", "PNG", "HTML"):
        with page.expect_download(timeout=60_000) as download:
            view.get_by_role("button", name=title, exact=True).click()
        assert Path(download.value.path()).stat().st_size > 20
    view.get_by_role("button", name="copy command").click()
    view.get_by_role("status").filter(has_text="copied").wait_for(timeout=10_000)
    move(page, name, view, times)


def stills(cell):
    """The pictures that a saved cell shows in the place of views, as base64."""
    texts = ["".join(o.get("data", {}).get("text/html", "")) for o in cell.get("outputs", ())]
    return re.findall(r"data:image/png;base64,([^\"]+)", "".join(texts))


@pytest.mark.timeout(600)
def test_every_view_in_the_browser(page, lab, results, tmp_path):
    for n, (value, smoke) in enumerate(((4, True), (6, False))):
        put(results, f"2025010{n + 1}-1", value, smoke=smoke, time=2.5 * value)
    path = write(tmp_path / "views.ipynb", [*OPENING, *VIEWS.values(), "lm.moelab.close()"])
    run_all(page, lab(path))
    page.wait_for_function("() => window.finished", timeout=300_000)
    page.wait_for_function(PICTURED, timeout=120_000)  # before anything is scrolled to
    page.evaluate(ALL)
    frames = page.locator(".moelab-view")
    for i, _ in enumerate(VIEWS):
        frames.nth(i).locator(".main-svg, canvas.moelab-player").first.wait_for(timeout=120_000)
    for i, name in enumerate(VIEWS):
        check_view(page, name, frames.nth(i), depth(1, 5))
    assert errors(page) == []
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    for name, cell in zip(VIEWS, read_json(path)["cells"][len(OPENING) :]):
        pictures = stills(cell)
        assert pictures and sum(map(len, pictures)) < 200_000, name


@pytest.mark.timeout(300)
def test_a_conversation_in_the_browser(page, lab, results, tmp_path):
    """It answers, its memory moves in the midst of an answer, it stops, it is replayed otherwise."""
    run_all(page, lab(write(tmp_path / "chat.ipynb", [*OPENING, "views.chat(lm, 2000)"])))
    view = page.locator(".moelab-chat")
    view.wait_for(timeout=120_000)
    view.get_by_role("textbox").fill("the red fox 37")
    view.get_by_role("textbox").press("Enter")
    stop = view.get_by_role("button", name="stop")
    view.get_by_text(re.compile(r"^\[.* tokens/s")).wait_for(timeout=60_000)
    view.get_by_role("slider").press("Home")
    view.get_by_role("slider").press("End")
    view.get_by_text("GB for experts").nth(1).wait_for(timeout=10_000)  # while it answers
    assert stop.is_enabled()
    stop.click()
    page.wait_for_function(
        "() => [...document.querySelectorAll('.moelab-chat button')].at(-1).disabled"
    )
    view.get_by_text("9.58 MB, 100 % of").wait_for(timeout=10_000)
    view.get_by_label("cache policy").select_option("lru")
    view.get_by_text(re.compile("^simulated: ")).wait_for(timeout=60_000)
    label = view.locator("canvas").first.get_attribute("aria-label")
    assert re.search(r"of 192 experts \d+ are in memory; the latest token visits 24", label)
    assert errors(page) == []


@pytest.mark.skipif(not STRESS, reason="a third Lab for one control: make stress")
def test_a_knob_runs_the_cells_above_again_and_leaves_the_run_alone(page, lab, results, tmp_path):
    cells = [
        "x: int = 1\nseed: int = 0",
        "import moelab.lab\nfrom notebooks.studies.controls import knobs\n"
        "run = moelab.lab.open_run('01_x', globals())",
        "y = x + 1",
        "run.metric('y', y, '', 'exact')\nrun.takeaway('y is {y}', y=y)",
        "knobs(globals(), 'y = x', x=[1, 2, 3])\nrun.save()",
    ]
    run_all(page, lab(write(tmp_path / "knobs.ipynb", cells)))
    page.wait_for_function("() => window.finished", timeout=60_000)
    page.locator(".noUi-handle").first.press("ArrowRight")
    page.get_by_text("y is 3").wait_for(timeout=30_000)
    assert errors(page) == []
    (run,) = finished_runs("01_x", lab=True)
    found = read_json(run / "metrics.json")
    assert found["metrics"]["y"]["value"] == 2 and len(found["takeaways"]) == 1
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")


@pytest.fixture(scope="session")
def clone(tmp_path_factory):
    """A repository as `make` sets it up, whose notebooks have `smoke` set and committed."""
    folder = tmp_path_factory.mktemp("clone") / "moelab é clone"

    def git(*words):
        return subprocess.run(
            ["git", *words], cwd=folder, check=True, capture_output=True, text=True
        ).stdout

    for name in ("moelab", "notebooks", "data"):
        ours = {"cache"} if name == "data" else set()
        shutil.copytree(
            CHECKOUT / name,
            folder / name,
            ignore=lambda _, names: ours | {"__pycache__"} & {*names},
        )
    for room in [path for path in (folder / "moelab").rglob("*") if path.is_dir()]:
        (compiled := CHECKOUT / room.relative_to(folder) / "__pycache__").mkdir(exist_ok=True)
        (room / "__pycache__").symlink_to(compiled)  # kernels: of the same sources, the same
    for name in ("pyproject.toml", ".gitattributes", ".gitignore"):
        shutil.copy(CHECKOUT / name, folder)
    for path in folder.glob("notebooks/*.ipynb"):
        path.write_text(path.read_text().replace("smoke: bool = False", "smoke: bool = True"))
    git("init", "-q")
    with open(folder / ".git" / "info" / "exclude", "a") as excluded:
        excluded.write("__pycache__\n")
    git("config", "filter.nbstripout.clean", f"{shlex.quote(sys.executable)} -m notebooks.strip")
    git("add", ".")
    git("-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "-qm", "smoke")
    return folder, git


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", depth(["00_start.ipynb"], [path.name for path in notebooks()]))
def test_every_notebook_in_the_browser(page, lab, clone, name, results):
    """All cells run and are a run, controls change the picture, nothing is told as an error, the
    saved notebook is below 1 MB and has a picture of every view, also of one that nobody has
    scrolled to, and `git status` is clean."""
    folder, git = clone
    shutil.copytree(
        CHECKOUT / "results" / "baseline", results / "baseline"
    )  # the ledger shows what was found
    path = folder / "notebooks" / name
    run_all(page, lab(path, package=folder))
    page.wait_for_function("() => window.finished", timeout=900_000)
    page.wait_for_function(PICTURED, timeout=60_000)
    page.evaluate("() => window.jupyterapp.commands.execute('docmanager:save')")
    assert errors(page) == []
    executed = read_json(path)
    assert all(
        cell["execution_count"]
        for cell in executed["cells"]
        if cell["cell_type"] == "code" and cell["source"]
    )
    assert path.stat().st_size < 1_000_000
    (run,) = finished_runs(path.stem, lab=True)
    assert read_json(run / "metrics.json")["metrics"] and run.name.endswith("-lab")
    assert git("diff") == ""
    end = time.monotonic() + 60  # git is told in a thread of the server
    while (status := git("status", "--porcelain")) and time.monotonic() < end:
        time.sleep(0.5)
    assert status == ""
    page.evaluate(ALL)
    page.wait_for_timeout(2000)
    views = page.locator(".moelab-view").count()
    assert sum(map(len, map(stills, executed["cells"]))) >= views
    for i, view in enumerate(page.locator(".moelab-view").all()):
        check_view(page, f"view {i}", view, 1)
    for i, box in enumerate(page.locator(INTERACTIVE).all()):
        move(page, f"controls {i}", box, 1)
    assert errors(page) == []
