"""Quantised experts: bytes, error of every layer, and right answers, against the model's own bf16 experts.

Errors are relative RMS, in float32, on router inputs recorded from the training split: of the weights, of an expert's
output, and of each layer's routed output. In the tasks the whole model runs on the quantised experts (dequantised on
use, products in bf16). Routers, attention and shared experts stay as they are. The formats of `convert --quantize`,
whose scales are of groups and blocks, are compared apart, with the lossless codecs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from moelab import datasets, open_model
from moelab.arguments import whole
from moelab.evaluation import accuracy
from moelab.evaluation.formats import compare_formats
from moelab.experts.quantization import FORMATS, Quantized, layer_error
from moelab.models import plug, plugged
from moelab.recording import record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="a checkpoint folder, a store or a hub id; if not given, the small model")
    parser.add_argument("--formats", default=",".join(FORMATS), help="(default: %(default)s)")
    parser.add_argument("--tasks", default=",".join(accuracy.TASKS), help="(default: %(default)s)")
    parser.add_argument("--prompts", type=whole(1), default=200, metavar="N", help="a task (%(default)s)")
    parser.add_argument("--tokens", type=whole(1), default=256, help="length of a prompt (%(default)s)")
    parser.add_argument("--calibration", type=whole(1), default=16, metavar="N",
                        help="prompts on which the layers' errors are measured (%(default)s)")
    parser.add_argument("--seed", type=whole(), default=0)


def run(model: str | None = None, formats: str | Sequence[str] = tuple(FORMATS),
        tasks: str | Sequence[str] = tuple(accuracy.TASKS), prompts: int = 200, tokens: int = 256,
        calibration: int = 16, seed: int = 0) -> dict[str, dict[str, Any]]:
    """{section: {row: {column: figure}}}; the sections' names say what kind of figures they are."""
    formats, tasks = (value.split(",") if isinstance(value, str) else list(value) for value in (formats, tasks))
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"there is no format {', '.join(unknown)}; there are {', '.join(FORMATS)}")
    live = open_model(model)
    layers = plug(live)
    sources = {name: Quantized(layers, name) for name in formats}
    own = sum(w.nbytes for w in layers[0].experts.weights(0).values())
    results: dict[str, dict[str, Any]] = {"bytes of an expert (exact)": {
        name: {"bytes": (size := source.nbytes(0, 0)), "of the model's own": size / own,
               "bits a weight": 8 * size / live.spec.expert_params,
               "all experts, bytes": sum(source.nbytes(*key) for key in source.kept)}
        for name, source in sources.items()}}
    results["relative RMS error by layer, per cent (measured)"] = layer_errors(live, layers, sources, calibration,
                                                                               tokens, seed)
    if tasks != [""]:
        modes = {"as it is": nullcontext} | {name: partial(plugged, live, source=source)
                                             for name, source in sources.items()}
        found = accuracy.compare(live, modes, tasks, n=prompts, windows=max(prompts // 4, 4), tokens=tokens, seed=seed)
        print("\n" + accuracy.table(found), flush=True)
        results["tasks (measured)"] = {
            f"{task}: {name}": {column: value for column, value in row.items() if column != "interval"}
            for task, by_mode in found["scores"].items() for name, row in by_mode.items()}
        results["as a store holds them (bytes exact, scores measured)"] = compare_formats(
            live, tasks=tasks, n=prompts, windows=max(prompts // 4, 4), tokens=tokens, seed=seed)
    return results


def layer_errors(model: Any, layers: Sequence[Any], sources: dict[str, Quantized], prompts: int, tokens: int,
                 seed: int) -> dict[str, dict[str, float]]:
    """Format and layer → errors in per cent, on the routing of `prompts` prompts; "all" is the RMS over layers."""
    kinds = ("code", "prose", "lookup", "needle")
    texts = datasets.prompts(kinds, -(-prompts // len(kinds)), tokens=tokens, seed=seed, split="train")
    trace = record(model, texts, hidden=True)
    rows: dict[str, dict[str, float]] = {}
    for name, source in sources.items():
        found = []
        for layer in layers:
            columns = (values[:, layer.index] for values in (trace.router_inputs, trace.ids, trace.weights))
            found.append(layer_error(layer.experts, source, *columns)._asdict())
            rows[f"{name}, layer {layer.index}"] = {key: 100 * error for key, error in found[-1].items()}
        rows[f"{name}, all"] = {key: 100 * (sum(row[key]**2 for row in found) / len(found))**0.5 for key in found[0]}
    return rows
