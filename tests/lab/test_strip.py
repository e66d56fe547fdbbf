"""What git sees of a notebook that was run in JupyterLab."""

import copy
import shlex
import subprocess
import sys

import pytest

from moelab.base.files import CHECKOUT
from notebooks.strip import after_saving

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("nbstripout")
NOTEBOOKS = sorted(CHECKOUT.glob("notebooks/*.ipynb"))


def strip(text):
    command = [sys.executable, "-m", "notebooks.strip"]
    how = {"capture_output": True, "text": True, "check": True, "cwd": CHECKOUT}
    return subprocess.run(command, input=text, timeout=60, **how).stdout


def as_lab_saves(text):
    """With outputs, counts, and what Lab notes about the kernel."""
    notebook = copy.deepcopy(nbformat.reads(text, 4))
    notebook.metadata.language_info |= {
        "version": "3.12.1",
        "codemirror_mode": {"name": "ipython", "version": 3},
    } | dict.fromkeys(("mimetype", "file_extension", "nbconvert_exporter", "pygments_lexer"), "x")
    about = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    notebook.metadata.kernelspec = about
    notebook.metadata.widgets = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    for count, cell in enumerate(notebook.cells):
        if cell.cell_type == "code":
            cell.execution_count = count
            cell.outputs = [nbformat.v4.new_output("stream", text="done\n")]
            cell.metadata |= {"scrolled": True, "execution": {"iopub.status.busy": "2025-01-01"}}
    return nbformat.writes(notebook) + "\n"


def test_a_notebook_that_was_run_in_lab_is_clean():
    source = NOTEBOOKS[0].read_text(encoding="utf-8")
    assert strip(as_lab_saves(source)) == source == strip(source)


@pytest.fixture
def repository(tmp_path):
    """(notebook, git) of a repository with our filter, in which a notebook is committed."""

    def git(*words):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", *words]
        how = {"cwd": tmp_path, "check": True, "capture_output": True, "text": True}
        return subprocess.run(command, **how).stdout

    git("init", "-q")
    command = shlex.join(["env", f"PYTHONPATH={CHECKOUT}", sys.executable, "-m", "notebooks.strip"])
    git("config", "filter.nbstripout.clean", command)
    (tmp_path / ".gitattributes").write_text((CHECKOUT / ".gitattributes").read_text())
    path = tmp_path / "a.ipynb"
    path.write_text(NOTEBOOKS[0].read_text())
    git("add", ".")
    git("commit", "-qm", "a notebook")
    return path, git


def saved(path, text):
    """What `make lab` does when a person saves."""
    path.write_text(text)
    after_saving(model={"type": "notebook"}, os_path=str(path), contents_manager=None).join(60)


def test_git_status_is_clean_after_a_run_and_tells_of_a_change(repository):
    path, git = repository
    source = path.read_text()
    path.write_text(as_lab_saves(source))
    assert git("status", "--porcelain") == " M a.ipynb\n"  # what git alone says
    saved(path, as_lab_saves(source))
    assert git("status", "--porcelain") == ""
    saved(path, as_lab_saves(source.replace("# 00", "# 99")))
    assert git("status", "--porcelain") == " M a.ipynb\n" and '+    "# 99' in git("diff")
    saved(path.with_name("new.ipynb"), source)
    assert "?? new.ipynb" in git("status", "--porcelain")
    assert after_saving(model={"type": "file"}, os_path="x.txt") is None
