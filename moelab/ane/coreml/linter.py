"""A linter for saved Core ML packages: will this graph run on the Neural Engine, and what does it
waste there?

A report lists every finding with its rule and severity
(sources: NPUMoE Fig. 4, §3.2, §4.2; coremltools' own limits; reports of people who shipped models):

    error     the ANE does not run it, or Core ML does not load it
    warning   it may fall back or wastes work

No operation but the supported ones goes without a finding. Verdicts are predictions: whether an
operation really ran on the ANE only a Mac's compute plan tells. Not judged: integer arithmetic,
convolutions over three axes, shapes of states, constants that a mask turns into NaN."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moelab.ane.coreml.package import Function, Op, Package, Value, read_package
from moelab.ane.plan import MAX_CHANNELS, MAX_GRAPH_BYTES
from moelab.base.table import text_table

#: the file format's limit on one weight file
WEIGHT_FILE_LIMIT = 2 * 2**30
TINY_MACS = 500_000  # multiply-adds below which a graph is called tiny; ours
ROW_BYTES = 64  # a row of the last axis takes a multiple of this
MAX_PADDING = 4  # padded size over real size from which we warn; ours
FLOAT_BYTES = {"fp16": 2, "fp32": 4}

#: rule → severity, errors first; by NPUMoE Figure 4 ([4]), its text, or reports of people who ran
#: models on the ANE ([R])
RULES = {
    "unsupported-op": "error",  # [4]
    "dilated": "error",  # [4]
    "dynamic-index": "error",  # [4]
    "fp32-compute": "error",  # [R]
    "weight-limit": "error",  # [R]
    "channels": "error",  # [R]
    "dynamic-shape": "warning",  # [4]
    "risky-op": "warning",  # [4], [R]
    "unknown-op": "warning",  # not in [4]
    "align-16": "warning",  # §3.2
    "row-padding": "warning",  # Apple, Deploying Transformers on the Apple Neural Engine
    "weight-size": "warning",  # §4.2
    "tiny-graph": "warning",  # [R]; the threshold is ours
}
#: by Figure 4 or §3.2, and what rearranges or reduces statically
SUPPORTED = (
    "conv conv_transpose matmul softmax relu relu6 silu sigmoid gelu tanh erf leaky_relu softplus "
    "add sub mul real_div maximum minimum abs exp sqrt rsqrt square pow clip inverse identity cos "
    "sin split concat reshape transpose expand_dims squeeze slice_by_size stack reduce_mean "
    "reduce_sum reduce_max reduce_min reduce_sum_square reduce_l2_norm"
)
UNSUPPORTED = {
    "TopK sampling ×": "topk argsort reduce_argmax reduce_argmin",
    "Scatter/Gather ×": "gather gather_nd gather_along_axis scatter scatter_nd scatter_along_axis",
    "Comparison Ops ×": "greater greater_equal less less_equal equal not_equal",
    "Layernorm ×": "layer_norm instance_norm l2_norm",
    "Indexing ×": "non_zero non_maximum_suppression one_hot range_1d shape fill band_part cumsum",
    "Dynamic shapes/tensors ×": "while_loop cond list_gather make_list list_write",
    "Custom Operators ×": "custom_layer lstm gru rnn",
}
RISKY = {
    "Fig. 4 has linear layers as convolutions: write it as a 1×1 convolution": "linear",
    "static slices run; reports of clamping above 4094": "slice_by_index",
    "the static way to write a cache; contested on the ANE": "slice_update",
    "states on the ANE are contested": "read_state coreml_update_state write_state",
    "between fp16 and fp32: a hop to another unit": "cast",
    "copies what a broadcast would not": "tile",
    "needs a mask made by comparison": "select",
    "not in Fig. 4; usually folded into a convolution": "batch_norm",
    "not in Fig. 4": "pad",
    "quantised weights can move a convolution to the CPU": "constexpr_blockwise_shift_scale "
    "constexpr_affine_dequantize constexpr_lut_to_dense",
}
#: operation → (rule, why)
FOUND = {
    kind: (rule, why)
    for rule, of in (("unsupported-op", UNSUPPORTED), ("risky-op", RISKY))
    for why, kinds in of.items()
    for kind in kinds.split()
}


class Finding(NamedTuple):
    """One finding of a rule in a package."""

    rule: str
    severity: str
    where: str
    text: str


class Report(NamedTuple):
    """What the linter has to say of a package: findings, errors first."""

    path: str
    weight_bytes: int
    findings: list[Finding]

    @property
    def clean(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def table(self) -> str:
        """Findings, as text."""
        found = [[f.severity, f.rule, f.where, f.text] for f in self.findings]
        lines = [
            f"{self.path}: {self.weight_bytes / 1e6:,.1f} MB of weights, "
            f"{'clean' if self.clean else 'not clean'}",
            *([text_table(["severity", "rule", "where", "finding"], found)] if found else ()),
        ]
        return "\n".join(lines)


def lint(package: Package | str | Path) -> Report:
    """Judge a saved package by all rules; raises what `read_package` raises."""
    package = package if isinstance(package, Package) else read_package(package)
    functions = package.functions.values()
    found = dict.fromkeys(  # functions that share weights repeat what is said of these
        one for function in functions for one in (*_of_function(function), *_of_weights(package))
    )
    findings = [Finding(rule, RULES[rule], *said) for rule, *said in found]
    findings.sort(key=lambda finding: list(RULES).index(finding.rule))
    return Report(str(package.path), package.weight_bytes, findings)


#: (rule, where, what)
Found = Iterator[tuple[str, str, str]]


def _of_weights(package: Package) -> Found:
    size = package.weight_bytes
    if size > WEIGHT_FILE_LIMIT:
        yield "weight-limit", "weights", f"{size / 2**30:.2f} GiB in one file; the limit is 2 GiB"
    elif size > MAX_GRAPH_BYTES * 1.01:  # the file aligns its entries
        limit = f"above {MAX_GRAPH_BYTES / 1e9:.2f} GB it fell back to the CPU on an M2 Ultra"
        yield "weight-size", "weights", f"{size / 1e9:.2f} GB in one graph; {limit}"


def _of_function(function: Function) -> Found:
    for kind in function.counts():
        if kind in FOUND:
            rule, why = FOUND[kind]
            yield rule, kind, why
        elif kind not in SUPPORTED.split():
            yield "unknown-op", kind, f"nothing is known about {kind} on the ANE"
    for value in function.inputs:
        if value.name in function.flexible or any(isinstance(n, str) for n in value.shape):
            yield "dynamic-shape", value.name, "its shape is flexible; the ANE runs static graphs"
    made = [op for op in function.ops if op.materialise is None]
    for op in made:
        yield from _of_operation(function, op)
    for value in (*function.inputs, *(value for op in made for value in op.outputs)):
        if value.dtype in FLOAT_BYTES:
            yield from _of_value(value)
    products = [op for op in made if op.type in ("conv", "linear", "matmul")]
    work = sum(_macs(function, op) for op in products)
    if work < TINY_MACS and not function.flexible:
        text = f"only {work:,} multiply-adds; tiny graphs are left on the CPU"
        yield "tiny-graph", "function", text


def _of_operation(function: Function, op: Op) -> Found:
    dilations = function.constant(op, "dilations")
    if dilations is not None and np.any(np.asarray(dilations) > 1):
        yield "dilated", op.name, f"dilated ({np.ravel(dilations).tolist()}), it runs on the CPU"
    if op.type != "cast" and any(value.dtype == "fp32" for value in op.outputs):
        yield "fp32-compute", op.name, f"{op.type} computes in fp32; the ANE computes in fp16"
    for parameter in ("begin", "end", "size") if op.type.startswith("slice_") else ():
        if op.inputs.get(parameter) not in (None, *function.constants):
            text = f"{op.type} at a place known only at run time ({parameter}) runs on the CPU"
            yield "dynamic-index", op.name, text
    given = (op.inputs.get(parameter) for parameter in ("x", "y"))
    names = [*(name for name in given if isinstance(name, str)), op.outputs[0].name]
    for name in names if op.type in ("conv", "matmul") else ():
        shape = function.values[name].shape
        if name in function.constants or len(shape) < 2:
            continue
        axes = (1, -1) if op.type == "conv" else (-2, -1)
        odd = [shape[a] for a in axes if isinstance(n := shape[a], int) and n % 16 and n != 1]
        if odd:
            yield "align-16", op.name, f"{name} has a size of {odd[0]}, no multiple of 16"


def _of_value(value: Value) -> Found:
    sizes = [n for n in value.shape if isinstance(n, int)]
    if max(sizes, default=0) > MAX_CHANNELS:
        text = f"an axis of {max(sizes):,}; the ANE takes {MAX_CHANNELS:,}"
        yield "channels", value.name, text
    if len(sizes) > 2 and sizes[-1] == value.shape[-1] and np.prod(sizes) > 1024:
        row = sizes[-1] * FLOAT_BYTES[value.dtype]
        factor = -(-row // ROW_BYTES) * ROW_BYTES / max(row, 1)
        if factor >= MAX_PADDING:
            text = f"a last axis of {sizes[-1]} is padded to {ROW_BYTES} bytes: {factor:.0f} times"
            yield "row-padding", value.name, f"{text} its size"


def _macs(function: Function, op: Op) -> int:
    """Multiply-adds of a conv, linear or matmul; a flexible axis counts as 1."""

    def size(*shape: int | str) -> int:
        return int(np.prod([n for n in shape if isinstance(n, int)]))

    out = size(*function.values[op.outputs[0].name].shape)
    if op.type == "matmul":
        shape = function.values[op.inputs["x"]].shape
        return out * size(shape[-2 if function.constant(op, "transpose_x", False) else -1])
    weight = function.values[op.inputs["weight"]].shape
    return out * size(*weight[1:])
