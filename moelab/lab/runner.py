"""Runs a notebook headlessly (`moelab.lab.execute`); its run is kept atomically.

    results/runs/<notebook>/<run id>@<host>@<pid>.part   while it runs; what a killed run leaves
    results/runs/<notebook>/<run id>                     finished: notebook, metrics.json, figures/
    results/runs/<notebook>/<run id>-lab                 saved by a person in JupyterLab: without a
                                                         notebook
    results/runs/<notebook>/failed                       the last one, if it failed: the notebook as
                                                         far as it came, error.txt

A notebook whose parameters cell is tagged `side-by-side` measures no times but those of its own
processor use, so that others may run meanwhile."""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelab.base.arguments import described
from moelab.base.files import (
    CHECKOUT,
    absolute,
    child_environment,
    remove_leftovers,
    results_root,
    write_text,
)
from moelab.base.records import Record
from moelab.base.registry import near
from moelab.base.schema import naming, typed
from moelab.base.table import duration
from moelab.comparison import resolved
from moelab.lab.results import new_run_id, part_name

CELL_TIMEOUT = 1200.0
#: types of parameters, by the names of their annotations
KINDS = {of.__name__: of for of in (bool, int, float, str, list, dict)}


class NotebookFailed(RuntimeError):
    """A notebook that did not run to its end; `directory` holds what there is of it."""

    def __init__(self, notebook: str, error: str, directory: Path) -> None:
        super().__init__(
            f"{notebook} failed: {error}\n\nThe notebook as far as it came is in {directory}"
        )
        self.error = error
        self.directory = directory


@dataclass(frozen=True)
class Parameter:
    """One parameter of a notebook, as its parameters cell states it."""

    name: str
    type: str  # its annotation, or the type of its default
    default: Any
    help: str  # its trailing comment

    def __str__(self) -> str:
        return f"{self.name}: {self.type} = {self.default!r}" + (
            f"   # {self.help}" if self.help else ""
        )


def notebooks(names: list[str] | None = None, others: Iterable[str] = ()) -> list[Path]:
    """Notebooks of the repository by name or number ("01", "01_calibration"), or paths; all without
    names; others : what else might have been meant."""
    paths = sorted(CHECKOUT.glob("notebooks/[0-9]*.ipynb")) if CHECKOUT else []
    known = {path.stem: path for path in paths}
    found = []
    for name in names or known:
        given = absolute(name)
        if given.suffix != ".ipynb" or not given.is_file():
            given = known[resolved(name, [*known, *others])]
        found.append(given.resolve())
    return found


def tagged(path: str | Path, tag: str) -> list[Any]:
    """The cells of a notebook that have a tag; FileNotFoundError, or ValueError if it is none."""
    # an optional package of jsonschema that takes seconds to import
    sys.modules.setdefault("rfc3987_syntax", None)
    import nbformat

    with naming(path, "notebook", "Jupyter"):
        notebook = nbformat.v4.reads(Path(path).read_text(encoding="utf-8"))
        try:
            nbformat.validate(notebook, version=4)
        except nbformat.ValidationError as error:
            raise ValueError(error.message[:200]) from None
    return [of for of in notebook.cells if tag in of.metadata.get("tags", ())]


def inspect(path: str | Path) -> dict[str, Parameter]:
    """The parameters of a notebook, from its tagged cell, as papermill reads them: a comment must
    have no `=`."""
    cells = tagged(path, "parameters")
    from papermill.translators import PythonTranslator

    found = {}
    for cell in cells:
        for of in PythonTranslator.inspect(cell):
            default = read_literal(of.default)
            kind = of.inferred_type_name
            kind = type(default).__name__ if kind == "None" else kind
            found[of.name] = Parameter(of.name, kind, default, of.help)
    return found


def check_parameters(path: str | Path, given: Record) -> Record:
    """The given parameters with the types that the notebook expects; text, as typed on a command
    line, is read.

    Raises ValueError: the notebook has none of that name, the message lists those it has; a value
    of the wrong type."""
    valid = inspect(path)
    if unknown := [name for name in given if name not in valid]:
        listing = (
            "\n".join(f"  {parameter}" for parameter in valid.values())
            or "  none: it has no parameters cell"
        )
        raise ValueError(
            f"{Path(path).stem} has no parameter {', '.join(map(repr, unknown))}."
            f"{near(unknown[0], valid)} It has\n{listing}"
        )
    return {name: convert(valid[name], value) for name, value in given.items()}


def convert(parameter: Parameter, value: Any) -> Any:
    """`value` as the parameter's type; the error for one that cannot be says what was expected."""
    base = parameter.type.split("[")[0].strip()
    if isinstance(value, str) and base != "str":
        value = read_literal(value)
    if base == "float" and type(value) is int or base == "bool" and value in (0, 1):
        value = KINDS[base](value)
    return typed(value, KINDS.get(base, Any), f"parameter {parameter.name}")


def read_literal(text: str) -> Any:
    """JSON, or a Python literal; where the type is unknown and neither fits, the text itself."""
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


def split_assignments(assignments: list[str], option: str = "-p") -> dict[str, str]:
    """["a=1", "b=x"] as a dictionary."""
    for assignment in assignments:
        if not assignment.partition("=")[0].isidentifier() or "=" not in assignment:
            raise ValueError(f"{option} {assignment}: write {option} name=value")
    return dict(assignment.split("=", 1) for assignment in assignments)


def run_notebook(
    path: str | Path,
    parameters: Record | None = None,
    timeout: float = CELL_TIMEOUT,
) -> Path:
    """Execute a notebook; returns the directory of the finished run.

    parameters : name → value, or → text that is read by the parameter's type. timeout : seconds
        that one cell may take.

    Raises NotebookFailed: a cell raised, took too long, or the kernel died.
    """
    from moelab.lab.execute import execute

    path = absolute(path).resolve()
    parameters = check_parameters(path, parameters or {})
    folder = results_root() / "runs" / path.stem
    remove_leftovers(folder)
    run_id = new_run_id(folder)
    part = folder / part_name(run_id)
    part.mkdir(parents=True)
    # as in JupyterLab, a notebook may import what lies beside it
    variables = {
        "MOELAB_HEADLESS": "1",
        "MOELAB_RUN_DIR": str(part),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONPATH": child_environment(path.parent)["PYTHONPATH"],
    }
    error = execute(path, parameters, part, timeout, variables)
    failed = folder / "failed"
    shutil.rmtree(failed, ignore_errors=True)
    if error is None:
        os.replace(part, folder / run_id)
        return folder / run_id
    write_text(part / "error.txt", error.strip() + "\n")
    os.replace(part, failed)
    raise NotebookFailed(path.stem, error, failed)


add_arguments = described(__file__, "one", "how")


def main(args: argparse.Namespace) -> int:
    (path,) = notebooks([args.notebook])
    if args.list:
        print("\n".join(map(str, inspect(path).values())) or f"{path.stem} has no parameters")
        return 0
    start = time.monotonic()
    try:
        directory = run_notebook(path, split_assignments(args.parameter), args.timeout)
    except NotebookFailed as failure:
        print(f"moelab: {failure}", file=sys.stderr)
        return 1
    print(f"{path.stem} finished in {duration(time.monotonic() - start)}: {directory}")
    return 0
