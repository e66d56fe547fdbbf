"""Measurements: `moelab bench NAME` prints tables and writes results/bench/NAME.json.

NAME is one of the project's notebooks/studies, or a path FILE.py to your own. A bench
is a file with `run(…)`, which returns section → row → metric → value, and a docstring that says what
it measures. It may have

    OPTIONS = {"tokens": (whole(1), "of a prompt")}  # parameter of run → (what reads it; its help)
    KIND = "simulated"                                # of its numbers, if not measured
    MEASURES = ("moelab/store",)                      # files whose changes make its results old
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType

from moelab.base.arguments import Parser, described
from moelab.base.files import CHECKOUT, absolute
from moelab.base.registry import require
from moelab.base.table import head_and_rows, text_table
from moelab.bench.results import bench_file, measuring, write

#: benches and code of the notebooks
STUDIES = (CHECKOUT or Path.cwd()) / "notebooks" / "studies"


def names() -> list[str]:
    """Benches of the project's studies."""
    studies = sorted(STUDIES.glob("*.py"))
    return [one.stem for one in studies if "\ndef run(" in one.read_text("utf-8")]


def path_of(name: str) -> Path | None:
    """The file of a bench, by name or by its path; None if there is none."""
    path = absolute(name) if name.endswith(".py") else STUDIES / f"{name}.py"
    return path if path.is_file() else None


def module_of(name: str) -> ModuleType:
    """The module of a bench. ValueError: there is none, or it lacks what a bench must have."""
    path = path_of(name)
    if path is None:
        require("bench", name, [*names(), "FILE.py"])
    studies = [STUDIES.name] * (path.parent == STUDIES)  # a package, whose modules share code
    folder = str(path.parents[len(studies)])
    if folder not in sys.path:  # as for a script; processes that it starts look there, too
        sys.path.insert(0, folder)
    module = import_module(".".join([*studies, path.stem]))
    if not path.samefile(module.__file__):
        raise ValueError(f"{path.name} has the name of {module.__file__}; rename it")
    if not hasattr(module, "run"):
        raise ValueError(
            f"{path} is no bench: it has no run(…); `pydoc moelab.bench` says what one is"
        )
    return module


def add_arguments(parser: argparse.ArgumentParser) -> None:
    described(__file__, "arguments")(parser)
    listed = text_table(["bench", "what it measures"], [(name, purpose(name)) for name in names()])
    parser.epilog = f"{listed}\n\n{parser.epilog or ''}"


def purpose(name: str) -> str:
    """The first sentence of a bench's docstring, read from its file, as importing or parsing all of
    them takes seconds."""
    told = path_of(name).read_text(encoding="utf-8").partition('"""')[2].partition('"""')[0]
    return re.split(r"(?<=[.?])\s", told.strip().split("\n\n")[0].replace("\n", " "))[0]


def parser_of(name: str) -> argparse.ArgumentParser:
    """The options of a bench, from its `OPTIONS`, option → (reader, or argparse's own arguments;
    help), and with the defaults of its `run`."""
    module = module_of(name)
    parser = Parser(prog=f"moelab bench {name}")
    for option, (how, purpose) in getattr(module, "OPTIONS", {}).items():
        how = how if isinstance(how, dict) else {"type": how}
        known = signature(module.run).parameters
        if option not in known:
            raise ValueError(f"{module.__file__}: OPTIONS has {option}, but not run()")
        default = known[option].default
        shown = str(default).replace("%", "%%")  # argparse fills it in
        if default is Parameter.empty:  # run() cannot do without it
            how, default, shown = how | {"required": True}, None, ""
        if isinstance(default, tuple):
            default, shown = list(default), ",".join(map(str, default))
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            default=default,
            **how,
            help=purpose + f" (default: {shown})" * (shown not in ("", "False", "None")),
        )
    described(__file__, "own")(parser)
    parser.set_defaults(output=bench_file(Path(name).stem))
    return parser


def main(args: argparse.Namespace) -> int:
    module = module_of(args.name)
    options = vars(parser_of(args.name).parse_args(args.options))
    path = absolute(options.pop("output"))
    busy = options.pop("busy")
    print((module.__doc__ or "").split("\n\n")[0], flush=True)
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # what is mounted is unmounted
    os.environ["MOELAB_WARM"] = "0"  # no run begins with what another has learnt
    with measuring(options, busy) as about:
        found = module.run(**options)
    for section, figures in found.items():
        print(f"\n{section}")
        rows = {name: of if isinstance(of, dict) else {"": of} for name, of in figures.items()}
        columns, cells = head_and_rows(rows.values())
        print(text_table(["", *columns], [[name, *row] for name, row in zip(rows, cells)]))
    if not (busy or about["quiet"]):  # nothing is lost, and nothing good is overwritten
        path = path.with_suffix(".busy.json")
    write(path, Path(args.name).stem, about, found, getattr(module, "KIND", "measured"))
    print(f"\nwrote {path}")
    return 0
