"""Experts in fewer bits: what each format costs in accuracy.

Source: Neuron MoE guide, "MoE Quantization Support". The formats are those of a store,
`moelab.store.fewbit`, and "bf16"; products are those of the dequantised weights in their dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelab.experts.executor import dispatch
from moelab.progress import progress
from moelab.registry import require
from moelab.store import fewbit

#: in which `Quantized` can hold experts
FORMATS = ("bf16", *fewbit.FORMATS)


class Quantized:
    """Every routed expert of a model as one format rounds it, as a source for the seam.

        plug(model, source=Quantized(plug(model), "mxfp4"))

    layers : MoE layers behind the seam, whose experts' present weights are quantised; own
    parameters stay in memory. bytes : (layer, expert) → its size in the format, biases included.
    """

    def __init__(self, layers: Sequence[Any], format: str) -> None:
        require("format", format, FORMATS)
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
