"""The form of every notebook: short cells that fit a page, a first one that says what is asked,
documented parameters."""

import ast

import nbformat
import pytest

from moelab.lab.runner import inspect, notebooks

every_notebook = pytest.mark.parametrize("path", notebooks(), ids=lambda path: path.stem)
CELLS, LINES, COLUMNS, FUNCTION, WORDS = 30, 36, 100, 10, 150


def code_of(nb):
    """The source of each code cell, without magics."""
    return [
        "\n".join(line for line in cell.source.splitlines() if not line.startswith(("%", "!")))
        for cell in nb.cells
        if cell.cell_type == "code"
    ]


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
    for node in (node for source in code_of(nb) for node in ast.walk(ast.parse(source))):
        # a class may be long where the reader is to write one
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < FUNCTION, (
                f"{node.name} is long; code lives in moelab"
            )


@every_notebook
def test_parameters(path):
    (cell,) = [
        cell
        for cell in nbformat.read(path, 4).cells
        if "parameters" in cell.metadata.get("tags", ())
    ]
    assert all(
        isinstance(node, (ast.Assign, ast.AnnAssign)) for node in ast.parse(cell.source).body
    )
    parameters = inspect(path)
    assert parameters["smoke"].type == "bool" and parameters["seed"].type == "int"
    assert parameters["model"].type == parameters["memory"].type == "str"
    for parameter in parameters.values():
        assert parameter.help, f"{parameter.name} needs a trailing comment that says what it is"
