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
from typing import Any, NamedTuple

import numpy as np

from moelab.ane.coreml.package import constant, dtype, fixed, read_package
from moelab.ane.plan import MAX_CHANNELS, MAX_GRAPH_MB
from moelab.base.files import beside
from moelab.base.table import text_table

TINY_MACS = 500_000  # multiply-adds below which a graph is called tiny; ours
ROW_BYTES = 64  # a row of the last axis takes a multiple of this
MAX_PADDING = 4  # padded size over real size from which we warn; ours
FLOAT_BYTES = {"fp16": 2, "fp32": 4}

#: rule → severity, errors first; and why it finds an operation → which
RULES, OPERATIONS = beside(__file__).values()
#: operation → (rule or "supported", why)
KNOWN = {
    kind: (rule, why)
    for rule, of in OPERATIONS.items()
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


def lint(path: str | Path) -> Report:
    """Judge a saved package by all rules; raises what `read_package` raises."""
    package = read_package(path)
    values = [*package.function.inputs.values()]
    found, size = [], package.weight_bytes
    for kind in {op.op_type: None for op in package.function.operations if op.op_type != "const"}:
        rule, why = KNOWN.get(kind, ("unknown-op", f"nothing is known about {kind} on the ANE"))
        if rule != "supported":
            found.append((rule, kind, why))
    if size > MAX_GRAPH_MB * 1.01e6:  # the file aligns its entries
        limit = f"above {MAX_GRAPH_MB / 1e3:.2f} GB it fell back to the CPU on an M2 Ultra"
        found.append(("weight-size", "weights", f"{size / 1e9:.2f} GB in one graph; {limit}"))
    for op in package.ops:
        values += op.outputs
        found += _of_operation(op)
    found += [one for value in values if dtype(value) in FLOAT_BYTES for one in _of_value(value)]
    flexible = [name for name, value in package.function.inputs.items() if None in _shape(value)]
    for name in flexible:
        text = "its shape is flexible; the ANE runs static graphs"
        found.append(("dynamic-shape", name, text))
    products = [op for op in package.ops if op.op_type in ("conv", "linear", "matmul")]
    if not flexible and (work := sum(map(_macs, products))) < TINY_MACS:
        text = f"only {work:,} multiply-adds; tiny graphs are left on the CPU"
        found.append(("tiny-graph", "function", text))
    found.sort(key=lambda one: list(RULES).index(one[0]))
    findings = [Finding(rule, RULES[rule], *said) for rule, *said in found]
    return Report(str(path), size, findings)


#: (rule, where, what)
Found = Iterator[tuple[str, str, str]]


def _shape(value: Any) -> list[int | None]:
    """Its sizes, None for those that may vary."""
    return [int(n) if isinstance(n, (int, np.integer)) else None for n in value.shape or ()]


def _of_operation(op: Any) -> Found:
    dilations = constant(op.inputs.get("dilations"))
    if dilations is not None and np.any(np.asarray(dilations) > 1):
        yield "dilated", op.name, f"dilated ({np.ravel(dilations).tolist()}), it runs on the CPU"
    if op.op_type != "cast" and any(dtype(value) == "fp32" for value in op.outputs):
        yield "fp32-compute", op.name, f"{op.op_type} computes in fp32; the ANE computes in fp16"
    for parameter in ("begin", "end", "size") if op.op_type.startswith("slice_") else ():
        if (value := op.inputs.get(parameter)) is not None and not fixed(value):
            text = f"{op.op_type} at a place known only at run time ({parameter}) runs on the CPU"
            yield "dynamic-index", op.name, text
    if op.op_type not in ("conv", "matmul"):
        return
    axes = (1, -1) if op.op_type == "conv" else (-2, -1)
    for value in (op.inputs["x"], op.inputs.get("y"), op.outputs[0]):
        if value is None or fixed(value):
            continue
        odd = [n for a in axes if (n := _shape(value)[a]) and n % 16 and n != 1]
        if odd:
            yield "align-16", op.name, f"{value.name} has a size of {odd[0]}, no multiple of 16"


def _of_value(value: Any) -> Found:
    shape = _shape(value)
    sizes = list(filter(None, shape))
    if max(sizes, default=0) > MAX_CHANNELS:
        text = f"an axis of {max(sizes):,}; the ANE takes {MAX_CHANNELS:,}"
        yield "channels", value.name, text
    if len(sizes) > 2 and shape[-1] and np.prod(sizes) > 1024:
        row = shape[-1] * FLOAT_BYTES[dtype(value)]
        factor = -(-row // ROW_BYTES) * ROW_BYTES / row
        if factor >= MAX_PADDING:
            text = f"a last axis of {shape[-1]} is padded to {ROW_BYTES} bytes: {factor:.0f} times"
            yield "row-padding", value.name, f"{text} its size"


def _macs(op: Any) -> int:
    """Multiply-adds of a conv, linear or matmul of static shapes."""
    if op.op_type == "matmul":
        each = _shape(op.inputs["x"])[-2 if constant(op.inputs.get("transpose_x")) else -1]
    else:
        each = np.prod(_shape(op.inputs["weight"])[1:])
    return int(each * np.prod(_shape(op.outputs[0])))
