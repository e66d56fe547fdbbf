"""Measurements: `moelab bench NAME` prints a table and, last, one JSON document."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import sys
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

from moelab.arguments import Parser
from moelab.table import format_value, head_and_rows, text_table

#: name → the module whose `run()` measures; its `KIND` says of which kind its numbers are, if not
#: measured
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
    module, parser = import_module(BENCHES[name]), Parser(prog=f"moelab bench {name}")
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
    return parser


def main(args: argparse.Namespace) -> int:
    import psutil
    from llvmlite.binding import (
        get_host_cpu_name,
    )  # here, as peers begin in interpreters that have neither

    module = import_module(BENCHES[args.name])
    options = vars(parser_of(args.name).parse_args(args.options))
    print(module.__doc__.split("\n\n")[0], flush=True)
    signal.signal(
        signal.SIGTERM, lambda number, _: sys.exit(128 + number)
    )  # what is mounted is unmounted
    results = module.run(**options)
    for section, figures in results.items():
        print(f"\n{section}")
        if figures and all(isinstance(row, dict) for row in figures.values()):
            columns, rows = head_and_rows(figures.values())
            print(text_table(["", *columns], [[name, *row] for name, row in zip(figures, rows)]))
            continue
        for name, value in figures.items():
            print(f"  {name:<40} {_text(name, value):>14}")
    kind = getattr(module, "KIND", "measured")
    machine = {
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "processor": get_host_cpu_name(),
        "memory GB": round(psutil.virtual_memory().total / 1e9, 1),
    }
    print(
        "\n"
        + json.dumps({"bench": args.name, "kind": kind, "machine": machine, "results": results})
    )
    return 0


def _text(name: str, value: Any) -> str:
    if isinstance(value, list):  # raw samples, in seconds
        return f"{1e3 * min(value):.2f} … {1e3 * max(value):.2f} ms"
    if isinstance(value, (int, float)) and name.endswith("bytes"):
        return f"{value / 1e6:,.0f} MB"
    return (
        f"{value:.3f} s" if isinstance(value, float) and "seconds" in name else format_value(value)
    )
