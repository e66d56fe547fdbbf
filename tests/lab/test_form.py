"""The form of every notebook: short cells that fit a page, a first one that says what is asked,
documented parameters."""

import ast

import nbformat
import pytest

from moelab.lab.runner import inspect, notebooks

every_notebook = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
LINES = 25  # of a cell that a reader sees; one that only draws is collapsed
COLLAPSED = {"jupyter": {"source_hidden": True}, "tags": ["hide-input"]}


@every_notebook
def test_a_notebook_is_clean(path):
    nb = nbformat.read(path, 4)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert nb.metadata.kernelspec.name == "python3" and (nb.nbformat, nb.nbformat_minor) == (4, 5)
    assert "widgets" not in nb.metadata
    assert not any(cell.outputs or cell.execution_count for cell in code), (
        "commit notebooks without outputs"
    )
    headings = [
        line
        for cell in nb.cells
        if cell.cell_type == "markdown"
        for line in cell.source.splitlines()
        if line.startswith("# ")
    ]
    assert len(headings) == 1
    for cell in code:
        tags = cell.metadata.get("tags", ())
        assert "hide-input" not in tags or cell.metadata == COLLAPSED
        assert tags or len(cell.source.splitlines()) <= LINES, (
            f"{cell.id} is long: split it, or collapse it if it only draws"
        )


@every_notebook
def test_parameters(path):
    """Every line of the parameters cell is one that papermill reads, and says what it is."""
    cells = nbformat.read(path, 4).cells
    (cell,) = [cell for cell in cells if "parameters" in cell.metadata.get("tags", ())]
    parameters = inspect(path)
    assert len(parameters) == len(ast.parse(cell.source).body) and all(
        of.help for of in parameters.values()
    )
    assert parameters["smoke"].type == "bool" and parameters["seed"].type == "int"
    assert parameters["model"].type == parameters["memory"].type == "str"
