"""The linter's rules: what makes a graph leave the Neural Engine or wastes work there, each with
its source.

Source: NPUMoE Fig. 4, §3.2, §4.2; coremltools' own limits; reports of people who shipped models. No
operation but the supported ones goes without a finding, so a graph that has another is never clean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from moelab.ane.coreml.package import Function, Op, Package, Value
from moelab.ane.plan import MAX_CHANNELS, MAX_GRAPH_BYTES

FIG4 = "NPUMoE Figure 4"
REPORTS = "reports of people who ran models on the ANE"
SEVERITIES = ("error", "warning", "note")
UNKNOWN = "not known to this linter"

#: the file format's limit on one weight file
WEIGHT_FILE_LIMIT = 2 * 2**30
TINY_MACS = (
    500_000  # multiply-adds below which a graph is called tiny; our figure, no source has one
)
ROW_BYTES = 64  # a row of the last axis takes a multiple of this
MAX_PADDING = 4  # padded size over real size from which we warn; our figure
FLOAT_BYTES = {"fp16": 2, "fp32": 4}

#: the largest size of a score that a mask makes; −1e4 in fp16 is −10000
MASK_LIMIT = 10001
#: operations that may apply a mask, and those that only give a constant another type or shape
MASKING = ("add", "sub", "mul", "select", "maximum", "minimum")
ARRANGING = ("cast", "identity", "reshape", "expand_dims", "squeeze", "tile", "transpose")

#: operation → why
SUPPORTED = {
    "conv": "Standard/Depthwise Convolution ✓",
    "conv_transpose": "Standard/Depthwise Convolution ✓",
    "matmul": "Standard/Batched MatMul ✓",
    "softmax": "NPUMoE §3.2: softmax of attention on the NPU",
    **dict.fromkeys(
        ("relu", "relu6", "silu", "sigmoid", "gelu", "tanh", "erf", "leaky_relu", "softplus"),
        "Activations ✓",
    ),
    **dict.fromkeys(
        (
            "add",
            "sub",
            "mul",
            "real_div",
            "maximum",
            "minimum",
            "abs",
            "exp",
            "sqrt",
            "rsqrt",
            "square",
            "pow",
            "clip",
            "inverse",
            "identity",
            "cos",
            "sin",
        ),
        "Element-wise ✓",
    ),
    **dict.fromkeys(
        (
            "split",
            "concat",
            "reshape",
            "transpose",
            "expand_dims",
            "squeeze",
            "slice_by_size",
            "stack",
        ),
        "static rearrangement",
    ),
    **dict.fromkeys(
        (
            "reduce_mean",
            "reduce_sum",
            "reduce_max",
            "reduce_min",
            "reduce_sum_square",
            "reduce_l2_norm",
        ),
        "reduction of static shape",
    ),
    "constexpr_lut_to_dense": "decompressed when the model is loaded",
}
RISKY = {
    "linear": "Fig. 4 has linear layers as convolutions",
    "slice_by_index": "static slices run; reports of clamping above 4094",
    "slice_update": "the static way to write a cache; contested on the ANE",
    "read_state": "states on the ANE are contested",
    "coreml_update_state": "states on the ANE are contested",
    "write_state": "states on the ANE are contested",
    "cast": "between fp16 and fp32: a hop to another unit",
    "tile": "copies what a broadcast would not",
    "select": "needs a mask made by comparison",
    "batch_norm": "not in Fig. 4; usually folded into a convolution",
    "pad": "not in Fig. 4",
    "constexpr_blockwise_shift_scale": "quantised weights can move a convolution to the CPU",
    "constexpr_affine_dequantize": "quantised weights can move a convolution to the CPU",
}
#: risky operations that have a rule of their own
RULED = {
    "linear",
    "read_state",
    "coreml_update_state",
    "write_state",
    "constexpr_blockwise_shift_scale",
    "constexpr_affine_dequantize",
}
UNSUPPORTED = {
    "topk": "TopK sampling ×",
    "argsort": "TopK sampling ×",
    "reduce_argmax": "TopK sampling ×",
    "reduce_argmin": "TopK sampling ×",
    **dict.fromkeys(
        ("gather", "gather_nd", "gather_along_axis", "scatter", "scatter_nd", "scatter_along_axis"),
        "Scatter/Gather ×",
    ),
    **dict.fromkeys(
        ("greater", "greater_equal", "less", "less_equal", "equal", "not_equal"), "Comparison Ops ×"
    ),
    **dict.fromkeys(("layer_norm", "instance_norm", "l2_norm"), "Layernorm ×"),
    **dict.fromkeys(
        (
            "non_zero",
            "non_maximum_suppression",
            "one_hot",
            "range_1d",
            "shape",
            "fill",
            "band_part",
            "cumsum",
        ),
        "Indexing ×",
    ),
    **dict.fromkeys(
        ("while_loop", "cond", "list_gather", "make_list", "list_write"), "Dynamic shapes/tensors ×"
    ),
    **dict.fromkeys(("custom_layer", "lstm", "gru", "rnn"), "Custom Operators ×"),
}


@dataclass(frozen=True)
class Finding:
    """One thing that a rule has against a package."""

    rule: str
    severity: str
    where: str
    text: str
    source: str


#: (where, what) of each finding
Found = Iterable[tuple[str, str]]


@dataclass(frozen=True)
class Rule:
    id: str
    severity: str
    source: str
    check: Callable[[Function, Package], Found]


def verdict(kind: str) -> tuple[str, str]:
    """("supported", "unsupported" or "risky", why) of an operation type."""
    for name, table in (("supported", SUPPORTED), ("unsupported", UNSUPPORTED), ("risky", RISKY)):
        if kind in table:
            return name, table[kind]
    return "risky", UNKNOWN


def dilated(function: Function, package: Package) -> Found:
    """Convolutions with dilations, which run on the CPU."""
    for op in _of_type(function, "conv", "conv_transpose"):
        dilations = function.constant(op, "dilations")
        if dilations is not None and np.any(np.asarray(dilations) > 1):
            yield op.name, f"a dilated convolution ({np.ravel(dilations).tolist()}) runs on the CPU"


def dynamic_index(function: Function, package: Package) -> Found:
    """Slices and gathers at places that are known only at run time."""
    for op in function.ops:
        for parameter in ("begin", "end", "size") if op.type.startswith("slice_") else ():
            if parameter in op.inputs and op.inputs[parameter] not in function.constants:
                yield (
                    op.name,
                    f"{op.type} at a place known only at run time ({parameter}) runs on the CPU",
                )


def dynamic_shape(function: Function, package: Package) -> Found:
    """Inputs whose shape is flexible or unknown; the ANE runs static graphs."""
    for value in function.inputs:
        if kind := function.flexible.get(value.name):
            yield value.name, f"its shape is flexible ({kind[0]}); the ANE runs static graphs"
        elif any(isinstance(n, str) for n in value.shape):
            yield value.name, "its shape is not static"


def integers(function: Function, package: Package) -> Found:
    """Operations in integers where the ANE computes in fp16."""
    for op in function.ops:
        other = [v.dtype for v in op.outputs if v.dtype not in (*FLOAT_BYTES, "fp64")]
        if other and verdict(op.type)[0] == "supported" and not op.type.startswith("const"):
            yield op.name, f"{op.type} computes in {other[0]}; the ANE computes in fp16"


def alignment(function: Function, package: Package) -> Found:
    """Operands of products whose axes do not fill what the ANE reads at once."""
    for op in _of_type(function, "conv", "matmul"):
        given = (op.inputs.get(parameter) for parameter in ("x", "y"))
        for name in (*(name for name in given if isinstance(name, str)), op.outputs[0].name):
            value = function.values[name]
            if name in function.constants or len(value.shape) < 2:
                continue
            axes = (
                (1, len(value.shape) - 1)
                if op.type == "conv"
                else (len(value.shape) - 2, len(value.shape) - 1)
            )
            odd = [
                n
                for n in (value.shape[a] for a in axes)
                if isinstance(n, int) and n % 16 and n != 1
            ]
            if odd:
                yield op.name, f"{name} has a size of {odd[0]}, no multiple of 16"


def padding(function: Function, package: Package) -> Found:
    """Values whose last axis is padded in memory to many times their bytes."""
    for value in _activations(function):
        last = value.shape[-1] if value.shape else 0
        if isinstance(last, int) and last and len(value.shape) > 2 and _elements(value) > 1024:
            factor = (
                -(-last * FLOAT_BYTES[value.dtype] // ROW_BYTES)
                * ROW_BYTES
                / (last * FLOAT_BYTES[value.dtype])
            )
            if factor >= MAX_PADDING:
                yield (
                    value.name,
                    f"a last axis of {last} is padded to {ROW_BYTES} bytes: {factor:.0f} "
                    "times its size",
                )


def channels(function: Function, package: Package) -> Found:
    """Values with an axis wider than the ANE takes."""
    for value in _activations(function):
        width = max((n for n in value.shape if isinstance(n, int)), default=0)
        if width > MAX_CHANNELS:
            yield value.name, f"an axis of {width:,}; the ANE takes {MAX_CHANNELS:,}"


def tiny(function: Function, package: Package) -> Found:
    """Graphs with so few multiply-adds that Core ML leaves them on the CPU."""
    work = sum(_macs(function, op) for op in _of_type(function, "conv", "linear", "matmul"))
    if work < TINY_MACS:
        yield "function", f"only {work:,} multiply-adds; tiny graphs are left on the CPU"


def per_block(function: Function, package: Package) -> Found:
    """Weights with a scale for each block, where the ANE takes one a channel."""
    for op in _of_type(function, "constexpr_blockwise_shift_scale"):
        scale, data = (function.values[op.inputs[name]].shape for name in ("scale", "data"))
        if sum(s > 1 for s in scale) > 1 or any(1 < s < d for s, d in zip(scale, data)):
            yield (
                op.name,
                f"weights {list(data)} with a scale a block {list(scale)}; the ANE takes one "
                "a channel",
            )


def mask_constant(function: Function, package: Package) -> Found:
    """Constants that make scores smaller than −1e4: as they are, subtracted, or as a factor of a
    mask of 0 and 1."""
    for op in function.ops:
        for parameter in ("x", "y", "a", "b") if op.type in MASKING else ():
            constant = _constant_behind(function, op.inputs.get(parameter))
            if constant is None or constant.outputs[0].dtype not in FLOAT_BYTES:
                continue
            values = np.asarray(constant.constant, dtype=np.float64)
            subtracted = op.type == "sub" and parameter == "y"
            low = min(
                0.0 if subtracted else float(np.min(values, initial=0)),
                -float(np.max(values, initial=0)) if subtracted or op.type == "mul" else 0.0,
            )
            if low < -MASK_LIMIT:
                yield (
                    op.name,
                    f"a constant that makes {low:.4g}, as a mask, gives NaN on the device; "
                    "use −1e4",
                )


def _constant_behind(function: Function, name: Any) -> Op | None:
    """The constant that a value is, or is a cast or another arrangement of."""
    while isinstance(name, str) and name not in function.constants:
        made = [op for op in function.ops if any(value.name == name for value in op.outputs)]
        if not made or made[0].type not in ARRANGING:
            return None
        name = made[0].inputs.get("x")
    return function.constants[name] if isinstance(name, str) else None


def _of_type(function: Function, *types: str) -> Iterator[Op]:
    return (op for op in function.ops if op.type in types)


def _activations(function: Function) -> Iterator[Value]:
    made = (value for op in function.ops if op.materialise is None for value in op.outputs)
    return (value for value in (*function.inputs, *made) if value.dtype in FLOAT_BYTES)


def _elements(value: Value) -> int:
    return int(np.prod([n if isinstance(n, int) else 1 for n in value.shape]))


def _macs(function: Function, op: Op) -> int:
    """Multiply-adds of a conv, linear or matmul; a flexible axis counts as its largest size if one
    is stated."""
    out = _elements(function.values[op.outputs[0].name])
    if op.type == "matmul":
        shape = function.values[op.inputs["x"]].shape
        inner = shape[-2 if function.constant(op, "transpose_x", False) else -1]
    else:
        inner = (
            _elements(function.values[op.inputs["weight"]])
            // function.values[op.inputs["weight"]].shape[0]
        )
    flexible = max(
        (max(max(s) for s in shapes) for kind, shapes in function.flexible.values()), default=1
    )
    varies = any(isinstance(n, str) for n in function.values[op.outputs[0].name].shape)
    return out * (inner if isinstance(inner, int) else 1) * (flexible if varies else 1)


#: the rules by id, in the order of a report; each check gets a function f and its package p
RULES = {
    rule.id: rule
    for rule in (
        *(
            Rule(
                id,
                "error",
                FIG4,
                lambda f, p, why=why: (
                    (op.name, f"{op.type} runs on the CPU ({why})")
                    for op in f.ops
                    if UNSUPPORTED.get(op.type) == why
                ),
            )
            for id, why in {
                "fig4-topk": "TopK sampling ×",
                "fig4-scatter-gather": "Scatter/Gather ×",
                "fig4-comparison": "Comparison Ops ×",
                "fig4-layernorm": "Layernorm ×",
                "fig4-indexing": "Indexing ×",
                "fig4-control-flow": "Dynamic shapes/tensors ×",
                "fig4-custom": "Custom Operators ×",
            }.items()
        ),
        Rule("fig4-dilated", "error", FIG4, dilated),
        Rule("fig4-dynamic-index", "error", FIG4, dynamic_index),
        Rule("fig4-dynamic-shape", "warning", FIG4, dynamic_shape),
        Rule(
            "fig4-linear",
            "warning",
            f"{FIG4}, §3.2",
            lambda f, p: (
                (op.name, "a linear layer; write it as a 1×1 convolution")
                for op in _of_type(f, "linear")
            ),
        ),
        Rule(
            "risky-op",
            "warning",
            f"{FIG4}; {REPORTS}",
            lambda f, p: (
                (kind, f"{kind}: {RISKY[kind]}")
                for kind in f.counts()
                if kind in RISKY and kind not in RULED
            ),
        ),
        Rule(
            "unknown-op",
            "warning",
            "not in NPUMoE Figure 4",
            lambda f, p: (
                (kind, f"nothing is known about {kind} on the ANE")
                for kind in f.counts()
                if verdict(kind)[1] == UNKNOWN
            ),
        ),
        Rule(
            "fp32-compute",
            "error",
            REPORTS,
            lambda f, p: (
                (op.name, f"{op.type} computes in fp32; the ANE computes in fp16")
                for op in f.ops
                if op.materialise is None
                and any(v.dtype == "fp32" for v in op.outputs)
                and op.type != "cast"
            ),
        ),
        Rule("integer-compute", "error", "Apple: the Neural Engine computes in fp16", integers),
        Rule(
            "conv-3d",
            "error",
            f"{FIG4} has standard and depthwise convolutions only",
            lambda f, p: (
                (
                    op.name,
                    f"{op.type} over three axes runs on the CPU; the ANE has convolutions "
                    "over one and two",
                )
                for op in _of_type(f, "conv", "conv_transpose")
                if len(f.values[op.inputs["x"]].shape) == 5
            ),
        ),
        Rule(
            "fp32-inputs",
            "note",
            "coremltools: fp16 inputs from iOS 16 on",
            lambda f, p: (
                (value.name, "comes in fp32, so every call converts it")
                for value in f.inputs
                if value.dtype == "fp32"
            ),
        ),
        Rule("align-16", "warning", "NPUMoE §3.2", alignment),
        Rule(
            "row-padding",
            "warning",
            "Apple, Deploying Transformers on the Apple Neural Engine: the last axis is "
            "aligned to 64 bytes",
            padding,
        ),
        Rule(
            "weight-size",
            "warning",
            "NPUMoE §4.2",
            lambda f, p: (
                [
                    (
                        "weights",
                        f"{p.weight_bytes / 1e9:.2f} GB in one graph; above "
                        f"{MAX_GRAPH_BYTES / 1e9:.2f} GB it fell back to the CPU on an M2 "
                        "Ultra",
                    )
                ]
                if MAX_GRAPH_BYTES * 1.01 < p.weight_bytes <= WEIGHT_FILE_LIMIT
                else []
            ),
        ),  # the file aligns its entries
        Rule(
            "weight-limit",
            "error",
            REPORTS,
            lambda f, p: (
                [
                    (
                        "weights",
                        f"{p.weight_bytes / 2**30:.2f} GiB in one weight file; the limit is 2 GiB",
                    )
                ]
                if p.weight_bytes > WEIGHT_FILE_LIMIT
                else []
            ),
        ),
        Rule("channels", "error", REPORTS, channels),
        Rule("tiny-graph", "warning", f"{REPORTS}; the threshold is ours", tiny),
        Rule("per-block", "error", REPORTS, per_block),
        Rule(
            "quantised-conv",
            "warning",
            REPORTS,
            lambda f, p: (
                (
                    op.name,
                    "quantised weights can move what computes with them to the CPU; fp16 and "
                    "palettes do not",
                )
                for op in _of_type(
                    f, "constexpr_blockwise_shift_scale", "constexpr_affine_dequantize"
                )
            ),
        ),
        Rule("mask-constant", "warning", REPORTS, mask_constant),
        Rule(
            "state-axis",
            "error",
            REPORTS,
            lambda f, p: (
                (
                    value.name,
                    f"a state of {list(value.shape)}; its two last axes must be multiples of 32",
                )
                for value in f.states
                if any(n % 32 for n in value.shape[-2:])
            ),
        ),
        Rule(
            "state",
            "warning",
            REPORTS,
            lambda f, p: (
                (
                    value.name,
                    "a state; some report that the ANE rejects them, stateless prefill runs",
                )
                for value in f.states
            ),
        ),
        Rule(
            "rank",
            "error",
            "Core ML",
            lambda f, p: (
                (value.name, f"has {len(value.shape)} axes; Core ML takes 5")
                for value in _activations(f)
                if len(value.shape) > 5
            ),
        ),
    )
}
