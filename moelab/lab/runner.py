"""Runs a notebook headlessly in a process of its own (`moelab.lab.execute`); its run is kept
atomically.

    results/runs/<notebook>/<run id>@<host>@<pid>.part   while it runs; what a killed run leaves
    results/runs/<notebook>/<run id>                     finished: notebook, metrics.json, figures/,
                                                         run.json
    results/runs/<notebook>/<run id>-lab                 saved by a person in JupyterLab: without a
                                                         notebook
    results/runs/<notebook>/<run id>.failed              failed: the notebook as far as it came,
                                                         error.txt

A notebook whose parameters cell is tagged `side-by-side` measures no times but those of its own
processor use, so that others may run meanwhile."""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import time
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, TypedDict

from moelab.arguments import number
from moelab.comparison import RunFile, is_named
from moelab.files import CHECKOUT, absolute, read_json, remove_leftovers, results_root, write_json
from moelab.lab.results import about, new_run_id, part_name
from moelab.records import Record
from moelab.registry import near, require
from moelab.schema import Must, naming, parse_json, typed

CELL_TIMEOUT = 1200.0


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
    names.

    others : what else might have been meant, for the error.
    """
    known = sorted(CHECKOUT.glob("notebooks/[0-9]*.ipynb")) if CHECKOUT else []
    if not names:
        return known
    found = []
    for name in names:
        given = absolute(name)
        matches = [path for path in known if is_named(path.stem, name)]
        if given.suffix == ".ipynb" and given.is_file():
            matches = [given]
        if len(matches) != 1:
            require("notebook", name, [*(path.stem for path in known), *others])
        found.append(matches[0].resolve())
    return found


class _Metadata(TypedDict):
    tags: NotRequired[list[str]]


class Cell(TypedDict):
    """A cell of a notebook, as far as the runner reads it."""

    cell_type: Literal["code", "markdown", "raw"]
    metadata: _Metadata
    source: str | list[str]


class _Notebook(TypedDict):
    nbformat: Annotated[int, Must(lambda version: version == 4, "4; Jupyter saves others as such")]
    metadata: Record
    cells: list[Cell]


def cells_of(path: str | Path) -> list[Cell]:
    """The cells of a notebook; FileNotFoundError, or ValueError if it is none."""
    with naming(path, "notebook", "Jupyter"):
        return typed(parse_json(Path(path).read_bytes()), _Notebook)["cells"]


def inspect(path: str | Path) -> dict[str, Parameter]:
    """The parameters of a notebook, from its tagged cell; papermill's own reader ignores lines with
    two `=`."""
    source = next(
        (
            "".join(cell["source"])
            for cell in cells_of(path)
            if "parameters" in cell["metadata"].get("tags", ())
        ),
        "",
    )
    with naming(path, "notebook", "a parameters cell of assignments only"):
        statements = ast.parse(source).body
    comments = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in statements:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not isinstance(target, ast.Name) or node.value is None:
            continue
        try:
            default = ast.literal_eval(node.value)
        except ValueError:
            default = ast.unparse(node.value)  # an expression, known by its text only
        kind = (
            ast.unparse(node.annotation)
            if isinstance(node, ast.AnnAssign)
            else type(default).__name__
        )
        found[target.id] = Parameter(target.id, kind, default, comments.get(node.end_lineno, ""))
    return found


def is_side_by_side(path: Path) -> bool:
    """Whether other notebooks may run beside this one."""
    return any("side-by-side" in cell["metadata"].get("tags", ()) for cell in cells_of(path))


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
    truths = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    readers = {
        "bool": lambda text: truths.get(text.lower()),
        "int": int,
        "float": float,
        "str": str,
    }
    types = {
        "bool": bool,
        "int": int,
        "float": (int, float),
        "str": str,
        "list": list,
        "tuple": (list, tuple),
        "dict": dict,
    }
    try:
        read = readers.get(base, read_literal)(value) if isinstance(value, str) else value
        expected = types.get(base, object)
        if not isinstance(read, expected) or (isinstance(read, bool) and base in ("int", "float")):
            raise ValueError
    except (ValueError, SyntaxError):
        example = {"bool": "true", "list": '\'["a", "b"]\'', "dict": "'{\"a\": 1}'"}.get(
            base, repr(parameter.default)
        )
        raise ValueError(
            f"parameter {parameter.name} is {value!r}; it must be of type {parameter.type}, "
            f"for example {parameter.name}={example}"
        ) from None
    return float(read) if base == "float" else read


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
    results: str | Path | None = None,
    timeout: float = CELL_TIMEOUT,
) -> Path:
    """Execute a notebook in a process of its own; returns the directory of the finished run.

    parameters : name → value, or → text that is read by the parameter's type. timeout : seconds
        that one cell may take.

    Raises NotebookFailed: a cell or a widget's callback raised, took too long, or the kernel died.
    """
    path = absolute(path).resolve()
    if not path.is_file():
        raise FileNotFoundError(f"no notebook at {path}")
    parameters = check_parameters(path, parameters or {})
    in_force = {name: parameter.default for name, parameter in inspect(path).items()} | parameters
    folder = results_root(results) / "runs" / path.stem
    remove_leftovers(folder)
    run_id = new_run_id(folder)
    part = folder / part_name(run_id)
    part.mkdir(parents=True)
    job = {
        "notebook": str(path),
        "parameters": parameters,
        "directory": str(part),
        "timeout": timeout,
        "pictures": in_force.get("smoke") is not True,
    }
    start = time.monotonic()
    status = _in_a_process(job)
    took = time.monotonic() - start
    peak = read_json(part / "run.json") if (part / "run.json").exists() else {}
    write_json(part / "run.json", about(path.stem, in_force, took) | peak)
    if status != 0:
        failed = folder / f"{run_id}.failed"
        os.replace(part, failed)
        raise NotebookFailed(path.stem, _error_of(failed, status), failed)
    os.replace(part, folder / run_id)
    return folder / run_id


def _in_a_process(job: Record) -> int:
    """Execute a notebook in a process of its own; returns its exit status."""
    variables = {
        "MOELAB_HEADLESS": "1",
        "MOELAB_RUN_DIR": job["directory"],
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    environment = child_environment(**variables)
    # as in JupyterLab, a notebook may import what lies beside it
    beside = str(Path(job["notebook"]).parent)
    environment["PYTHONPATH"] = os.pathsep.join([beside, environment["PYTHONPATH"]])
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "moelab.lab.execute"],
        stdin=subprocess.PIPE,
        env=environment,
        text=True,
        start_new_session=True,
    )
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        process.wait()
    finally:
        process.stdin.close()  # the sign to end, if it has not
        process.wait()
    return process.returncode


def _error_of(failed: Path, status: int) -> str:
    report = failed / "error.txt"
    if report.exists():
        return report.read_text(encoding="utf-8").strip()
    return f"its process ended with status {status} and left no word; see above"


def child_environment(**variables: str) -> dict[str, str]:
    """Of a process that imports this moelab from the working folder of today, which paths in
    parameters count from."""
    path = os.pathsep.join(filter(None, [str(CHECKOUT or ""), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PYTHONPATH": path} | variables


def memory_of(about: Record) -> str:
    """The kernel's peak of anonymous memory, of the content of run.json; "" where it was not
    measured."""
    return (
        f"{about['peak_anonymous_bytes'] / 1e9:.2f} GB" if "peak_anonymous_bytes" in about else ""
    )


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options that `run` and `reproduce` share."""
    parser.add_argument(
        "-p",
        "--parameter",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a parameter of the notebook; may be given several times",
    )
    parser.add_argument(
        "--timeout",
        type=number(above=0),
        default=CELL_TIMEOUT,
        metavar="SECONDS",
        help="the longest that one cell may take (%(default)g)",
    )
    parser.add_argument(
        "--results", metavar="FOLDER", help="where to write (results/, or $MOELAB_RESULTS)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("notebook", help="its number, its name or a path")
    parser.add_argument(
        "--list", action="store_true", help="list the notebook's parameters and do nothing"
    )
    add_run_options(parser)


def main(args: argparse.Namespace) -> int:
    (path,) = notebooks([args.notebook])
    if args.list:
        print("\n".join(map(str, inspect(path).values())) or f"{path.stem} has no parameters")
        return 0
    try:
        directory = run_notebook(
            path, split_assignments(args.parameter), args.results, args.timeout
        )
    except NotebookFailed as failure:
        print(f"moelab: {failure}", file=sys.stderr)
        return 1
    ran = read_json(directory / "run.json", RunFile)
    print(
        f"{path.stem} finished in {ran['seconds']:.1f} s, "
        f"{memory_of(ran) or 'memory unknown'}: {directory}"
    )
    return 0
