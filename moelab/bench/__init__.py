"""Measurements: `moelab bench NAME` prints tables and writes results/bench/NAME.json."""

from __future__ import annotations

import argparse
import re
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from moelab.arguments import Parser, output
from moelab.bench.results import bench_file, measuring, write
from moelab.files import absolute
from moelab.table import format_value, head_and_rows, text_table

#: folders of the code that benches of tokens measure: their results are older once it changes
ENGINE = tuple(
    f"moelab/{room}"
    for room in (
        "kernels",
        "fast",
        "store",
        "offloading",
        "experts",
        "models",
        "cache",
        "speculate",
    )
)
#: name → the module whose `run()` measures; its `KIND` says of which kind its numbers are, if not measured;
#: `MEASURES`, the files and folders whose changes make its results old
BENCHES = {
    name: f"moelab.bench.{name}"
    for name in (
        "store",
        "engine",
        "prefetch",
        "quantization",
        "ane_accuracy",
        "parallel",
        "experts",
        "recall_and_misses",
        "popularity",
        "plans",
        "cache_aware",
        "zipmoe",
        "scale",
        "end_to_end",
        "gpu",
    )
} | {"advise": "moelab.advice.accuracy"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=sorted(BENCHES), help="what to measure")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, help="its own options; NAME --help shows them"
    )
    listed = text_table(["bench", "what it measures"], [(name, purpose(name)) for name in BENCHES])
    parser.epilog = f"{listed}\n\n{parser.epilog or ''}"


def purpose(name: str) -> str:
    """The first sentence of a bench's docstring, read from its file, as importing all of them takes
    seconds."""
    source = find_spec(BENCHES[name]).origin
    told = (
        Path(source).read_text(encoding="utf-8").split('"""')[1].split("\n\n")[0].replace("\n", " ")
    )
    return re.split(r"(?<=[.?])\s", told)[0]


def parser_of(name: str) -> argparse.ArgumentParser:
    """The options of a bench, from its `OPTIONS`, option → (reader, or argparse's own arguments;
    help), and with the defaults of its `run`."""
    module = import_module(BENCHES[name])
    parser = Parser(prog=f"moelab bench {name}")
    for option, (how, purpose) in getattr(module, "OPTIONS", {}).items():
        how = how if isinstance(how, dict) else {"type": how}
        default = signature(module.run).parameters[how.get("dest", option)].default
        default = list(default) if isinstance(default, tuple) else default
        shown = (
            ",".join(map(str, default))
            if isinstance(default, list)
            else ""
            if default is None
            else str(default)
        )
        parser.add_argument(
            f"--{option.replace('_', '-')}",
            default=default,
            **how,
            help=purpose + f" (default: {shown})" * (shown not in ("", "False")),
        )
    parser.add_argument(
        "--output",
        type=output,
        metavar="FILE",
        default=bench_file(name),
        help="where the records go; rows there that are not measured now stay (default: "
        f"results/bench/{name}.json)",
    )
    parser.add_argument(
        "--busy", action="store_true", help="measure on a busy machine, and let the records say so"
    )
    return parser


def main(args: argparse.Namespace) -> int:
    module = import_module(BENCHES[args.name])
    options = vars(parser_of(args.name).parse_args(args.options))
    path = absolute(options.pop("output"))
    busy = options.pop("busy")
    print(module.__doc__.split("\n\n")[0], flush=True)
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # what is mounted is unmounted
    with measuring(options, busy) as about:
        found = module.run(**options)
    for section, figures in found.items():
        print(f"\n{section}")
        if figures and all(isinstance(row, dict) for row in figures.values()):
            columns, rows = head_and_rows(figures.values())
            print(text_table(["", *columns], [[name, *row] for name, row in zip(figures, rows)]))
            continue
        for name, value in figures.items():
            print(f"  {name:<40} {_text(name, value):>14}")
    if not (busy or about["quiet"]):  # nothing is lost, and nothing good is overwritten
        path = path.with_suffix(".busy.json")
    write(path, args.name, about, found, getattr(module, "KIND", "measured"))
    print(f"\nwrote {path}")
    return 0


def _text(name: str, value: Any) -> str:
    if isinstance(value, list):  # raw samples, in seconds
        return f"{1e3 * min(value):.2f} … {1e3 * max(value):.2f} ms"
    if isinstance(value, (int, float)) and name.endswith("bytes"):
        return f"{value / 1e6:,.0f} MB"
    return (
        f"{value:.3f} s" if isinstance(value, float) and "seconds" in name else format_value(value)
    )
