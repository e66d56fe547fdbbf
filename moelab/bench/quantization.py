"""Quantised experts: bytes, error of every layer, and right answers, against the model's own bf16
experts.

Errors are relative RMS, in float32, on router inputs recorded from the training split: of the
weights, of an expert's output, and of each layer's routed output. In the tasks the whole model runs
on the quantised experts (dequantised on use, products in bf16). Routers, attention and shared
experts stay as they are. A last section compares them with the lossless codecs; bytes there are of
all routed experts as a store holds them, without alignment."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from moelab import open_model, registry
from moelab.arguments import whole
from moelab.evaluation import accuracy, questions
from moelab.library import token_count
from moelab.models import MoELayer, discover, plug, plugged
from moelab.recording import record
from moelab.records import Numbers, Records
from moelab.static.quantization import FORMATS, Quantized, layer_error
from moelab.store.codecs import compress_tensor

CODECS = ("raw", "bf12", "huffman")
OPTIONS = {
    "model": (None, "a checkpoint folder, a store or a hub id; if not given, the small model"),
    "formats": (None, "of the experts, with commas between them"),
    "tasks": (None, "with commas between them; none if empty"),
    "prompts": (whole(1), "a task"),
    "tokens": (whole(1), "length of a prompt"),
    "calibration": (whole(1), "prompts on which layers' errors are measured"),
    "seed": (whole(), "picks the prompts"),
}


def run(
    model: str | None = None,
    formats: str | Sequence[str] = tuple(FORMATS),
    tasks: str | Sequence[str] = tuple(accuracy.TASKS),
    prompts: int = 200,
    tokens: int = 256,
    calibration: int = 16,
    seed: int = 0,
) -> Records:
    """{section: {row: {column: figure}}}; the sections' names say what kind of figures they are."""
    formats, tasks = (
        value.split(",") if isinstance(value, str) else list(value) for value in (formats, tasks)
    )
    if unknown := [name for name in formats if name not in FORMATS]:
        raise ValueError(f"there is no format {', '.join(unknown)}; there are {', '.join(FORMATS)}")
    live = open_model(model)
    layers = plug(live)
    sources = {name: Quantized(layers, name) for name in formats}
    own = sum(w.nbytes for w in layers[0].seam.weights(0).values())
    results: Records = {
        "bytes of an expert (exact)": {
            name: {
                "bytes": (size := source.bytes[0, 0]),
                "of the model's own": size / own,
                "bits a weight": 8 * size / live.spec.expert_params,
                "all experts, bytes": sum(source.bytes.values()),
            }
            for name, source in sources.items()
        }
    }
    results["relative RMS error by layer, per cent (measured)"] = layer_errors(
        live, layers, sources, calibration, tokens, seed
    )
    if tasks != [""]:
        modes = {"as it is": nullcontext} | {
            name: partial(plugged, live, source=source) for name, source in sources.items()
        }
        found = accuracy.compare(
            live, modes, tasks, n=prompts, windows=max(prompts // 4, 4), tokens=tokens, seed=seed
        )
        print("\n" + accuracy.table(found), flush=True)
        results["tasks (measured)"] = {
            f"{task}: {name}": {
                column: value for column, value in row.items() if column != "interval"
            }
            for task, by_mode in found["scores"].items()
            for name, row in by_mode.items()
        }
        results["as a store holds them (bytes exact, scores measured)"] = compare_formats(
            live, tasks=tasks, n=prompts, windows=max(prompts // 4, 4), tokens=tokens, seed=seed
        )
    return results


def layer_errors(
    model: Any,
    layers: Sequence[Any],
    sources: dict[str, Quantized],
    prompts: int,
    tokens: int,
    seed: int,
) -> dict[str, Numbers]:
    """Format and layer → errors in per cent, on the routing of `prompts` prompts; "all" is the RMS
    over layers."""
    kinds = ("code", "prose", "lookup", "needle")
    texts = questions.prompts(
        kinds,
        -(-prompts // len(kinds)),
        tokens=tokens,
        seed=seed,
        split="train",
        count=token_count(model.tokenizer),
    )
    trace = record(model, texts, hidden=True)
    rows: dict[str, Numbers] = {}
    for name, source in sources.items():
        found = []
        for layer in layers:
            columns = (
                values[:, layer.index] for values in (trace.router_inputs, trace.ids, trace.weights)
            )
            found.append(layer_error(layer.seam, source, *columns)._asdict())
            rows[f"{name}, layer {layer.index}"] = {
                key: 100 * error for key, error in found[-1].items()
            }
        rows[f"{name}, all"] = {
            key: 100 * (sum(row[key] ** 2 for row in found) / len(found)) ** 0.5 for key in found[0]
        }
    return rows


def compare_formats(model: Any, tasks: Sequence[str] = ("loss",), **how: Any) -> Records:
    """Codec or format of a store → "bytes" of all experts, "bits a weight", "of raw", "TASK: score"
    and the rest of a row of `accuracy.compare`, whose other options are `how`; a codec changes no
    bit and so no score."""
    with plugged(model):
        return _compare_formats(model, discover(model), tasks, **how)


def _compare_formats(
    model: Any, layers: list[MoELayer], tasks: Sequence[str], **how: Any
) -> Records:
    own = [w for layer in layers for e in range(layer.E) for w in layer.seam.weights(e).values()]
    raw = sum(w.nbytes for w in own)
    count = sum(w.numel() for w in own)
    sources = {name: Quantized(layers, name) for name in registry.names("format")}
    size = {name: sum(compress_tensor(w.contiguous(), name).nbytes for w in own) for name in CODECS}
    size |= {name: sum(source.bytes.values()) for name, source in sources.items()}
    found = accuracy.compare(
        model,
        {"raw": nullcontext}
        | {name: partial(plugged, model, source=source) for name, source in sources.items()},
        tasks,
        **how,
    )["scores"]
    return {
        name: {"bytes": n, "bits a weight": 8 * n / count, "of raw": n / raw}
        | {
            f"{task}: {key}": value
            for task, by_mode in found.items()
            for key, value in by_mode[name if name in sources else "raw"].items()
            if key not in ("unit", "n")
        }
        for name, n in size.items()
    }
