"""Every notebook of the repository: its form, and that it runs with smoke=True."""

import ast
import json

import nbformat
import pytest

from moelab.lab.results import KINDS
from moelab.lab.runner import inspect, notebooks, run_notebook

every_notebook = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)


@every_notebook
def test_form(path):
    nb = nbformat.read(path, 4)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert nb.metadata.kernelspec.name == "python3" and (nb.nbformat, nb.nbformat_minor) == (4, 5)
    assert len(nb.cells) <= 45
    assert "widgets" not in nb.metadata
    assert not any(cell.outputs or cell.execution_count for cell in code), "commit notebooks without outputs"
    headings = [line for cell in nb.cells if cell.cell_type == "markdown"
                for line in cell.source.splitlines() if line.startswith("# ")]
    assert len(headings) == 1
    for cell in code:
        source = "\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!")))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno - node.lineno < 5, f"{node.name} is long; code lives in moelab"


@every_notebook
def test_parameters(path):
    cell, = [cell for cell in nbformat.read(path, 4).cells if "parameters" in cell.metadata.get("tags", ())]
    assert all(isinstance(node, (ast.Assign, ast.AnnAssign)) for node in ast.parse(cell.source).body)
    parameters = inspect(path)
    assert parameters["smoke"].type == "bool" and parameters["seed"].type == "int"
    for parameter in parameters.values():
        assert parameter.help, f"{parameter.name} needs a trailing comment that says what it is"


@every_notebook
def test_smoke_run(path):
    directory = run_notebook(path, {"smoke": True}, timeout=300)
    found = json.loads((directory / "metrics.json").read_text())
    assert found["notebook"] == path.stem and found["metrics"]
    assert all(metric["kind"] in KINDS for metric in found["metrics"].values())
