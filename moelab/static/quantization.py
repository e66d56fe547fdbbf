"""Experts in fewer bits: what each format costs in accuracy.

Source: Neuron MoE guide, "MoE Quantization Support". The formats are those of a store,
`moelab.store.fewbit`, and "bf16"; a weight is dequantised to its dtype before it is used. Biases,
and matrices that a format does not fit, stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelab.experts.executor import dispatch
from moelab.progress import progress
from moelab.registry import require
from moelab.store import fewbit
from moelab.store.codec import Codec

#: in which `Quantized` can hold experts
FORMATS = ("bf16", *fewbit.FORMATS)


class Quantized:
    """Every routed expert of a model in one format, as a source for the seam that dequantises on
    use.

        plug(model, source=Quantized(plug(model), "mxfp4"))

    layers : MoE layers behind the seam, whose experts' present weights are quantised; own
    parameters stay in memory."""

    def __init__(self, layers: Sequence[Any], format: str) -> None:
        require("format", format, FORMATS)
        for layer in layers:
            if not layer.plugged:
                raise ValueError(
                    f"{layer.name}: these experts are not behind the seam; give moelab.models.plug(model)"
                )
        #: (layer, expert) → parameter name → the format of a blob, None for a tensor; and it
        self.kept: dict[tuple[int, int], dict[str, tuple[Codec | None, Tensor]]] = {}
        #: parameter name → an empty tensor of its shape and dtype
        self.like: dict[str, Tensor] = {}
        for layer in progress(layers, f"quantising to {format}", unit="layers"):
            experts = layer.seam
            for e in range(experts.num_experts):
                weights = experts.weights(e)
                self.like |= {
                    name: torch.empty_like(w, device="meta") for name, w in weights.items()
                }
                self.kept[layer.index, e] = {
                    name: _quantized(w.detach(), format, bool(experts.is_transposed))
                    for name, w in weights.items()
                }

    def __call__(self, layer: int, expert: int) -> dict[str, Tensor]:
        found = {}
        for name, (codec, kept) in self.kept[layer, expert].items():
            found[name] = torch.empty_like(self.like[name], device="cpu")
            if codec is None:
                found[name].copy_(kept)
            else:
                codec.decompress(kept.numpy(), found[name])
        return found

    def nbytes(self, layer: int, expert: int) -> int:
        """Bytes of one expert, biases included."""
        return sum(kept.nbytes for _, kept in self.kept[layer, expert].values())


def _quantized(w: Tensor, format: str, transposed: bool) -> tuple[Codec | None, Tensor]:
    """A matrix's format and blob, or None and a tensor; `transposed` if inputs are its first
    axis."""
    if format == "bf16" and w.dim() > 1:
        return None, w.to(torch.bfloat16, copy=True)
    codec = None if format == "bf16" else fewbit.find_format(format + ".T" * transposed)
    blob = codec.compress(w) if codec else None
    return (None, w.clone()) if blob is None else (codec, torch.from_numpy(blob))


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
