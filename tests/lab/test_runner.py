import json
import os
import platform
import signal
import subprocess
import sys
import time

import nbformat
import psutil
import pytest

from moelab.__main__ import main
from moelab.base.files import CHECKOUT, remove_leftovers, write_json
from moelab.comparison import finished_runs
from moelab.lab.runner import (
    NotebookFailed,
    check_parameters,
    inspect,
    notebooks,
    run_notebook,
)
from tests.lab.conftest import GOOD

WIDGET = "application/vnd.jupyter.widget-view+json"


def outputs_of(path):
    return [o for cell in nbformat.read(path, 4).cells for o in cell.get("outputs", ())]


def printed(path):
    return "".join(o["text"] for o in outputs_of(path) if o.get("name") == "stdout")


def test_a_good_run_leaves_a_whole_directory(notebook, results, tmp_path, monkeypatch, capsys):
    pytest.importorskip("ipywidgets")
    other = tmp_path / "share" / "kernels" / "python3"  # of the same name, that would not start
    spec = {"argv": ["/bin/false"], "display_name": "other", "language": "python"}
    write_json(other / "kernel.json", spec)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "share"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    path = notebook(
        "good",
        *GOOD,
        "import ipywidgets\nfrom notebooks.studies.controls import interact\n"
        "interact(lambda x: print(x, end=' '), x=ipywidgets.IntSlider(2, description='x [1]'))\n"
        "interact(print, shown=True, x=ipywidgets.IntSlider(3, description='x [1]'))",
        "import os, sys\nprint(os.getcwd(), sys.executable, seed, smoke, "
        "os.environ['MOELAB_HEADLESS'])",
    )
    directory = run_notebook(path, {"seed": "7"})
    assert directory == finished_runs("good", results)[-1]
    assert not list((results / "runs").rglob("*.part"))
    metrics = json.loads((directory / "metrics.json").read_text())
    assert metrics["params"] == {"smoke": True} and metrics["seed"] == 7
    assert metrics["metrics"]["experts"] == {"value": 3, "unit": "experts", "kind": "exact"}
    about = metrics
    assert 1e8 < about["peak_bytes"] < 3e9
    assert main(["list"]) == 0 and directory.name in capsys.readouterr().out
    assert about["env"]["versions"]["python"] == sys.version.split()[0]
    assert any(package.startswith("numpy==") for package in about["packages"])
    # the kernel is this interpreter and works where the person does, whose paths are from there
    assert printed(directory / "good.ipynb").strip() == f"2 {tmp_path} {sys.executable} 7 True 1"
    outputs = [o["data"] for o in outputs_of(directory / "good.ipynb") if "data" in o]
    figure = next(of for of in outputs if "application/vnd.plotly.v1+json" in of)
    assert figure["text/plain"] == '[Figure: It rises from 1 to 2, "always"]'
    # widgets work and leave nothing behind that needs a live kernel
    assert any(of.get("text/plain") == "[To be turned in JupyterLab: x [1]]" for of in outputs)
    assert not any(WIDGET in of for of in outputs)


def test_the_last_failure_is_kept_until_the_notebook_succeeds(notebook, results):
    failing = ("print('before')", "x = 1\nraise ValueError('a broken thing')", "print('after')")
    for _ in range(2):
        with pytest.raises(NotebookFailed, match="a broken thing") as failure:
            run_notebook(notebook("fails", *failing))
        directory = failure.value.directory
        assert [*directory.parent.iterdir()] == [directory] and not finished_runs("fails", results)
        assert printed(directory / "fails.ipynb") == "before\n"
        assert "Traceback" in (directory / "error.txt").read_text()
    run = run_notebook(notebook("fails", "print('good')"))
    assert [*directory.parent.iterdir()] == [run]


@pytest.mark.parametrize(
    "cell, seconds, said",
    [
        ("import time; time.sleep(300)", 1, r"longer than 1 s.*time\.sleep.*--timeout"),
        ("import os; os.kill(os.getpid(), 9)", 60, "the kernel died in the cell that begins `imp"),
    ],
)
def test_what_ends_a_cell_is_told_in_a_sentence(cell, seconds, said, notebook):
    with pytest.raises(NotebookFailed, match=said) as failure:
        run_notebook(notebook("dies", "print('before')", cell, parameters=None), timeout=seconds)
    assert printed(failure.value.directory / "dies.ipynb") == "before\n"


def test_a_killed_runner_leaves_only_a_part_that_later_runs_remove(notebook, results):
    path = notebook("long", "import time; time.sleep(300)")
    runner = subprocess.Popen([sys.executable, "-m", "moelab", "run", str(path)], cwd=CHECKOUT)
    folder = results / "runs" / "long"
    until = time.monotonic() + 60
    descendants = []  # the kernel
    while time.monotonic() < until and not (descendants and list(folder.glob("*.part/long.ipynb"))):
        time.sleep(0.1)
        descendants = psutil.Process(runner.pid).children(recursive=True)
    os.kill(runner.pid, signal.SIGKILL)
    runner.wait()
    _, alive = psutil.wait_procs(descendants, timeout=30)
    assert descendants and not alive, "the kernel must end with the runner"
    (part,) = folder.iterdir()
    assert part.name.endswith(".part") and not finished_runs("long", results)
    assert main(["check"]) == 2  # nothing there that counts
    path.write_text(path.read_text().replace("time.sleep(300)", "pass"))
    assert [run_notebook(path)] == list(folder.iterdir())


def test_a_part_of_a_living_process_or_another_machine_is_left_alone(tmp_path):
    here, gone = platform.node(), subprocess.Popen(["true"])
    gone.wait()
    kept = [tmp_path / f"1@{here}@{os.getpid()}.part", tmp_path / f"1@elsewhere@{gone.pid}.part"]
    for part in (*kept, tmp_path / f"1@{here}@{gone.pid}.part"):
        part.mkdir()
    remove_leftovers(tmp_path)
    assert set(tmp_path.iterdir()) == set(kept)


# ---- parameters

ALL_TYPES = """smoke: bool = True  # small and fast
seed: int = 0  # random seed
budget_gb: float = 0.5  # memory for experts, GB
source: str = "needle"  # prompts, by name
sources: list[str] = ["needle", "yesno"]  # several
layers = [1, 2]  # no annotation
limit: int = 3  # of them
options: dict = {"a": 1}  # a dictionary"""


def test_parameters_are_read_by_their_type(notebook, results, capsys):
    path = notebook("types", parameters=ALL_TYPES)
    assert inspect(path)["budget_gb"].help == "memory for experts, GB"
    given = {
        "smoke": ("false", False),
        "seed": ("3", 3),
        "budget_gb": ("2", 2.0),
        "source": ("3", "3"),
        "sources": ('["prose"]', ["prose"]),
        "layers": ("[4]", [4]),
        "limit": ("5", 5),
        "options": ("{'b': 2}", {"b": 2}),
    }
    read = check_parameters(path, {name: text for name, (text, _) in given.items()})
    assert read == {name: value for name, (_, value) in given.items()}
    assert isinstance(read["budget_gb"], float) and read["smoke"] is False
    for name, text in (("seed", "x"), ("smoke", "2"), ("seed", "true"), ("sources", "3")):
        with pytest.raises(ValueError, match=f"parameter {name} is"):
            check_parameters(path, {name: text})
    assert main(["run", str(path), "-p", "sede=1"]) == 2
    told = capsys.readouterr().err
    assert "no parameter 'sede'" in told and "seed: int = 0   # random seed" in told
    assert not (results / "runs").exists()


def test_names_of_notebooks():
    with pytest.raises(ValueError, match="no notebook '77'"):
        notebooks(["77"])
    for path in notebooks():
        for name in (path.stem, path.stem.split("_")[0], str(path)):
            assert notebooks([name]) == [path]
