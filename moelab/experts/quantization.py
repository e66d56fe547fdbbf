"""Experts in fewer bits: bf16, FP8, INT8 and MXFP4, and what each costs in accuracy.

Sources: Neuron MoE guide, "MoE Quantization Support"; OCP Microscaling Formats (MX) v1.0, §5.3.3,
§6.3. A weight is dequantised to its dtype before it is used. Biases stay as they are.

    format   a value                       scale                                          bytes a weight
    bf16     16 bits                       –                                              2
    fp8      e4m3 (e4m3fn: max 448)        float32 a channel: max |w| / 448               1 + 4/n
    int8     −127 … 127, symmetric         float32 a channel: max |w| / 127               1 + 4/n
    mxfp4    e2m1: 0 ½ 1 1½ 2 3 4 6, ±     e8m0 (a power of two) for 32 values            17/32 (n a multiple of 32)

A channel is an *output* of the matrix and n its inputs, along which the scale is shared (the
guide's "FP8 along the hidden dimension"). MXFP4 blocks run along the inputs too, as in GPT-OSS. The
exponent is OCP's, X = ⌊log₂ max|w|⌋ − 2, rounding to nearest even; what is above 6 · 2^X saturates.
`mxfp4-up` takes the smallest X with max|w| ≤ 6 · 2^X. "stored int8" and the like are what a store
holds: the formats of `moelab.store.fewbit`, scales of groups or blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moelab.experts.executor import dispatch
from moelab.progress import progress
from moelab.store import fewbit
from moelab.store.fewbit import FP8_MAX, GROUP

STORED = "stored "


class Kept:
    """A quantised tensor; each format's has `dequantize(dtype)`."""

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in vars(self).values() if isinstance(part, Tensor))


@dataclass(frozen=True, eq=False)
class Plain(Kept):
    """A tensor as it is: bf16 weights, and biases."""

    tensor: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.tensor.to(dtype)


@dataclass(frozen=True, eq=False)
class Scaled(Kept):
    """One scale a channel."""

    codes: Tensor  # float8_e4m3fn or int8, in the tensor's shape
    scale: Tensor  # float32, of length 1 on the axis along which it is shared

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return (self.codes.float() * self.scale).to(dtype)


@dataclass(frozen=True, eq=False)
class MXFP4(Kept):
    """Blocks of 32 values along one axis and their scales, in the layout of GPT-OSS's
    checkpoints."""

    blocks: Tensor  # uint8 [..., n/32, 16], two codes a byte, the first in the low half
    scales: Tensor  # uint8 [..., n/32], exponent + 127
    axis: int  # of the tensor, last in blocks and scales
    length: int  # n; the last block is filled up with zeros

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        values = fewbit.dequantize_mxfp4(self.blocks, self.scales).flatten(-2)
        return values[..., : self.length].movedim(-1, self.axis).to(dtype).contiguous()


@dataclass(frozen=True, eq=False)
class Stored(Kept):
    """A matrix in a format of `moelab.store.fewbit`."""

    format: str
    blob: Tensor  # uint8
    shape: torch.Size

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        w = torch.empty(self.shape, dtype=dtype)
        fewbit.unpack(self.format, self.blob.numpy(), w)
        return w


def quantize_stored(w: Tensor, name: str, axis: int = -1) -> Kept:
    """As a store holds a matrix, whose inputs are its last or (axis −2) last but one; as it is if
    that doesn't fit."""
    form = name + ".T" * (axis == -2)
    blob = fewbit.pack(form, w)
    return Plain(w.clone()) if blob is None else Stored(form, torch.from_numpy(blob), w.shape)


def quantize_fp8(w: Tensor, axis: int = -1) -> Scaled:
    scale = _scale(w, axis, FP8_MAX)
    return Scaled((w.float() / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scale)


def quantize_int8(w: Tensor, axis: int = -1) -> Scaled:
    scale = _scale(w, axis, 127)
    return Scaled((w.float() / scale).round().clamp(-127, 127).to(torch.int8), scale)


def _scale(w: Tensor, axis: int, largest: float) -> Tensor:
    smallest = torch.finfo(torch.float32).tiny  # of a channel of zeros, whose scale is any
    return (w.float().abs().amax(axis, keepdim=True) / largest).clamp(min=smallest)


def quantize_mxfp4(w: Tensor, axis: int = -1, saturate: bool = True) -> MXFP4:
    """MXFP4 in blocks of 32 along `axis`; `saturate=False` adds one to OCP's exponent where values
    would be clipped."""
    length = w.shape[axis]
    values = torch.nn.functional.pad(w.float().movedim(axis, -1).contiguous(), (0, -length % GROUP))
    return MXFP4(*fewbit.quantize_mxfp4(values, saturate), axis, length)


#: format → (tensor, axis along which scales are shared) → quantised tensor
FORMATS: dict[str, Callable[..., Kept]] = {
    "bf16": lambda w, axis: Plain(w.to(torch.bfloat16).clone()),
    "fp8": quantize_fp8,
    "int8": quantize_int8,
    "mxfp4": quantize_mxfp4,
    "mxfp4-up": partial(quantize_mxfp4, saturate=False),
}


def quantize(w: Tensor, format: str, axis: int = -1) -> Kept:
    """A tensor in one of `FORMATS`, or "stored NAME"; ValueError unless it is of finite floats."""
    stored = format.startswith(STORED)
    if format not in FORMATS and not stored:
        raise ValueError(f"there is no format {format!r}; there are {', '.join(FORMATS)}")
    if not w.is_floating_point() or not torch.isfinite(w).all():
        raise ValueError(
            f"a {w.dtype} tensor of shape {tuple(w.shape)} cannot be quantised: weights must be finite "
            f"floating-point numbers"
        )
    if stored:
        return quantize_stored(w.detach(), format.removeprefix(STORED), axis)
    return FORMATS[format](w.detach(), axis)


class Quantized:
    """Every routed expert of a model in one format, as a source for the seam that dequantises on
    use.

        plug(model, source=Quantized(plug(model), "mxfp4"))

    layers : MoE layers behind the seam, whose experts' present weights are quantised; own
    parameters stay in memory."""

    def __init__(self, layers: Sequence[Any], format: str) -> None:
        for layer in layers:
            if not layer.plugged:
                raise ValueError(
                    f"{layer.name}: these experts are not behind the seam; give moelab.models.plug(model)"
                )
        self.layers, self.format = layers, format
        #: (layer, expert) → parameter name → quantised tensor
        self.kept: dict[tuple[int, int], dict[str, Kept]] = {}
        self.dtypes: dict[str, torch.dtype] = {}  # of each parameter before
        for layer in progress(layers, f"quantising to {format}", unit="layers"):
            experts = layer.seam
            axis = -2 if experts.is_transposed else -1  # the inputs
            for e in range(experts.num_experts):
                weights = experts.weights(e)
                self.dtypes |= {name: w.dtype for name, w in weights.items()}
                self.kept[layer.index, e] = {
                    name: Plain(w.detach().clone()) if w.dim() < 2 else quantize(w, format, axis)
                    for name, w in weights.items()
                }

    def __call__(self, layer: int, expert: int) -> dict[str, Tensor]:
        return {
            name: kept.dequantize(self.dtypes[name])
            for name, kept in self.kept[layer, expert].items()
        }

    def nbytes(self, layer: int, expert: int) -> int:
        """Bytes of one expert, biases included."""
        return sum(kept.nbytes for kept in self.kept[layer, expert].values())


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
    x, weights = x.float(), weights.float()
    plan = dispatch(ids.long(), experts.num_experts)
    errors = {"weights": [0.0, 0.0], "experts": [0.0, 0.0]}

    def add(name: str, exact: Tensor, other: Tensor) -> None:
        for i, tensor in enumerate((other - exact, exact)):
            errors[name][i] += tensor.double().square().sum().item()

    contributions: tuple[list, list] = [], []
    for expert, where in plan.hit():
        tokens, chosen = plan.tokens[where], plan.choices[where]
        both = [
            {name: w.float() for name, w in of.items()}
            for of in (experts.weights(expert), source(experts.layer, expert))
        ]
        for name in both[0]:
            add("weights", both[0][name], both[1][name])
        add("experts", *(experts.ffn(x[tokens], w) for w in both))
        for side, w in zip(contributions, both):
            side.append((expert, tokens, experts.weighted(x[tokens], weights[tokens, chosen], w)))
    exact, other = (experts.accumulate(x, side).double() for side in contributions)
    relative = [(a / b) ** 0.5 if b else 0.0 for a, b in errors.values()]
    norm = exact.norm().item()
    return LayerError(*relative, (other - exact).norm().item() / norm if norm else 0.0)
