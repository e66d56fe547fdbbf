"""`moelab trace`: routing traces of any program on the command line.

    moelab trace show route.csv --model Qwen3-30B-A3B
    moelab trace compare ours.safetensors theirs.npz
    moelab trace import routed_experts.npy qwen.safetensors --model Qwen/Qwen3-30B-A3B
    moelab trace import ours.safetensors ours.npy
    moelab trace fit ours.safetensors

What is imported is a trace of moelab's own (.safetensors) or arrays (.npz, .npy); of counts without
order, a calibration."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from pathlib import Path

from moelab.base.arguments import described
from moelab.base.table import percent, text_table
from moelab.calibration import Calibration
from moelab.evaluation.calibrate import require_new, summary
from moelab.simulation.routing import fit
from moelab.trace import PREFILL, RoutingTrace, load, save_arrays
from moelab.trace.popularity import has_counts
from moelab.trace.statistics import Statistics, statistics


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, run, purpose, sections in (
        ("import", bring, "write it as a trace of moelab's own, or as arrays", ("one", "import")),
        ("show", compare, "say what caches and predictors would find in it", ("one", "shares")),
        ("compare", compare, "the same of several, side by side", ("several", "shares")),
        ("fit", fitted, "fit the model of routing to it, as a card's [routing]", ("one",)),
    ):
        command = commands.add_parser(
            name, help=purpose, description=purpose[0].upper() + purpose[1:] + "."
        )
        command.set_defaults(run=run)
        described(__file__, *sections, "all")(command)


def main(args: argparse.Namespace) -> int:
    return args.run(args)


def bring(args: argparse.Namespace) -> int:
    """`import`."""
    require_new(args.file, args.force)
    (path,) = args.traces
    found = _counts(path, args.model) or load(path, args.model)
    if args.file.suffix == ".safetensors":
        print(found.save(args.file))
    elif isinstance(found, RoutingTrace):
        print(save_arrays(found, args.file))
    else:
        raise ValueError(f"{path} has counts without order: they become a .safetensors file")
    print(repr(found))
    return 0


def compare(args: argparse.Namespace) -> int:
    """`show` and `compare`."""
    if len(args.traces) == 1 and (counts := _counts(args.traces[0], args.model)):
        print(summary(counts))
        return 0
    shares = [share / 100 for share in args.shares]
    columns = []
    for path in args.traces:
        trace = load(path, args.model)
        columns.append((path.name, facts(trace, statistics(trace, shares))))
    rows = [[name, *(column[name] for _, column in columns)] for name in columns[0][1]]
    print(text_table(["", *(name for name, _ in columns)], rows))
    print(
        "One pool, cold at the start, token by token; static: the trace's own most popular experts."
    )
    return 0


def fitted(args: argparse.Namespace) -> int:
    """`fit`."""
    trace = load(args.traces[0], args.model)
    found = asdict(fit(trace))
    print("[routing]")
    for name, value in found.items():
        print(f"{name} = {value:.4g}")
    print(
        f'kind = "fitted"\nsource = "moelab trace fit, on {len(trace):,} tokens of {args.traces[0].name}"'
    )
    return 0


def _counts(path: Path, model: str | None) -> Calibration | None:
    """The calibration that a file of counts is; None of a trace."""
    return Calibration.load(path, model) if has_counts(path) else None


def facts(trace: RoutingTrace, found: Statistics) -> dict[str, str]:
    """Name → value of what is shown of a trace, in words."""
    spec = trace.spec
    prefill = int((trace.phase == PREFILL).sum())
    uniform = math.log2(spec.E)
    said = {
        "model": spec.name,
        "layers, experts, a token": f"{spec.L} × {spec.E}, {spec.K}",
        "tokens in prefill, decode": f"{prefill:,} + {len(trace) - prefill:,}",
        "sequences": f"{trace.sequences:,}",
        "shared with the token before": f"{percent(found.reuse)} (chance {percent(spec.K / spec.E)})",
        "entropy of a layer": f"{found.entropy:.2f} of {uniform:.2f} bits",
        "top quarter of experts": percent(found.top_quarter),
        "next layer foretold": percent(found.next_layer),
    }
    for policy, rates in found.hits.items():
        for share, rate in zip(found.shares, rates):
            said[f"{policy} hits, {percent(share, 0)} in memory"] = percent(rate)
    return said
