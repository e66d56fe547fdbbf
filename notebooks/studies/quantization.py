"""Quantised experts: bytes, error of every layer, and right answers, against the model's own bf16
experts and beside lossless forms.

Errors are relative RMS, in float32, on router inputs recorded from the training split: of the
weights, of an expert's output, and of each layer's routed output. In the tasks the whole model runs
on the quantised experts (dequantised on use, products in bf16). Routers, attention and shared
experts stay as they are. Bytes are of all routed experts as a store holds them, without
alignment. Source: Neuron MoE guide, "MoE Quantization Support"."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelab import open_model
from moelab.base import registry
from moelab.base.arguments import one_of, several, whole
from moelab.base.library import token_count
from moelab.base.progress import progress
from moelab.base.records import Numbers, Records
from moelab.evaluation import accuracy, questions
from moelab.experts.executor import dispatch
from moelab.models import discover, plugged
from moelab.recording import record
from moelab.store import fewbit
from moelab.store.codecs import compress_tensor

#: in which `Quantized` can hold experts; products are those of the dequantised weights
FORMATS = ("bf16", *fewbit.FORMATS)
CODECS = ("raw", "bf12", "huffman")
SOURCES = (
    "code",
    "prose",
    "lookup",
    "needle",
)  # of the prompts on which layers' errors are measured
MEASURES = ("moelab/store", "moelab/kernels")


def run(
    model: str | None = None,
    tasks: Sequence[str] = tuple(accuracy.TASKS),
    prompts: int = 200,
    tokens: int = 256,
    calibration: int = 16,
    seed: int = 0,
) -> Records:
    """{section: {row: {column: figure}}}; the sections' names say what kind of figures they are."""
    live = open_model(model)
    how = {"n": prompts, "windows": max(prompts // 4, 4), "tokens": tokens, "seed": seed}
    return {
        "relative RMS error by layer, per cent (measured)": layer_errors(
            live, calibration, tokens, seed
        ),
        "as a store holds them (bytes exact, scores measured)": compare_formats(live, tasks, **how),
    }


def sources_of(model: Any) -> dict[str, Quantized]:
    """Every format of a store → the model's experts in it."""
    return {name: Quantized(discover(model), name) for name in registry.names("format")}


def layer_errors(model: Any, prompts: int, tokens: int, seed: int) -> dict[str, Numbers]:
    """Format and layer → errors in per cent, on the routing of `prompts` prompts; "all" is the RMS
    over layers."""
    how = {"tokens": tokens, "seed": seed, "split": "train", "count": token_count(model.tokenizer)}
    texts = questions.prompts(SOURCES, -(-prompts // len(SOURCES)), **how)
    trace = record(model, texts, hidden=True)
    rows: dict[str, Numbers] = {}
    with plugged(model):
        for name, source in sources_of(model).items():
            found = []
            for layer in discover(model):
                columns = (
                    values[:, layer.index]
                    for values in (trace.router_inputs, trace.ids, trace.weights)
                )
                errors = layer_error(layer.seam, source, *columns)._asdict()
                found.append({key: 100 * error for key, error in errors.items()})
                rows[f"{name}, layer {layer.index}"] = found[-1]
            rows[f"{name}, all"] = {
                key: (sum(row[key] ** 2 for row in found) / len(found)) ** 0.5 for key in found[0]
            }
    return rows


def compare_formats(model: Any, tasks: Sequence[str] = ("loss",), **how: Any) -> Records:
    """Codec or format of a store → "bytes" of all experts, "bits a weight", "of raw", "TASK: score"
    and the rest of a row of `accuracy.compare`, whose other options are `how`; a codec changes no
    bit and so no score."""
    with plugged(model):
        layers = discover(model)
        own = [w for of in layers for e in range(of.E) for w in of.seam.weights(e).values()]
        sources = sources_of(model)
        size = {
            codec: sum(compress_tensor(w.contiguous(), codec).nbytes for w in own)
            for codec in CODECS
        }
        size |= {name: sum(of.bytes.values()) for name, of in sources.items()}
        modes = {name: partial(plugged, model, source=of) for name, of in sources.items()}
        scores = accuracy.compare(model, {"raw": nullcontext} | modes, tasks, **how)["scores"]
    count = sum(w.numel() for w in own)
    return {
        name: {"bytes": n, "bits a weight": 8 * n / count, "of raw": n / size["raw"]}
        | {
            f"{task}: {key}": value
            for task, by_mode in scores.items()
            for key, value in by_mode[name if name in sources else "raw"].items()
            if key not in ("unit", "n")
        }
        for name, n in size.items()
    }


class Quantized:
    """Every routed expert of a model as one format rounds it, as a source for the seam.

        plug(model, source=Quantized(plug(model), "mxfp4"))

    layers : MoE layers behind the seam, whose experts' present weights are quantised; own
    parameters stay in memory. bytes : (layer, expert) → its size in the format, biases included.
    """

    def __init__(self, layers: Sequence[Any], format: str) -> None:
        registry.require("format", format, FORMATS)
        self.kept: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.bytes: dict[tuple[int, int], int] = {}
        for layer in progress(layers, f"quantising to {format}", unit="layers"):
            if not layer.plugged:
                raise ValueError(
                    f"{layer.name}: these experts are not behind the seam; give moelab.models.plug(model)"
                )
            for e in range(layer.seam.num_experts):
                found = {
                    name: _rounded(w.detach(), format, bool(layer.seam.is_transposed))
                    for name, w in layer.seam.weights(e).items()
                }
                self.kept[layer.index, e] = {name: w for name, (w, _) in found.items()}
                self.bytes[layer.index, e] = sum(size for _, size in found.values())

    def __call__(self, layer: int, expert: int) -> dict[str, Tensor]:
        return self.kept[layer, expert]


def _rounded(w: Tensor, format: str, transposed: bool) -> tuple[Tensor, int]:
    """A tensor as a format holds it, in its own dtype, and its bytes there; `transposed` if inputs
    are its first axis. Biases, and matrices that the format does not fit, stay as they are."""
    if format == "bf16":
        kept = w.to(torch.bfloat16) if w.dim() > 1 else w
        return kept.to(w.dtype, copy=True), kept.nbytes
    codec = fewbit.find_format(format + ".T" * transposed)
    if (blob := codec.compress(w)) is None:
        return w.clone(), w.nbytes
    out = torch.empty_like(w, device="cpu")
    codec.decompress(blob, out)
    return out, len(blob)


class LayerError(NamedTuple):
    """Relative RMS errors ‖ŷ − y‖ / ‖y‖ of one layer."""

    weights: float  # of the experts that are hit
    experts: float  # of their outputs
    layer: float  # of the layer's routed output, their weighted sum


def layer_error(
    experts: Any,
    source: Callable[[int, int], dict[str, Tensor]],
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
) -> LayerError:
    """What a source's weights change in one layer against the present ones, in float32: x [T, H],
    routing [T, K]."""
    x = x.float()
    weights = weights.float()
    plan = dispatch(ids.long(), experts.num_experts)
    squares = torch.zeros(2, 2, dtype=torch.float64)  # of (weights, outputs), of (error, exact)
    exact: list = []
    other: list = []
    for expert, where in plan.hit():
        tokens = plan.tokens[where]
        chosen = plan.choices[where]
        ours = {name: w.float() for name, w in experts.weights(expert).items()}
        theirs = {name: w.float() for name, w in source(experts.layer, expert).items()}
        for name in ours:
            squares[0] += _squares(ours[name], theirs[name])
        squares[1] += _squares(experts.ffn(x[tokens], ours), experts.ffn(x[tokens], theirs))
        for side, w in ((exact, ours), (other, theirs)):
            side.append((expert, tokens, experts.weighted(x[tokens], weights[tokens, chosen], w)))
    layer = _squares(experts.accumulate(x, exact), experts.accumulate(x, other))
    return LayerError(
        *((a / b) ** 0.5 if b else 0.0 for a, b in [*squares.tolist(), layer.tolist()])
    )


def _squares(exact: Tensor, other: Tensor) -> Tensor:
    """Sums of squares of the error and of what is exact: [2], float64."""
    return torch.stack([t.double().square().sum() for t in (other - exact, exact)])


OPTIONS = {
    "model": (None, "a checkpoint folder, a store or a hub id; if not given, the small model"),
    "tasks": (several(one_of(accuracy.TASKS)), f"of {', '.join(accuracy.TASKS)}"),
    "prompts": (whole(1), "a task"),
    "tokens": (whole(1), "length of a prompt"),
    "calibration": (whole(1), "prompts on which layers' errors are measured"),
    "seed": (whole(), "picks the prompts"),
}
