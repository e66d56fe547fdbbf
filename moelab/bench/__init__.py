"""Measurements: `python -m moelab bench NAME` prints a table and, last, one JSON document."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib import import_module

from moelab.table import format_value, text_table

#: name → the module whose `run()` measures
BENCHES = {"foundation": "moelab.bench.foundation", "store": "moelab.bench.store",
           "conversion": "moelab.bench.conversion", "engine": "moelab.bench.engine",
           "planning": "moelab.bench.planning", "prefetch": "moelab.bench.prefetch",
           "quantization": "moelab.bench.quantization", "ane": "moelab.bench.ane",
           "ane_accuracy": "moelab.bench.ane_accuracy", "ndp": "moelab.bench.ndp", "parallel": "moelab.bench.parallel",
           "experts": "moelab.bench.experts", "dataset_free": "moelab.bench.dataset_free"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", choices=sorted(BENCHES), help="what to measure")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="its own options; NAME --help shows them")


def main(args: argparse.Namespace) -> int:
    module = import_module(BENCHES[args.name])
    own = argparse.ArgumentParser(prog=f"moelab bench {args.name}")
    if hasattr(module, "add_arguments"):
        module.add_arguments(own)
    options = vars(own.parse_args(args.options))
    print((module.__doc__ or "").strip().split("\n\n")[0], flush=True)
    results = module.run(**options)
    for section, figures in results.items():
        print(f"\n{section}")
        if figures and all(isinstance(row, dict) for row in figures.values()):
            columns = list(dict.fromkeys(column for row in figures.values() for column in row))
            print(text_table(["", *columns], [[name, *(format_value(row.get(column)) for column in columns)]
                                              for name, row in figures.items()]))
            continue
        for name, value in figures.items():
            print(f"  {name:<40} {_text(name, value):>14}")
    machine = {"system": platform.platform(), "python": platform.python_version(), "cores": os.cpu_count()}
    print("\n" + json.dumps({"bench": args.name, "kind": "measured", "machine": machine, "results": results}))
    return 0


def _text(name: str, value: float | str | list[float]) -> str:
    if isinstance(value, list):             # raw samples, in seconds
        return f"{1e3 * min(value):.2f} … {1e3 * max(value):.2f} ms"
    if isinstance(value, str):
        return value
    if name.endswith("bytes"):
        return f"{value / 1e6:,.0f} MB"
    return f"{value:.3f} s" if "seconds" in name else f"{value:.3f}"
